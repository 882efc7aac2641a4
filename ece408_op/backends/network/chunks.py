"""A call's images on one GPU, in chunks that go round a ring of lanes.

A lane is a stream with memory of its own: while one's kernels run, the next one's images are copied
in, and the last one's results out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import settings
from ..cpu.native import copy
from ..cuda.runtime.device import COPIED_OUT
from .arrays import Array
from .inputs import Call
from .program import Program
from .values import Value

# Inputs are copied to page-locked memory, and on, in pieces of this size.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Ready:
    """A program, the images of a call, how many lanes they go round, and the bytes that all lanes
    may have."""

    program: Program
    whole: int
    lanes: int
    limit: int

    def chunks(self) -> list[int]:
        """The first image of each chunk. All are of one size: the last one may begin before the one
        before it has ended, and computes some images again."""
        size = self.program.steps.images
        if not self.program.steps.divisible or size >= self.whole:
            return [0]
        return [min(at, self.whole - size) for at in range(0, self.whole, size)]


@dataclass
class Timings:
    """Seconds of each step of a program, by its place, summed over chunks."""

    program: Program
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        pairs = zip(self.seconds or [0.0] * len(seconds), seconds)
        self.seconds = [a + b for a, b in pairs]


@dataclass(frozen=True)
class _Move:
    """An array's way between the caller and a lane: the caller's address and bytes for each image,
    the offset in the lane's memory, and the bytes of a chunk."""

    address: int
    image_bytes: int
    offset: int
    nbytes: int

    def at(self, first: int) -> int:
        return self.address + first * self.image_bytes


class Pass:
    """One call's images from `origin` on, on lanes; weights are at these addresses, by number."""

    def __init__(
        self,
        ready: Ready,
        lanes: Sequence[Any],
        weights: Mapping[int, int],
        call: Call,
        origin: int,
    ) -> None:
        self._ready, self._lanes, self._weights = ready, lanes, weights
        self._origin = origin
        self._threads = settings.threads()
        made = ready.program
        self._ins = [_move(made, each, call.arrays[each.buffer.number]) for each in made.images]
        self._outs = [_move(made, *pair) for pair in zip(made.steps.outputs, call.outputs)]

    def all(self) -> None:
        """Compute all chunks."""
        chunks = self._ready.chunks()
        under_way: deque[tuple[Any, int]] = deque()
        for number, first in enumerate(chunks):
            if len(under_way) == len(self._lanes):
                self._finish(*under_way.popleft())
            lane = self._lanes[number % len(self._lanes)]
            self._bring(lane, first)
            self._ready.program.launch(lane, self._weights)
            self._send(lane)
            under_way.append((lane, first))
        if len(chunks) == 1:
            # The answer counts, more than the core that waits for it.
            self._lanes[0].wait()
        while under_way:
            self._finish(*under_way.popleft())

    def timed(self) -> Timings:
        """The same one after the other, each step by itself."""
        found = Timings(self._ready.program)
        lane = self._lanes[0]
        for first in self._ready.chunks():
            self._bring(lane, first)
            found.add(found.program.timed(lane, self._weights))
            self._send(lane)
            self._finish(lane, first)
        return found

    def _bring(self, lane: Any, first: int) -> None:
        for move in self._ins:
            source = move.at(self._origin + first)
            for done in range(0, move.nbytes, _PIECE_BYTES):
                size, offset = min(_PIECE_BYTES, move.nbytes - done), move.offset + done
                copy(lane.host + offset, source + done, size, self._threads)
                lane.copy_in(offset, size)

    def _send(self, lane: Any) -> None:
        for move in self._outs:
            lane.copy_out(move.offset, move.nbytes)
        lane.mark(COPIED_OUT)

    def _finish(self, lane: Any, first: int) -> None:
        lane.rest()
        for move in self._outs:
            to = move.at(self._origin + first)
            copy(to, lane.host + move.offset, move.nbytes, self._threads)


def _move(made: Program, value: Value, array: Array) -> _Move:
    offset = made.places.of(value.buffer)
    return _Move(array.address, array.image_bytes, offset, value.buffer.nbytes)
