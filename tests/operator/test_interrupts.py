"""Ctrl-C while MXNet calls Python about new shapes is raised in the main program."""

import json
import re

import pytest
from cases import first

# Counts the outcomes of TRIES interrupts, each at a random moment of a loop: raised, lost, or
# another error.
PROGRAM = """
import collections, itertools, json, os, random, signal, sys, threading, time
import ece408_op, mxnet as mx, numpy as np
from mxnet import autograd, gluon

TRIES, KINDS, HANDLER = int(os.environ["TRIES"]), os.environ["KINDS"].split(), os.environ["HANDLER"]
OPTIONS = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
sizes = itertools.cycle((h, w) for h in range(8, 40) for w in range(8, 40))
weight = mx.nd.ones((4, 3, 3, 3))
weight.attach_grad()
symbol = ece408_op.Convolution(mx.sym.Variable("x"), name="c", **OPTIONS)

def image():
    return mx.nd.ones((1, 3, *next(sizes)))

def net():
    made = gluon.nn.HybridSequential()
    made.add(ece408_op.Conv2D(4, 3), ece408_op.Conv2D(4, 3))
    made.initialize()
    made.hybridize()
    made(image()).wait_to_read()
    return made

made = net()

def imperative():
    ece408_op.Convolution(image(), weight, **OPTIONS)

def recorded():
    with autograd.record():
        y = ece408_op.Convolution(image(), weight, **OPTIONS)
    y.backward()

def hybridized():
    made(image())

def hybridized_recorded():
    with autograd.record():
        y = made(image())
    y.backward()

def executor():
    symbol.simple_bind(mx.cpu(), x=(1, 3, *next(sizes))).forward()

class Stop(Exception):
    pass

handled, seen = [], 0

def note(number, frame):
    handled.append(number)
    if HANDLER == "raises":
        raise Stop

if HANDLER != "default":
    signal.signal(signal.SIGINT, note)

armed, sent = threading.Semaphore(0), 0

def send():
    global sent
    while True:
        armed.acquire()
        time.sleep(random.random() * 0.01)
        os.kill(os.getpid(), signal.SIGINT)
        sent += 1

threading.Thread(target=send, daemon=True).start()

def attempt(work, number):
    armed.release()
    late = 0
    while late < 20 and not (HANDLER == "notes" and len(handled) == number + 1):
        work()
        late += sent > number
    return "handled" if late < 20 else "lost"

def outcome(work):
    global seen
    try:
        result = attempt(work, seen)
    except (KeyboardInterrupt, Stop) as raised:
        result = type(raised).__name__
    except Exception as error:
        result = repr(error)
    seen += 1
    while sent < seen:
        time.sleep(0.001)
    return result

counts = {}
for kind in KINDS:
    globals()[kind]()
    mx.nd.waitall()
    counts[kind] = collections.Counter(outcome(globals()[kind]) for _ in range(TRIES))
    mx.nd.waitall()
counts["handler's calls"] = len(handled)
x = image()
y, expected = (f(x, weight, **OPTIONS) for f in (ece408_op.Convolution, mx.nd.Convolution))
counts["right after all"] = bool(np.array_equal(y.asnumpy(), expected.asnumpy()))
print(json.dumps(counts))
"""
KINDS = ("imperative", "recorded", "hybridized", "hybridized_recorded", "executor")
OUTCOMES = {"default": "KeyboardInterrupt", "raises": "Stop", "notes": "handled"}


# Python's message about an array of MXNet's whose constructor was interrupted before it had a
# handle, which MXNet's destructor requires.
UNFINISHED = re.compile(
    r"Exception ignored in: <function NDArrayBase\.__del__ .*\n"
    r"Traceback \(most recent call last\):\n"
    r"(?:  .*\n)+"
    r"AttributeError: 'NDArray' object has no attribute 'handle'\n"
)


def _check_counts(run_python, tries, handler):
    result = run_python(
        PROGRAM,
        TRIES=str(tries),
        KINDS=" ".join(KINDS),
        HANDLER=handler,
        MXNET_SUBGRAPH_VERBOSE="0",
    )
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts == {
        **{kind: {OUTCOMES[handler]: tries} for kind in KINDS},
        "handler's calls": 0 if handler == "default" else tries * len(KINDS),
        "right after all": True,
    }
    assert UNFINISHED.sub("", result.stderr) == ""


@pytest.mark.parametrize("handler", first(1, OUTCOMES))
def test_interrupts_arrive_while_new_shapes_are_met(run_python, handler):
    _check_counts(run_python, 8, handler)


@pytest.mark.slow
@pytest.mark.parametrize("handler", OUTCOMES)
def test_a_thousand_of_a_thousand_interrupts_arrive(run_python, handler):
    _check_counts(run_python, 1000, handler)


IN_TURN = """
import itertools, os, signal, sys, threading, time
sys.unraisablehook = lambda given: print("previous hook:", given.exc_type.__name__)
import ece408_op, mxnet as mx

# Before a fork.
x, w = mx.nd.ones((64, 8, 40, 40)), mx.nd.ones((16, 8, 3, 3))
ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True, backend="reference")
threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    child = os.fork()  # waits until the operator has ended
    if child == 0:
        os._exit(0)
    print("lost")
except KeyboardInterrupt:
    print("arrived", os.wait()[1])

# In a destructor, which Python calls and ignores the errors of.
class Failing:
    def __del__(self):
        raise error
for error in (ValueError(), SystemExit(), KeyboardInterrupt()):
    try:
        failing = Failing()
        del failing
        time.sleep(0.01)  # Python looks for what is to be raised after calls
        print("not raised")
    except KeyboardInterrupt:
        print("raised")

# A handler that sets another.
OPTIONS = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
x, w = mx.nd.ones((1, 3, 9, 9)), mx.nd.ones((4, 3, 3, 3))
w.attach_grad()

def once(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def is_ignored():
    with open("/proc/self/status") as file:
        mask = next(line.split()[1] for line in file if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)

for _ in range(40):
    signal.signal(signal.SIGINT, once)
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    with mx.autograd.record():
        while signal.getsignal(signal.SIGINT) is once:
            ece408_op.Convolution(x, w, **OPTIONS)
    assert is_ignored()
print("ok")
"""

TERMINATED = """
import os, signal, sys, threading, time
import ece408_op, mxnet as mx
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
w = mx.nd.ones((4, 3, 3, 3))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
w.attach_grad()
with mx.autograd.record():
    while True:
        x = mx.nd.ones((1, 3, 9, 9))
        ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=4, no_bias=True)
"""


def test_before_a_fork_in_a_destructor_and_by_a_handler_that_sets_another(run_python):
    """The first arrives in the parent only; what else cannot be raised goes to the hook before."""
    result = run_python(IN_TURN)
    hooked = ["previous hook: ValueError", "not raised", "previous hook: SystemExit", "not raised"]
    assert result.stdout.splitlines() == ["arrived 0", *hooked, "raised", "ok"]
    assert result.stderr == ""


def test_a_handler_that_ends_the_process_does(run_python):
    result = run_python(TERMINATED)
    assert (result.returncode, result.stderr) == (5, "")
