"""The backend `cuda` on a real GPU, through MXNet on the CPU: staged copies, bounds, failures."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from cases import every

import ece408_op
from ece408_op import errors, settings
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.cuda_backend import StagedBackend, ZeroCopyBackend
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device, launcher, page_locked
from ece408_op.backends.cuda.staged import staging
from ece408_op.backends.cuda.staged.staging import Staging
from ece408_op.bench import cuda_timer
from ece408_op.bench.compiling import compile_all
from ece408_op.files import resources
from ece408_op.operator.array_memory import pointer
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.gpu

COURSE = (
    *("b100,c1,h28,w28,m50,k5", "b100,c1,h64,w64,m6,k5", "b100,c6,h30,w30,m16,k5"),
    *("b100,c1,h48,w48,m6,k5", "b100,c6,h22,w22,m16,k5", "b100,c1,h70,w70,m12,k5"),
    "b100,c12,h33,w33,m24,k5",
)
OTHERS = (
    *("b1,c1,h1,w1,m1,k1", "b7,c3,h17,w13,m5,k3x2,s2x1,p1x2,d2x1,bias"),
    *("b9,c8,h12,w12,m12,k3,g4,bias", "b5,c6,h11,w9,m6,k3,p1,g6,float64"),
    *("b6,c5,h14,w15,m7,k4x3,bias,float16", "b3,c2,h64,w300,m3,k11x1,s3"),
)


def _arrays(problem, rng):
    shapes = (problem.x_shape, problem.w_shape, problem.bias_shape, problem.y_shape)
    return [rng.integers(-3, 4, shape).astype(problem.dtype) for shape in shapes]


def _addresses(*arrays):
    return [array.ctypes.data for array in arrays]


def _forward(backend, problem, arrays, y):
    x, w, bias = (array.ctypes.data for array in arrays[:3])
    return backend.forward(problem, x, w, bias if problem.bias else None, y.ctypes.data, False)


def _check_forward(problem, rng, oracle=None):
    arrays = _arrays(problem, rng)
    y, expected = (np.full(problem.y_shape, np.nan, problem.dtype) for _ in range(2))
    _forward(StagedBackend(), problem, arrays, y)
    _forward(oracle or CpuBackend(), problem, arrays, expected)
    np.testing.assert_array_equal(y, expected)


def _run_all(backend, problem, addresses, accumulate):
    """Run forward and gradients, from "x", "w", "bias", "dy" to "y", "dx", "dw", "dbias"."""
    a = addresses
    bias = a["bias"] if problem.bias else None
    backend.forward(problem, a["x"], a["w"], bias, a["y"], accumulate)
    backend.backward_data(problem, a["w"], a["dy"], a["dx"], accumulate)
    backend.backward_weight(problem, a["x"], a["dy"], a["dw"], a["dbias"], accumulate, accumulate)


@contextlib.contextmanager
def _on_the_gpu(arrays):
    """Yield addresses of copies of the arrays on the GPU, copied back after the block."""
    gpu = device.get(0)
    with gpu.active():
        blocks = {role: gpu.cuda.mem_alloc(array.nbytes) for role, array in arrays.items()}
        for role, block in blocks.items():
            gpu.cuda.memcpy_htod(block, arrays[role])
    yield {role: int(block) for role, block in blocks.items()}
    with gpu.active():
        for role, block in blocks.items():
            gpu.cuda.memcpy_dtoh(arrays[role], block)
            block.free()


@every(accumulate=[False, True], text=COURSE + OTHERS)
def test_every_direction_equals_the_cpus_staged_and_in_place(text, accumulate, rng):
    problem = ConvProblem.parse(text)
    x, w, bias, dy = _arrays(problem, rng)
    start = {"x": x, "w": w, "bias": bias, "dy": dy, "y": dy, "dx": x, "dw": w, "dbias": bias}
    expected, staged, in_place = (
        {role: array.copy() for role, array in start.items()} for _ in range(3)
    )
    if not accumulate:
        for arrays in (staged, in_place):
            for role in ("y", "dx", "dw", "dbias"):
                arrays[role].fill(np.nan)
    for backend, arrays in ((CpuBackend(), expected), (StagedBackend(), staged)):
        addresses = {role: array.ctypes.data for role, array in arrays.items()}
        _run_all(backend, problem, addresses, accumulate)
    with _on_the_gpu(in_place) as addresses:
        _run_all(ZeroCopyBackend(0), problem, addresses, accumulate)
    for arrays in (staged, in_place):
        for role, array in arrays.items():
            np.testing.assert_array_equal(array, expected[role], err_msg=role)


def test_through_mxnet_with_gradients(mx, rng):
    x, w, b = (mx.nd.array(rng.integers(-3, 4, s)) for s in ((8, 3, 20, 21), (4, 3, 3, 3), (4,)))
    results = []
    for backend in ("cuda", "cpu"):
        for array in (x, w, b):
            array.attach_grad()
        with errors.surfaced(), ece408_op.op_times() as log, mx.autograd.record():
            y = ece408_op.Convolution(x, w, b, kernel=(3, 3), num_filter=4, backend=backend)
            y.backward(mx.nd.ones(y.shape))
            results.append([a.asnumpy() for a in (y, x.grad, w.grad, b.grad)])
    for ours, theirs in zip(*results):
        np.testing.assert_array_equal(ours, theirs)
    assert {entry.backend for entry in log} == {"cpu"}


def test_the_log_says_what_kept_the_gpu_busy(mx):
    x, w = mx.nd.ones((64, 1, 70, 70)), mx.nd.ones((12, 1, 5, 5))
    with errors.surfaced(), ece408_op.op_times() as log:
        options = {"kernel": (5, 5), "num_filter": 12, "no_bias": True, "backend": "cuda"}
        ece408_op.Convolution(x, w, cuda_kernel="1_naive", **options).wait_to_read()
    (entry,) = log
    assert (entry.backend, entry.kernel) == ("cuda", "1_naive")
    assert 0 < entry.gpu.kernel_seconds < entry.seconds
    assert 0 < entry.gpu.copy_seconds < entry.seconds


def test_a_kernel_that_cannot_is_an_error_that_says_so(rng):
    problem = ConvProblem.parse("b2,c4,h9,w9,m4,k3,s2")
    with pytest.raises(errors.UnsupportedProblem, match=r"kernel 1_naive: .*without --kernel"):
        _forward(StagedBackend("1_naive"), problem, _arrays(problem, rng), np.empty(1))


@contextlib.contextmanager
def _least_free_memory(gpu):
    """Yield a list that, after the block, holds the least free memory of the GPU within it."""
    least, ended = [], threading.Event()

    def watch():
        with gpu.active():
            while not ended.wait(0.001):
                least[:] = [min([*least, gpu.free_bytes()])]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield least
    finally:
        ended.set()
        thread.join()


def _release_everything(gpu):
    with gpu.active():
        gpu._release_idle()
        return gpu.free_bytes()


@pytest.mark.alone
def test_a_whole_batch_within_64_mib(rng):
    gpu = device.get(0)
    problem = ConvProblem.parse("b10000,c12,h33,w33,m24,k5")
    small = dataclasses.replace(problem, batch=10)
    _check_forward(small, rng)  # compiles and loads, which takes memory
    before = _release_everything(gpu)
    with settings.override(gpu_memory="64M"), _least_free_memory(gpu) as least:
        _check_forward(problem, rng)
        assert 0 < gpu.reserved_bytes() <= 64 << 20
    # Each allocation is rounded up to GPU pages.
    assert before - least[0] <= (64 << 20) + (32 << 20)


@contextlib.contextmanager
def _all_but(gpu, nbytes):
    """Allocate all but this much of the GPU's memory."""
    _release_everything(gpu)
    blocks = []
    with gpu.active():
        for size in (1 << 34, 1 << 30, 1 << 26, 1 << 22):
            with contextlib.suppress(gpu.cuda.MemoryError):
                while gpu.free_bytes() - size > nbytes:
                    blocks.append(gpu.cuda.mem_alloc(size))
    try:
        yield
    finally:
        with gpu.active():
            for block in blocks:
                block.free()


