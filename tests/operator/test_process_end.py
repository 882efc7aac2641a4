"""Programs that end while MXNet still computes with our operator: promptly, with their exit
code."""

import os
import subprocess
import sys
import time

import pytest
from cases import first

START = """
import atexit, ctypes

def stay():
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(900_000), None)

# First in, last out: MXNet's threads go on for a second after Python has freed its memory.
atexit.register(stay)

import signal, sys, threading, time
import ece408_op, mxnet as mx, numpy as np
from ece408_op import dispatch
from mxnet import autograd, gluon

x, w = mx.nd.ones((16, 8, 40, 40)), mx.nd.ones((16, 8, 3, 3))

def convolve(backend=None):
    return ece408_op.Convolution(
        x, w, kernel=(3, 3), num_filter=16, no_bias=True, backend=backend
    )

def record(backend=None):
    w.attach_grad()
    with autograd.record():
        y = convolve(backend)
    y.backward()

def net(**flags):
    made = gluon.nn.HybridSequential()
    for _ in range(3):
        made.add(ece408_op.Conv2D(8, 3, activation="relu"), gluon.nn.BatchNorm())
    made.initialize()
    if flags:
        made.hybridize(**flags)
    return made

def train(net, steps=10):
    images = x.copy()  # MXNet does not record the same array on two threads at once
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    for _ in range(steps):
        with autograd.record():
            loss = net(images).mean()
        loss.backward()
        trainer.step(1)

def never(*arguments, **keywords):
    time.sleep(1000)

def end(code=0):
    print(time.monotonic(), flush=True)
    sys.exit(code)
"""

# By kind: the rest of a program, which calls `end`; and its exit code, unless 0.
PROGRAMS = {
    "forward": "for _ in range(30): convolve('reference')\nend()",
    "compiled": "for _ in range(300): convolve()\nend()",
    "recorded": "for _ in range(30): record()\nend()",
    "recorded_slow": "for _ in range(5): record('reference')\nend()",
    "hybridized": "train(net(active=True))\nend()",
    "static": "train(net(static_alloc=True, static_shape=True))\nend()",
    "several_nets": "for _ in range(3): train(net(), 4)\nend()",
    "threads": (
        "threads = [threading.Thread(target=train, args=(net(), 5)) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "end()"
    ),
    "threads_that_go_on": (
        "nets = [net(), net(static_alloc=True)]\n"
        "for made in nets: made(x).wait_to_read()\n"
        "for made in nets:\n"
        "    threading.Thread(target=train, args=(made, 10**6), daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "end()"
    ),
    "module": (
        "data = mx.io.NDArrayIter(np.ones((320, 8, 40, 40), np.float32), np.zeros(320), 16)\n"
        "made = mx.sym.Variable('data')\n"
        "made = ece408_op.Convolution(made, kernel=(3, 3), num_filter=16)\n"
        "made = mx.sym.FullyConnected(mx.sym.Flatten(made), num_hidden=10)\n"
        "module = mx.mod.Module(mx.sym.SoftmaxOutput(made, name='softmax'))\n"
        "def stop(state):\n"
        "    if state.nbatch == 3: end(7)\n"
        "module.fit(data, num_epoch=1, batch_end_callback=stop)"
    ),
    "exception": "train(net())\nprint(time.monotonic(), flush=True)\nraise ValueError('mine')",
    "data_loader": (
        "class Images(gluon.data.Dataset):\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i): return np.full((8, 40, 40), i, np.float32)\n"
        "made = net()\n"
        "for batch in gluon.data.DataLoader(Images(), batch_size=8, num_workers=2):\n"
        "    with autograd.record(): loss = made(batch).mean()\n"
        "    loss.backward()\n"
        "end()"
    ),
    "op_times": (
        "log = ece408_op.op_times()\nlog.__enter__()\ntrain(net())\n"
        "for _ in range(30): convolve()\nend()"
    ),
    "never_done": "dispatch.forward = never\nrecord()\ntime.sleep(0.5)\nend(6)",
    "never_done_compiled": (
        "dispatch.forward = never\nconvolve('reference')\ntime.sleep(0.5)\nend(6)"
    ),
    "os_exit": "import os\ntrain(net())\nprint(time.monotonic(), flush=True)\nos._exit(5)",
}
EXIT_CODES = {"module": 7, "exception": 1, "never_done": 6, "never_done_compiled": 6, "os_exit": 5}
OFTEN_WRONG = ("recorded", "never_done", "threads_that_go_on")


def _start(kind):
    return subprocess.Popen(
        [sys.executable, "-c", START + PROGRAMS[kind]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MXNET_SUBGRAPH_VERBOSE": "0"},
    )


def _seconds_to_end(process):
    """Return the seconds from the program's last line to the end of its process, within a
    minute."""
    said = float(process.stdout.readline())
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return time.monotonic() - said


def _check_end(kind):
    with _start(kind) as process:
        seconds = _seconds_to_end(process)
        complaints = process.stderr.read()
    assert process.returncode == EXIT_CODES.get(kind, 0), complaints
    expected = "ValueError: mine\n" if kind == "exception" else ""
    assert complaints.endswith(expected), complaints
    assert expected or not complaints, complaints
    return seconds


@pytest.mark.parametrize("kind", first(2, OFTEN_WRONG))
def test_a_program_ends_while_its_work_is_in_flight(kind):
    _check_end(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_fifty_of_fifty_programs_end(kind):
    assert max(_check_end(kind) for _ in range(50)) < 5


def test_a_failure_found_at_the_end_is_one_line(run_python):
    ending = "w[:] = 0\nmx.nd.waitall()\nrecord()\nend(9)"
    result = run_python(START + ending, ECE408_ISA="mmx")
    assert result.returncode == 9
    assert result.stderr.startswith("ece408: ")
    assert result.stderr.count("\n") == 1


def test_what_outlives_modules_is_freed_in_silence(run_python, kept):
    """An executor, and a network on the GPU, in a module that Python clears after ours."""
    result = run_python(
        """
import threading
import ece408_op, mxnet as mx
y = ece408_op.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=4)
threading.kept = y.simple_bind(mx.cpu(), grad_req="null", x=(1, 3, 6, 6))
threading.kept.forward()[0].wait_to_read()
x = mx.nd.ones((2, 3))
dense = mx.sym.FullyConnected(mx.sym.Variable("x"), num_hidden=1, no_bias=True, name="dense")
with ece408_op.settings.override(backend="emulator"):
    threading.other = ece408_op.to_gpu(dense, {"dense_weight": mx.nd.ones((1, 3))})
    threading.other(x).wait_to_read()
""",
        ECE408_CACHE=str(kept),
    )
    assert result.returncode == 0
    assert "Exception ignored" not in result.stderr
