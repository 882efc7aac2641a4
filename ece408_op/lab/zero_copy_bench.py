"""Our operator on MXNet's own GPU arrays, beside MXNet's Convolution in the same process."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..api import Convolution
from ..backends.cpu import CpuBackend
from ..errors import surfaced
from ..mxnet_import import load_mxnet
from ..op_log import op_times
from ..problem import ConvProblem

_WARM_UPS = 3


@dataclass(frozen=True)
class Row:
    """One shape: whether the results were exact on whole numbers, and all samples, in seconds.

    `calls` is the time from our operator's call to its complete result, and `kernels` how long
    the kernel ran within each; `native` is the same call of MXNet's Convolution, whose largest
    difference from the exact result is `native_error`. The first calls are left out of both but
    for `native_first`, in which cuDNN searches for its algorithm.
    """

    name: str
    problem: str
    kernel: str
    exact: bool
    calls: tuple[float, ...]
    kernels: tuple[float, ...]
    native: tuple[float, ...]
    native_first: float
    native_error: float

    @property
    def overhead_us(self) -> float:
        """Microseconds that a call takes beyond its kernel, the median."""
        return 1e6 * statistics.median(c - k for c, k in zip(self.calls, self.kernels))


def measure(name: str, problem: ConvProblem, samples: int) -> Row:
    """Check and time one problem, ours and MXNet's calls in turn, on the first GPU."""
    mx = load_mxnet()
    rng = np.random.default_rng(408)
    x = rng.integers(0, 8, problem.x_shape).astype(np.float32)
    w = rng.integers(-4, 5, problem.w_shape).astype(np.float32)
    on_gpu = [mx.nd.array(array, ctx=mx.gpu()) for array in (x, w)]
    options: dict[str, Any] = {
        "kernel": problem.kernel,
        "num_filter": problem.filters,
        "no_bias": True,
    }

    def ours() -> Any:
        return Convolution(*on_gpu, **options)

    def native() -> Any:
        return mx.nd.Convolution(*on_gpu, **options)

    with surfaced(), op_times() as log:
        expected = _on_the_cpu(problem, x, w)
        exact = np.array_equal(ours().asnumpy(), expected)
        start = time.perf_counter()
        error = float(np.abs(native().asnumpy() - expected).max())
        native_first = time.perf_counter() - start
        for _ in range(_WARM_UPS):
            _seconds(ours), _seconds(native)
        del log[:]
        pairs = [(_seconds(ours), _seconds(native)) for _ in range(samples)]
    kernels = tuple(entry.gpu.kernel_seconds for entry in log if entry.gpu is not None)
    calls, natives = zip(*pairs)
    kernel = log[0].kernel
    return Row(name, str(problem), kernel, exact, calls, kernels, natives, native_first, error)


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
    lines = [
        "| shape | problem | kernel | exact | kernel, ms | our call, ms | overhead, us | "
        "MXNet's call, ms | times faster | MXNet's first call, ms | its largest error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        call, kernel, native = (
            1e3 * statistics.median(samples) for samples in (row.calls, row.kernels, row.native)
        )
        lines.append(
            f"| {row.name} | {row.problem} | {row.kernel} | {'yes' if row.exact else 'NO'} | "
            f"{kernel:.3f} | {call:.3f} | {row.overhead_us:.0f} | {native:.3f} | "
            f"{native / call:.1f} | {1e3 * row.native_first:.0f} | {row.native_error:g} |"
        )
    faster = math.exp(
        statistics.fmean(
            math.log(statistics.median(row.native) / statistics.median(row.calls)) for row in rows
        )
    )
    samples = len(rows[0].calls)
    lines += ["", f"{samples} samples each. Geometric mean of times faster: {faster:.1f}."]
    return "\n".join(lines)


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON, with every sample."""
    return {"rows": [dataclasses.asdict(row) for row in rows]}