@pytest.mark.alone
def test_a_gpu_that_is_full(rng):
    gpu = device.get(0)
    problem = ConvProblem.parse("b2000,c12,h33,w33,m24,k5")
    _check_forward(problem, rng)
    with _all_but(gpu, 24 << 20), settings.override(gpu_memory="2G"):
        _check_forward(problem, rng)  # in smaller chunks
        assert gpu.reserved_bytes() < 32 << 20
    large = ConvProblem.parse("b2,c64,h256,w256,m64,k3")
    arrays, y = _arrays(large, rng), np.empty(large.y_shape, "float32")
    with _all_but(gpu, 8 << 20), pytest.raises(errors.NotEnoughMemory, match="GPU_MEMORY"):
        _forward(StagedBackend(), large, arrays, y)
    _check_forward(problem, rng)


def test_a_kernel_that_does_not_compile(mx, tmp_path, monkeypatch):
    broken = tmp_path / "kernels"
    shutil.copytree(resources.kernels_dir(), broken)
    source = broken / "cuda" / "general" / "general.cu"
    lines = source.read_text().count("\n")
    source.write_text(source.read_text() + "__device__ int broken() { return nothing; }\n")
    monkeypatch.setattr("ece408_op.backends.cuda.runtime.compiler.kernels_dir", lambda: broken)
    x, w = mx.nd.ones((2, 7, 19, 23)), mx.nd.ones((5, 7, 3, 2))
    options = {"kernel": (3, 2), "num_filter": 5, "no_bias": True, "stride": (3, 2)}
    fresh = settings.override(cache=tmp_path / "cache", kernel="general")
    with fresh, pytest.raises(errors.KernelCompileFailed) as caught, errors.surfaced():
        ece408_op.Convolution(x, w, backend="cuda", **options).wait_to_read()
    assert f"{source}:{lines + 1}: identifier" in str(caught.value)
    assert "-arch=sm_" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


