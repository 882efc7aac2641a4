"""Measured ceilings of the machine's arithmetic and memory, from which benchmarks derive floors."""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.cpu import native
from ..problem import ConvProblem

# In thousands: a run takes about a millisecond. On a busy machine some short runs are undisturbed,
# and hardly any long one.
_ROUNDS, _SHORT_RUNS = 200, 50
_FLOATS = 1 << 26  # 256 MiB, larger than any cache
_REPEAT = 5
_ALIGNMENT = 64


@dataclass(frozen=True)
class Ceilings:
    """Ceilings: multiply-adds in GFLOP/s; non-temporal stores and reads of touched memory in GB/s.

    `fresh_gbs` is the rate of stores to untouched memory, for which the operating system allocates
    and clears pages: the first write of an output.
    """

    gflops: float
    store_gbs: float
    read_gbs: float
    fresh_gbs: float

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher of each ceiling, in case something disturbed one of two
        measurements."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Ceilings(*map(max, pairs))

    def compute_ms(self, problem: ConvProblem) -> float:
        """Return the milliseconds of a problem's multiply-adds at the ceiling."""
        return problem.flops / self.gflops / 1e6

    def memory_ms(self, problem: ConvProblem, fresh: bool = False) -> float:
        """Return the milliseconds to read each input and write each output once, optionally to
        untouched pages."""
        written = 4 * int(np.prod(problem.y_shape))
        read = problem.bytes - written
        stores = self.fresh_gbs if fresh else self.store_gbs
        return (written / stores + read / self.read_gbs) / 1e6

    def floor_ms(self, problem: ConvProblem, fresh: bool = False) -> float:
        """Return the larger of both times, a lower bound for direct convolution."""
        return max(self.compute_ms(problem), self.memory_ms(problem, fresh))


def measure(isa: str, threads: int) -> Ceilings:
    """Measure each ceiling several times with one instruction set; return the best."""
    library, code = native.library(), native.ISA_CODES[isa]
    memory = np.ones(_FLOATS + _ALIGNMENT, np.float32)
    start = memory.ctypes.data + -memory.ctypes.data % _ALIGNMENT
    operations = library.ece408_ceiling_multiply_adds(_ROUNDS, threads, code)

    def multiply_adds() -> None:
        library.ece408_ceiling_multiply_adds(_ROUNDS, threads, code)

    def stores() -> None:
        library.ece408_ceiling_stores(start, _FLOATS, threads, code)

    def reads() -> None:
        library.ece408_ceiling_reads(start, _FLOATS, threads, code)

    fresh_s = min(_fresh_s(code, threads) for _ in range(_REPEAT))
    return Ceilings(
        operations / _best_s(multiply_adds, _SHORT_RUNS) / 1e9,
        4 * _FLOATS / _best_s(stores) / 1e9,
        4 * _FLOATS / _best_s(reads) / 1e9,
        4 * _FLOATS / fresh_s / 1e9,
    )


def _fresh_s(code: int, threads: int) -> float:
    """Return the seconds to store to untouched memory."""
    with mmap.mmap(-1, 4 * _FLOATS) as pages:
        memory = np.frombuffer(pages, np.float32)
        at = memory.ctypes.data
        begin = time.perf_counter()
        native.library().ece408_ceiling_stores(at, _FLOATS, threads, code)
        elapsed = time.perf_counter() - begin
        del memory
    return elapsed


def _best_s(run: Callable[[], None], repeat: int = _REPEAT) -> float:
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return min(samples)
