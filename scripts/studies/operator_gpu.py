"""Our operator on MXNet's own GPU arrays, beside MXNet's Convolution in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.runtime import device, launcher, pause
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED
from ece408_op.bench import shapes
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import NoUsableGpu, surfaced
from ece408_op.op_log import op_times
from ece408_op.operator import gpu_support
from ece408_op.operator.array_memory import pointer
from ece408_op.operator.loading import load_mxnet
from ece408_op.problem import ConvProblem

from .bench_request import Request

_WARM_UPS = 3
# Calls enqueued without a wait between them.
_SERIES = 20
# Upper bound of the host's time to enqueue a launch, in microseconds.
_ENQUEUING_US = 50
ABOUT = (
    "From a bound executor's call to its complete result, on whole numbers. `kernel ms` is the "
    "kernel alone, launched repeatedly, and `op ms` the operator's forward call by MXNet; `beyond "
    "us` is a call's time without the kernel. MXNet's first call, in "
    "which cuDNN searches for its algorithm, and its error are in `mxnet first ms` and `mxnet "
    f"error`. {_SERIES} calls in a row have one wait, for the last."
)


def rows(request: Request) -> Iterator[Row]:
    """Yield two rows for each case and batch: a single call, and several in a row. Raises
    `NoUsableGpu` if MXNet is built for the CPU."""
    if not load_mxnet().runtime.Features().is_enabled("CUDA"):
        raise NoUsableGpu(f"{gpu_support.reason_against()}; pip install 'ece408_op[cu117]'")
    for case in request.cases:
        for batch in request.batches:
            problem = shapes.find(case if "," not in case else f"b1,{case}", batch)
            for row in measure(problem, request.repeat):
                yield {"case": case, "batch": batch, **row}


def measure(problem: ConvProblem, samples: int) -> list[Row]:
    """Check and time one problem, our calls and MXNet's in turn, on the first GPU."""
    mx = load_mxnet()
    rng = np.random.default_rng(408)
    x = rng.integers(0, 8, problem.x_shape).astype(np.float32)
    w = rng.integers(-4, 5, problem.w_shape).astype(np.float32)
    arrays = {"data": mx.nd.array(x, ctx=mx.gpu()), "weight": mx.nd.array(w, ctx=mx.gpu())}
    ours = _executor(mx.sym.Custom, problem, arrays, op_type="ece408_conv")
    native = _executor(mx.sym.Convolution, problem, arrays)
    with surfaced(), op_times() as log:
        expected = _on_the_cpu(problem, x, w)
        exact = np.array_equal(ours().asnumpy(), expected)
        start = time.perf_counter()
        result = native()
        result.wait_to_read()
        native_first = time.perf_counter() - start
        error = float(np.abs(result.asnumpy() - expected).max())
        del log[:]
        for _ in range(_WARM_UPS + samples):
            _seconds(ours)
    ops = [entry.seconds for entry in log[_WARM_UPS:]]
    kernel = log[0].kernel
    # The log of op times makes calls wait for the GPU.
    with surfaced():
        takes = [_in_turn(ours, native, bool(turn % 2)) for turn in range(_WARM_UPS + samples)]
    calls, natives, series, native_series = zip(*takes[_WARM_UPS:])
    bare = _bare_kernel(problem, arrays, result, samples)
    alone = {
        **{"op_ms": 1e3 * statistics.median(ops), "mxnet_first_ms": 1e3 * native_first},
        **{"mxnet_error": error, **_compared("a call", kernel, bare, calls, natives)},
    }
    if not exact:
        alone["failures"] = {OURS: "the result is not exact"}
    return [alone, _compared(f"{_SERIES} calls in a row", kernel, bare, series, native_series)]


def _compared(
    what: str, kernel: str, bare: float, ours: Sequence[float], native: Sequence[float]
) -> Row:
    """Return a row of times in seconds."""
    ms = {OURS: summary([1e3 * s for s in ours]), "mxnet": summary([1e3 * s for s in native])}
    beyond = 1e6 * (statistics.median(ours) - bare)
    figures = {"kernel": kernel, "kernel_ms": 1e3 * bare, "beyond_us": beyond}
    return {"direction": f"forward, {what}", **figures, "ms": ms}


def _in_turn(ours: Callable[[], Any], native: Callable[[], Any], ours_first: bool) -> list[float]:
    """Return seconds of one call each, then per call of several in a row. The order alternates
    between turns: a call's host time depends on the one before it."""
    order = (ours, native) if ours_first else (native, ours)
    takes = {(call, count): _seconds(call, count) for count in (1, _SERIES) for call in order}
    return [takes[call, count] for count in (1, _SERIES) for call in (ours, native)]


def _executor(
    operator: Callable[..., Any], problem: ConvProblem, arrays: dict[str, Any], **more: str
) -> Callable[[], Any]:
    """Return a call of a network with only this layer, on fixed arrays."""
    mx = load_mxnet()
    symbol = operator(
        *(mx.sym.Variable(name) for name in arrays),
        kernel=problem.kernel,
        num_filter=problem.filters,
        no_bias=True,
        **more,
    )
    executor = symbol.bind(mx.gpu(), arrays, grad_req="null")
    return lambda: executor.forward(is_train=False)[0]


def _bare_kernel(problem: ConvProblem, arrays: dict[str, Any], y: Any, launches: int) -> float:
    """Return the seconds of one kernel launch, averaged over `launches` consecutive launches."""
    gpu = device.get(0)
    x, w = (pointer(array) for array in arrays.values())
    convolution = work.forward(problem, x, w, None, pointer(y), False, None)
    (plan,) = convolution.plans(gpu, problem.batch)
    with gpu.active(), gpu.lane(plan.workspace_bytes) as lane:
        loaded = launcher.load(gpu, plan)
        pointers = {**convolution.addresses, "workspace": lane.device}
        lane.launch(loaded, pointers)
        lane.launch(pause.load(gpu, _ENQUEUING_US * launches), {})
        lane.mark(BEGIN)
        for _ in range(launches):
            lane.launch(loaded, pointers)
        lane.mark(COMPUTED)
        lane.wait()
        return lane.seconds(BEGIN, COMPUTED) / launches


def _on_the_cpu(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.empty(problem.y_shape, np.float32)
    CpuBackend().forward(problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data, False)
    return y


def _seconds(call: Callable[[], Any], count: int = 1) -> float:
    """Return the seconds per call of `count` calls, with a wait after the last."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    call().wait_to_read()
    return (time.perf_counter() - start) / count
