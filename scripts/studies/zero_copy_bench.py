"""Our operator on MXNet's own GPU arrays, beside MXNet's Convolution in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.runtime import device, launcher, pause
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED
from ece408_op.bench.summary import summary
from ece408_op.errors import surfaced
from ece408_op.files import markdown
from ece408_op.op_log import op_times
from ece408_op.operator.array_memory import pointer
from ece408_op.operator.loading import load_mxnet
from ece408_op.problem import ConvProblem

_WARM_UPS = 3
# Calls that are enqueued one after the other, without a wait between them.
_SERIES = 20
# What the host may take to enqueue a launch, in microseconds.
_ENQUEUING_US = 50
# The samples of a `Row`.
_SAMPLED = ("ops", "calls", "series", "native", "native_series")


@dataclass(frozen=True)
class Row:
    """One shape: whether the results were exact on whole numbers, and all samples, in seconds.

    `bare` is the kernel alone, launched again and again without a pause. `ops` is the operator's
    forward call as MXNet makes it (the course's Op Time), `calls` the whole way from an
    executor's call to its complete result, `series` what a call takes of several that are not
    waited for one by one. `native` and `native_series` are the same for MXNet's Convolution, whose
    largest difference from the exact result is `native_error`, and whose first call, in which cuDNN
    searches for its algorithm, is `native_first`.
    """

    name: str
    problem: str
    kernel: str
    exact: bool
    bare: float
    ops: tuple[float, ...]
    calls: tuple[float, ...]
    series: tuple[float, ...]
    native: tuple[float, ...]
    native_series: tuple[float, ...]
    native_first: float
    native_error: float

    def beyond_us(self, samples: Sequence[float]) -> float:
        """Microseconds that they take beyond the kernel, the median."""
        return 1e6 * (statistics.median(samples) - self.bare)


def measure(name: str, problem: ConvProblem, samples: int) -> Row:
    """Check and time one problem, ours and MXNet's calls in turn, on the first GPU."""
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
    ops = tuple(entry.seconds for entry in log[_WARM_UPS:])
    # The log of op times has calls wait for the GPU.
    with surfaced():
        takes = [_in_turn(ours, native, bool(turn % 2)) for turn in range(_WARM_UPS + samples)]
    calls, natives, series, native_series = zip(*takes[_WARM_UPS:])
    bare = _bare_kernel(problem, arrays, result, samples)
    of_ours = (name, str(problem), log[0].kernel, exact, bare, ops, calls, series)
    return Row(*of_ours, natives, native_series, native_first, error)


def _in_turn(ours: Callable[[], Any], native: Callable[[], Any], ours_first: bool) -> list[float]:
    """Seconds of a call of each, then of each in a row. Who is first changes from turn to turn:
    a call's host side depends on the one before it."""
    order = (ours, native) if ours_first else (native, ours)
    takes = {(call, count): _seconds(call, count) for count in (1, _SERIES) for call in order}
    return [takes[call, count] for count in (1, _SERIES) for call in (ours, native)]


def _executor(
    operator: Callable[..., Any], problem: ConvProblem, arrays: dict[str, Any], **more: str
) -> Callable[[], Any]:
    """A call of a network that is this one layer, on arrays that stay where they are."""
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
    """Seconds that one launch of the kernel takes, over `launches` launches in a row."""
    gpu = device.get(0)
    x, w = (pointer(array) for array in arrays.values())
    asked = work.forward(problem, x, w, None, pointer(y), False, None)
    (plan,) = asked.plans(gpu, problem.batch)
    with gpu.active(), gpu.lane(plan.workspace_bytes) as lane:
        loaded = launcher.load(gpu, plan)
        pointers = {**asked.addresses, "workspace": lane.device}
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
    """What a call takes, of `count` of which the last is waited for."""
    start = time.perf_counter()
    for _ in range(count - 1):
        call()
    call().wait_to_read()
    return (time.perf_counter() - start) / count


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown, medians of the samples."""
    head = ["shape", "problem", "kernel", "exact", "kernel alone, ms"]
    head += ["op time, ms", "beyond the kernel, us", "whole call, ms", "beyond the kernel, us"]
    head += ["MXNet's Convolution, ms", "times faster"]
    head += ["in a row, ms", "beyond the kernel, us", "MXNet's in a row, ms", "times faster"]
    head += ["MXNet's first call, ms", "its largest error"]
    lines = []
    for row in rows:
        op, call, series, native, native_series = (
            1e3 * statistics.median(getattr(row, name)) for name in _SAMPLED
        )
        lines.append(
            [
                *(row.name, row.problem, row.kernel, "yes" if row.exact else "NO"),
                *(f"{1e3 * row.bare:.4f}", f"{op:.4f}", f"{row.beyond_us(row.ops):.0f}"),
                *(f"{call:.4f}", f"{row.beyond_us(row.calls):.0f}"),
                *(f"{native:.4f}", f"{native / call:.2f}"),
                *(f"{series:.4f}", f"{row.beyond_us(row.series):.0f}"),
                *(f"{native_series:.4f}", f"{native_series / series:.2f}"),
                *(f"{1e3 * row.native_first:.0f}", f"{row.native_error:g}"),
            ]
        )
    samples_each = (
        f"{len(rows[0].calls)} samples each; calls through a bound executor, in a row {_SERIES} of "
        "which the last is waited for."
    )
    return f"{markdown.table(head, lines)}\n\n{samples_each}"


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "rows": [
            {**vars(row), **{name: summary(getattr(row, name)) for name in _SAMPLED}}
            for row in rows
        ]
    }
