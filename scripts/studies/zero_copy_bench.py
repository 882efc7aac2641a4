"""Our operator on MXNet's own GPU arrays, beside MXNet's Convolution in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.backends.cpu.backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.runtime import device, launcher
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED
from ece408_op.bench.summary import summary
from ece408_op.errors import surfaced
from ece408_op.files import markdown
from ece408_op.op_log import op_times
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.memory import pointer
from ece408_op.problem import ConvProblem

_WARM_UPS = 3
# The samples of a `Row`.
_SAMPLED = ("ops", "calls", "native")


@dataclass(frozen=True)
class Row:
    """One shape: whether the results were exact on whole numbers, and all samples, in seconds.

    `bare` is the kernel alone, launched again and again without a pause. `ops` is the operator's
    forward call as MXNet makes it (the course's Op Time), `calls` the whole way from an
    executor's call to its complete result. `native` is the same as `calls` for MXNet's
    Convolution, whose largest difference from the exact result is `native_error`, and whose first
    call, in which cuDNN searches for its algorithm, is `native_first`.
    """

    name: str
    problem: str
    kernel: str
    exact: bool
    bare: float
    ops: tuple[float, ...]
    calls: tuple[float, ...]
    native: tuple[float, ...]
    native_first: float
    native_error: float

    @property
    def overhead_us(self) -> float:
        """Microseconds that the operator's forward call takes beyond its kernel, the median."""
        return 1e6 * (statistics.median(self.ops) - self.bare)


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
        for _ in range(_WARM_UPS):
            _seconds(ours), _seconds(native)
        del log[:]
        pairs = [(_seconds(ours), _seconds(native)) for _ in range(samples)]
    ops = tuple(entry.seconds for entry in log)
    calls, natives = zip(*pairs)
    bare = _bare_kernel(problem, arrays, result, samples)
    kernel = log[0].kernel
    return Row(name, str(problem), kernel, exact, bare, ops, calls, natives, native_first, error)


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


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call().wait_to_read()
    return time.perf_counter() - start


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown, medians of the samples."""
    head = [
        "shape",
        "problem",
        "kernel",
        "exact",
        "kernel alone, ms",
        "op time, ms",
        "overhead, us",
    ]
    head += ["whole call, ms", "MXNet's Convolution, ms", "times faster"]
    head += ["its first call, ms", "its largest error"]
    lines = []
    for row in rows:
        op, call, native = (
            1e3 * statistics.median(samples) for samples in (row.ops, row.calls, row.native)
        )
        lines.append(
            [
                *(row.name, row.problem, row.kernel, "yes" if row.exact else "NO"),
                *(f"{1e3 * row.bare:.3f}", f"{op:.3f}", f"{row.overhead_us:.0f}", f"{call:.3f}"),
                *(f"{native:.3f}", f"{native / call:.1f}", f"{1e3 * row.native_first:.0f}"),
                f"{row.native_error:g}",
            ]
        )
    samples_each = f"{len(rows[0].calls)} samples each; calls through a bound executor."
    return f"{markdown.table(head, lines)}\n\n{samples_each}"


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "rows": [
            {**vars(row), **{name: summary(getattr(row, name)) for name in _SAMPLED}}
            for row in rows
        ]
    }
