"""Load balancer: assigns the chunks of a batch to GPUs by the speed measured in earlier calls."""

from __future__ import annotations

import heapq
import math
import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence

# Number of recent calls whose times are kept. Their median follows a GPU that has become slower
# and ignores a single delay.
_REMEMBERED = 5
# Calls in which each number of GPUs is tried.
_TRIALS = 3
# Calls until another number of GPUs is tried again. The interval starts short, because a program's
# first calls may differ from its later ones, and then doubles.
_AGAIN_SOON, _AGAIN = 16, 128
# If one GPU is best, it computes this number of calls before the next decision, because a decision
# takes 1% of a small call's time.
_HELD = 10
# More GPUs are used only if their expected time is at most this fraction of the time of fewer:
# expected times are uncertain, and the other GPUs stay free.
_WORTH = 0.9


class _Candidate:
    """Times of calls on the first `gpus` GPUs, split into `chunks` chunks."""

    def __init__(self, gpus: int, chunks: int) -> None:
        self._chunks = chunks
        self._costs: list[deque[float]] = [deque(maxlen=_REMEMBERED) for _ in range(gpus)]
        # Time of each call minus that of its slowest GPU.
        self._extra: deque[float] = deque(maxlen=_REMEMBERED)
        self.calls = 0
        self.last_tried = 0

    def assign(self) -> list[int]:
        """Return the number of chunks of each GPU: one each, so that all speeds stay known, and
        each further chunk to the GPU that would complete it first."""
        return self._assigned(self._costs_now())

    def _assigned(self, costs: Sequence[float]) -> list[int]:
        if len(costs) == 1:
            return [self._chunks]
        assigned = [1] * len(costs)
        done_at = [(2 * cost, number) for number, cost in enumerate(costs)]
        heapq.heapify(done_at)
        for _ in range(self._chunks - len(costs)):
            end, number = done_at[0]
            assigned[number] += 1
            heapq.heapreplace(done_at, (end + costs[number], number))
        return assigned

    def expected(self) -> float:
        """Return the seconds that the next call is expected to take."""
        costs = self._costs_now()
        return max(map(operator.mul, self._assigned(costs), costs)) + _usual(self._extra)

    def record(self, assigned: Sequence[int], parts: Sequence[float], seconds: float) -> None:
        """Record the seconds of each GPU and of the whole call."""
        self.calls += 1
        self._extra.append(seconds - max(parts))
        for costs, chunks, each in zip(self._costs, assigned, parts):
            costs.append(each / chunks)

    def _costs_now(self) -> list[float]:
        """Return the seconds per chunk of each GPU."""
        if not self.calls:
            return [1.0] * len(self._costs)
        return list(map(_usual, self._costs))


def _usual(seconds: Sequence[float]) -> float:
    """Return the median, or the minimum of the first few calls: these may compile, allocate memory
    or touch pages for the first time."""
    return min(seconds) if len(seconds) <= _TRIALS else sorted(seconds)[(len(seconds) - 1) // 2]


class LoadBalancer:
    """Decides how many GPUs compute the next call of one shape, and how many chunks each gets.

    `chunks` maps each number of GPUs to the number of chunks of a call, at least one per GPU.
    At first each number of GPUs is tried with equal numbers of chunks; later the fastest is used,
    unless fewer GPUs take hardly longer. Thread-safe.
    """

    def __init__(self, chunks: Mapping[int, int]) -> None:
        self._candidates = {gpus: _Candidate(gpus, count) for gpus, count in sorted(chunks.items())}
        self._calls = 0
        self._again = _AGAIN_SOON
        # Whether one GPU is best, and the number of calls left until the next decision.
        self._is_one_best = False
        self._held = 0
        self._lock = threading.Lock()

    def assign(self) -> list[int]:
        """Return the number of chunks for each GPU that is to compute the next call."""
        with self._lock:
            return self._candidates[1 if self._held else self._gpus()].assign()

    def record(self, assigned: Sequence[int], parts: Sequence[float], seconds: float) -> None:
        """Record a call computed as `assign` returned: seconds of each GPU and of the call."""
        with self._lock:
            self._calls += 1
            if self._held:
                self._held -= 1
                return
            candidate = self._candidates[len(assigned)]
            candidate.last_tried = self._calls
            candidate.record(assigned, parts, seconds)
            self._held = _HELD if self._is_one_best else 0

    def _gpus(self) -> int:
        untried = [gpus for gpus, each in self._candidates.items() if each.calls < _TRIALS]
        if untried:
            return max(untried)
        oldest = min(self._candidates, key=lambda gpus: self._candidates[gpus].last_tried)
        if self._calls - self._candidates[oldest].last_tried >= self._again:
            self._again = min(2 * self._again, _AGAIN)
            return oldest
        best, least = 0, math.inf
        for gpus, candidate in self._candidates.items():
            expected = candidate.expected()
            if expected <= _WORTH * least:
                best, least = gpus, expected
        self._is_one_best = best == 1
        return best


def gpu_counts(most: int) -> list[int]:
    """Return the numbers of GPUs to try: one, two, four and so on, and all."""
    powers = (1 << power for power in range(most.bit_length()))
    return sorted({*powers, most})


def ranges(counts: Sequence[int]) -> list[range]:
    """Return the chunk numbers of each GPU."""
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [range(first, end) for first, end in zip(ends, ends[1:])]
