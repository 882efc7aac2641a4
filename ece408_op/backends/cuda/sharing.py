"""How the images of a call are shared out over GPUs: by how fast each was with earlier ones."""

from __future__ import annotations

import heapq
import math
import operator
import threading
from collections import deque
from collections.abc import Mapping, Sequence

# Calls whose times are remembered. The median of so few follows a GPU that has become slower, and
# passes over one that was held up once.
_REMEMBERED = 5
# Calls in which each number of GPUs is tried.
_TRIALS = 3
# After so many calls another number of GPUs is tried again: soon at first, as the first calls of a
# program may not be like its later ones, then half as often each time.
_AGAIN_SOON, _AGAIN = 16, 128
# Where one GPU is best, it computes so many calls more before that is asked again: the answer takes
# a hundredth of a small call's time.
_HELD = 10
# More GPUs compute where they are expected to take at most this part of the time of fewer: for
# less, the expected times are too uncertain, and the other GPUs stay free.
_WORTH = 0.9


class _Way:
    """So many GPUs, the first of them all, for calls that are cut into so many pieces."""

    def __init__(self, gpus: int, pieces: int) -> None:
        self._pieces = pieces
        self._costs: list[deque[float]] = [deque(maxlen=_REMEMBERED) for _ in range(gpus)]
        # What calls took longer than their longest part.
        self._extra: deque[float] = deque(maxlen=_REMEMBERED)
        self.calls = 0
        self.last_tried = 0

    def deal(self) -> list[int]:
        """How many pieces each GPU gets: at least one, so that its speed stays known, and then each
        piece goes to the GPU that is done with it first."""
        return self._dealt(self._costs_now())

    def _dealt(self, costs: Sequence[float]) -> list[int]:
        if len(costs) == 1:
            return [self._pieces]
        dealt = [1] * len(costs)
        done_at = [(2 * cost, number) for number, cost in enumerate(costs)]
        heapq.heapify(done_at)
        for _ in range(self._pieces - len(costs)):
            end, number = done_at[0]
            dealt[number] += 1
            heapq.heapreplace(done_at, (end + costs[number], number))
        return dealt

    def expected(self) -> float:
        """The seconds that the next call will take."""
        costs = self._costs_now()
        return max(map(operator.mul, self._dealt(costs), costs)) + _usual(self._extra)

    def took(self, dealt: Sequence[int], parts: Sequence[float], seconds: float) -> None:
        """Remember the seconds of each GPU's part, and those of the call."""
        self.calls += 1
        self._extra.append(seconds - max(parts))
        for costs, pieces, each in zip(self._costs, dealt, parts):
            costs.append(each / pieces)

    def _costs_now(self) -> list[float]:
        """Seconds for a piece, by GPU."""
        if not self.calls:
            return [1.0] * len(self._costs)
        return list(map(_usual, self._costs))


def _usual(seconds: Sequence[float]) -> float:
    """The median; of no more than the first calls' times the least, as those may have to compile,
    to allocate, or to make pages."""
    return min(seconds) if len(seconds) <= _TRIALS else sorted(seconds)[(len(seconds) - 1) // 2]


class Shares:
    """For calls of one shape: how many GPUs compute the next one, and how many pieces of it each.
    `pieces` has how many there are by the number of GPUs, of which there are at least as many.

    At first each number of GPUs is tried, with equal shares; later the one that is expected to end
    first, unless fewer GPUs take hardly longer. May be used by several threads at once.
    """

    def __init__(self, pieces: Mapping[int, int]) -> None:
        self._ways = {gpus: _Way(gpus, count) for gpus, count in sorted(pieces.items())}
        self._calls = 0
        self._again = _AGAIN_SOON
        # Whether one GPU is best, and for how many calls more it computes without a question.
        self._is_one_best = False
        self._held = 0
        self._lock = threading.Lock()

    def deal(self) -> list[int]:
        """Pieces for each GPU that is to compute the next call."""
        with self._lock:
            return self._ways[1 if self._held else self._gpus()].deal()

    def took(self, dealt: Sequence[int], parts: Sequence[float], seconds: float) -> None:
        """That a call was done as `deal` said: the seconds of each GPU's part, and of the call."""
        with self._lock:
            self._calls += 1
            if self._held:
                self._held -= 1
                return
            way = self._ways[len(dealt)]
            way.last_tried = self._calls
            way.took(dealt, parts, seconds)
            self._held = _HELD if self._is_one_best else 0

    def _gpus(self) -> int:
        untried = [gpus for gpus, way in self._ways.items() if way.calls < _TRIALS]
        if untried:
            return max(untried)
        oldest = min(self._ways, key=lambda gpus: self._ways[gpus].last_tried)
        if self._calls - self._ways[oldest].last_tried >= self._again:
            self._again = min(2 * self._again, _AGAIN)
            return oldest
        best, least = 0, math.inf
        for gpus, way in self._ways.items():
            expected = way.expected()
            if expected <= _WORTH * least:
                best, least = gpus, expected
        self._is_one_best = best == 1
        return best


def numbers(most: int) -> list[int]:
    """The numbers of GPUs that are tried: one, two, four and so on, and all."""
    powers = (1 << power for power in range(most.bit_length()))
    return sorted({*powers, most})


def ranges(counts: Sequence[int]) -> list[range]:
    """The numbers of the pieces of each GPU."""
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [range(first, end) for first, end in zip(ends, ends[1:])]