_ONE_FORWARD = """
import numpy as np
from ece408_op.backends.cuda.cuda_backend import StagedBackend
from ece408_op.problem import ConvProblem
p = ConvProblem.parse("b3,c5,h19,w18,m7,k3x5,p1,bias")
x, w, b = (np.ones(s, "float32") for s in (p.x_shape, p.w_shape, p.bias_shape))
y = np.full(p.y_shape, np.nan, "float32")
StagedBackend().forward(p, *(a.ctypes.data for a in (x, w, b, y)), False)
print(y.sum())
"""


def test_processes_that_compile_at_once(tmp_path):
    environment = {**os.environ, "ECE408_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ONE_FORWARD],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(4)
    ]
    results = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [code for _, _, code in results] == [0] * 4, results
    assert len({out for out, _, _ in results}) == 1
    said = {line for _, err, _ in results for line in err.splitlines()}
    assert all(line.startswith("ece408: waiting for another process to compile") for line in said)
    assert len(list((tmp_path / "cuda-kernels").glob("*.cubin"))) == 1


_THOUSAND = """
import threading
import numpy as np
import ece408_op
import mxnet as mx
from ece408_op import errors
from ece408_op.backends.cuda.runtime import device

SHAPES = [
    ((4, 3, 20, 18), 8, 3),
    ((16, 1, 28, 28), 50, 5),
    ((9, 12, 33, 33), 24, 5),
    ((1, 5, 7, 9), 3, 2),
]
rng = np.random.default_rng(1)
cases = []
for shape, filters, kernel in SHAPES:
    x = mx.nd.array(rng.integers(-3, 4, shape))
    w = mx.nd.array(rng.integers(-3, 4, (filters, shape[1], kernel, kernel)))
    options = {"kernel": (kernel, kernel), "num_filter": filters, "no_bias": True}
    expected = ece408_op.Convolution(x, w, backend="reference", **options).asnumpy()
    cases.append((x, w, options, expected))
wrong = []

def forwards(count, first):
    for n in range(count):
        x, w, options, expected = cases[(first + n) % len(cases)]
        y = ece408_op.Convolution(x, w, backend="cuda", **options).asnumpy()
        if not np.array_equal(y, expected):
            wrong.append(n)

def both(count):
    threads = [threading.Thread(target=forwards, args=(count, first)) for first in (0, 2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    gpu = device.get(0)
    with gpu.active():
        return gpu.free_bytes()

with errors.surfaced():
    after_warm_up, after = both(50), both(500)
print(len(wrong), after_warm_up - after)
"""


@every(direction=["forward", "backward_weight"])
def test_parts_of_a_call_give_the_same_to_the_bit(gpu, direction, rng):
    """By the threads of several GPUs, or of one that stands for several."""
    problem = ConvProblem.parse("b3000,c6,h30,w30,m16,k5,bias")
    x, w, bias, y = (rng.standard_normal(a.shape).astype(np.float32) for a in _arrays(problem, rng))
    others = [device.get(number) for number in range(1, gpu.cuda.Device.count())] or [gpu]
    asked = {
        "forward": lambda: work.forward(problem, *_addresses(x, w, bias, y), False),
        "backward_weight": lambda: work.backward_weight(
            problem, *_addresses(x, y, w, bias), False, False
        ),
    }[direction]()
    outputs = (y,) if direction == "forward" else (w, bias)
    how = Staging(1 << 30, 4, launcher.load)
    found = set()
    for gpus in [[gpu], *[[gpu, *others]] * 10]:
        for each in outputs:
            each[:] = np.nan
        staging.compute(asked, gpus, how)
        found.add(tuple(each.tobytes() for each in outputs))
    assert len(found) == 1
    assert all(np.isfinite(each).all() for each in outputs)


