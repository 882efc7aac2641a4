"""What the machine itself can do: the ceilings that a benchmark's floors come from."""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.cpu import native
from ..problem import ConvProblem

# Thousands of rounds of multiply-adds, a millisecond or so: on a busy machine some of many short
# runs are left alone, and hardly any long one.
_ROUNDS, _SHORT_RUNS = 200, 50
_FLOATS = 1 << 26  # 256 MiB: no cache holds it
_REPEAT = 5
_ALIGNMENT = 64


@dataclass(frozen=True)
class Ceilings:
    """Multiply-adds in GFLOP/s; stores past the caches and reads in GB/s, on memory touched.

    `fresh_gbs` are stores into memory that has no pages yet, where the kernel makes and clears
    them: what an output costs that is written for the first time.
    """

    gflops: float
    store_gbs: float
    read_gbs: float
    fresh_gbs: float

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of each, when something disturbed one of two measurements."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return Ceilings(*map(max, pairs))

    def compute_ms(self, problem: ConvProblem) -> float:
        """Milliseconds that the multiply-adds of a problem take at the ceiling."""
        return problem.flops / self.gflops / 1e6

    def memory_ms(self, problem: ConvProblem, fresh: bool = False) -> float:
        """Milliseconds to read each input and write each output once, on fresh pages or not."""
        written = 4 * int(np.prod(problem.y_shape))
        read = problem.bytes - written
        stores = self.fresh_gbs if fresh else self.store_gbs
        return (written / stores + read / self.read_gbs) / 1e6

    def floor_ms(self, problem: ConvProblem, fresh: bool = False) -> float:
        """The larger of the two: no kernel is faster that does all of the multiply-adds."""
        return max(self.compute_ms(problem), self.memory_ms(problem, fresh))


def measure(isa: str, threads: int) -> Ceilings:
    """The best of some runs of each, with one instruction set's vectors."""
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
    """Seconds to store into memory that has never been touched."""
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