@every(text=["b128,c128,h28,w28,m64,k3x3,p1x1", "b64,c32,h17,w19,m40,k5x5,p2x2"])
def test_gradients_for_w_are_right_in_run_after_run(gpu, text):
    """Groups of warps take turns at chunks, whose data sometimes arrives late."""
    problem = ConvProblem.parse(text)
    kernel = catalog.get("implicit_gemm_prepacked_backward_weight")
    layouts = kernel.layouts(problem, gpu.capability)
    layouts = [each for each in layouts if each.chunk_groups == 2][:6]
    plans = [kernel.plan(problem, gpu.capability, False, each) for each in layouts]
    compile_all(gpu, plans)
    with cuda_timer.bench(gpu, problem, "backward_weight") as runs:
        assert [runs.time(kernel, 200, plan).failure for plan in plans] == [None] * len(plans)


@pytest.mark.alone
def test_a_thousand_forwards_on_two_threads_leave_nothing_behind(run_python):
    result = run_python(_THOUSAND)
    assert (result.stdout, result.stderr, result.returncode) == ("0 0\n", "", 0)


def test_a_forked_child_is_told(run_python):
    code = _ONE_FORWARD + (
        "import os, sys; from ece408_op.errors import NoUsableGpu; child = os.fork()\n"
        "if not child:\n"
        "    try: StagedBackend().forward(p, *(a.ctypes.data for a in (x, w, b, y)), False)\n"
        "    except NoUsableGpu as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    result = run_python(code)
    assert "CUDA does not survive a fork" in result.stdout
    assert (result.stderr, result.returncode) == ("", 0)


def test_a_gpu_that_is_not_there(rng, monkeypatch):
    monkeypatch.setenv("ECE408_DEVICES", "99")
    problem = ConvProblem.parse("b2,c1,h9,w9,m4,k3")
    with pytest.raises(errors.NoUsableGpu, match=r"no GPU 99; there (is|are) \d+"):
        _forward(StagedBackend(), problem, _arrays(problem, rng), np.empty(1))


@pytest.mark.parametrize("term", ["2017fa", "2018sp", "2019sp", "2019fa"])
def test_m3_and_m4_score_as_m2(run_ece408, fashion_mnist, term):
    lines = {}
    for name in ("m2.1", "m3.1", "m4.1"):
        result = run_ece408(name, "1000", "--term", term)
        assert result.returncode == 0, result.stderr
        lines[name] = result.stdout.splitlines()
        times = result.stderr.count("copies")
        assert times == (0 if name == "m2.1" else result.stdout.count("Op Time: "))
    assert lines["m2.1"][-1] == lines["m3.1"][-1] == lines["m4.1"][-1]


def test_page_locked_arrays_are_used_in_place(mx, rng):
    """For a chain of two layers; ordinary arrays have the same results."""
    x = rng.integers(-2, 3, (600, 6, 40, 40))
    weights = [mx.nd.array(rng.integers(-2, 3, shape)) for shape in ((9, 6, 3, 3), (7, 9, 3, 3))]
    ordinary, locked = mx.nd.array(x), ece408_op.page_locked(mx.nd.array(x))

    def chain(data, backend):
        for w in weights:
            given = {"kernel": (3, 3), "num_filter": w.shape[0], "no_bias": True}
            data = ece408_op.Convolution(data, w, backend=backend, **given)
        return data

    expected = chain(ordinary, "cpu").asnumpy()
    addresses = set()
    for call in range(12):
        y = chain(ordinary if call % 3 else locked, "cuda")
        np.testing.assert_array_equal(y.asnumpy(), expected)
        covered = page_locked.pool.covers(pointer(y), y.size * 4)
        assert covered == (call > 0)
        addresses.add(pointer(y))
        y += 1
    assert len(addresses) <= 4


def test_a_fork_leaves_ordinary_memory(mx, rng):
    x, w = (mx.nd.array(rng.integers(-2, 3, s)) for s in ((600, 6, 40, 40), (9, 6, 3, 3)))
    given = {"kernel": (3, 3), "num_filter": 9, "no_bias": True, "backend": "cuda"}
    y = [ece408_op.Convolution(x, w, **given) for _ in range(3)][2]
    expected = y.asnumpy()
    locked = page_locked.pool.covers(pointer(y), y.size * 4)
    child = os.fork()
    if child == 0:
        os._exit(int(np.array_equal(y.asnumpy(), expected)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert locked
    assert not page_locked.pool.covers(pointer(y), y.size * 4)
    y += 1
    z = ece408_op.Convolution(2 * x, w, **given)
    np.testing.assert_array_equal(z.asnumpy(), 2 * expected)
    np.testing.assert_array_equal(y.asnumpy(), expected + 1)
