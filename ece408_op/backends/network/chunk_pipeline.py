"""A call's images on one GPU, in chunks that go round a ring of lanes.

A lane is a stream with memory of its own: while one's kernels run, the next one's images are copied
in, and the last one's results out.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..cpu.native import copy
from ..cuda.runtime.device import BEGIN, COMPUTED, COPIED_OUT
from .host_arrays import Array
from .inputs import Call
from .network_program import Program
from .values import Value

# Chunks whose kernels run at the same time: two, as one's leave room for another's. More would end
# together, and then the GPU would wait for the next images.
_AT_ONCE = 2
# Images are copied to page-locked memory, and on to the GPU, so many bytes at a time.
_COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class Ready:
    """A program, how many lanes its chunks go round, and the bytes that all lanes may have."""

    program: Program
    lanes: int
    limit: int

    def chunks(self, images: range) -> list[int]:
        """The first image of each chunk of these images. All are of one size: the last one may
        begin before the one before it has ended, or before these images, and computes some images
        again."""
        if not self.program.steps.divisible or not images:
            return [0]
        size = self.program.steps.images
        return [max(0, min(at, images.stop - size)) for at in images[::size]]


@dataclass
class Timings:
    """Seconds of each step of a program, by its place, summed over chunks."""

    program: Program
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        pairs = zip(self.seconds or [0.0] * len(seconds), seconds)
        self.seconds = [a + b for a, b in pairs]


@dataclass
class Watched:
    """Where the time of a call went, in seconds since it began.

    On the host: all of it, copying between arrays and page-locked memory, and waiting for the GPU;
    the rest is enqueuing. On the GPU, for each chunk: when the first copy to it began, when the
    last one had ended, when the kernels had, and when the results had been copied back.
    """

    seconds: float = 0.0
    copying: float = 0.0
    waiting: float = 0.0
    chunks: list[tuple[float, ...]] = field(default_factory=list)

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to one of these."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


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

    def part(self, first: int, images: int) -> _Move:
        """The same for some of a chunk's images."""
        skipped, nbytes = first * self.image_bytes, images * self.image_bytes
        return replace(
            self, address=self.address + skipped, offset=self.offset + skipped, nbytes=nbytes
        )


class Pass:
    """Some images of a call, on lanes, copied by so many threads; weights are at these addresses,
    by number."""

    def __init__(
        self,
        ready: Ready,
        lanes: Sequence[Any],
        weights: Mapping[int, int],
        call: Call,
        images: range,
        threads: int,
    ) -> None:
        self._ready, self._lanes, self._weights = ready, lanes, weights
        self._chunks = ready.chunks(images)
        self._threads = threads
        made = ready.program
        self._ins = [_move(made, each, call.arrays[each.buffer.number]) for each in made.images]
        self._outs = [_move(made, *pair) for pair in zip(made.steps.outputs, call.outputs)]
        self._watched = Watched()
        self._clock: Any = None

    def all(self) -> None:
        """Compute all chunks."""
        under_way: deque[tuple[Any, int]] = deque()
        for number, first in enumerate(self._chunks):
            if len(under_way) == len(self._lanes):
                self._finish(*under_way.popleft())
            lane = self._lanes[number % len(self._lanes)]
            self._start(lane, first, number)
            self._send(lane)
            under_way.append((lane, first))
        if len(self._chunks) == 1:
            # The answer counts, more than the core that waits for it.
            with self._watched.adding("waiting"):
                self._lanes[0].wait()
        while under_way:
            self._finish(*under_way.popleft())

    def watched(self) -> Watched:
        """As `all`; where the time went."""
        self._clock = self._lanes[0]
        self._clock.start_clock()
        with self._watched.adding("seconds"):
            self.all()
        return self._watched

    def timed(self) -> Timings:
        """The same one after the other, each step by itself."""
        found = Timings(self._ready.program)
        lane = self._lanes[0]
        for first in self._chunks:
            self._bring(lane, first, self._ins)
            found.add(found.program.timed(lane, self._weights))
            self._send(lane)
            self._finish(lane, first)
        return found

    def _start(self, lane: Any, first: int, number: int) -> None:
        """Enqueue a chunk's copies to the GPU and its steps; some of the first chunk's are done
        early, as later on the GPU has the chunks before to compute."""
        program, weights = self._ready.program, self._weights
        microbatches = program.microbatches() if number == 0 else []
        lane.mark(BEGIN)
        if number >= _AT_ONCE:
            lane.after(self._lanes[(number - _AT_ONCE) % len(self._lanes)])
        for at, images in microbatches:
            self._bring(lane, first, [move.part(at, images) for move in self._ins])
            program.launch_early(lane, weights, at)
        if microbatches:
            program.launch_late(lane, weights)
        else:
            self._bring(lane, first, self._ins)
            program.launch(lane, weights)
        lane.mark(COMPUTED)

    def _bring(self, lane: Any, first: int, moves: Sequence[_Move]) -> None:
        for move in moves:
            source = move.at(first)
            for done in range(0, move.nbytes, _COPIED_BYTES):
                size, offset = min(_COPIED_BYTES, move.nbytes - done), move.offset + done
                self._copy(lane.host + offset, source + done, size)
                lane.bring(offset, size)
        lane.brought()

    def _send(self, lane: Any) -> None:
        for move in self._outs:
            lane.copy_out(move.offset, move.nbytes)
        lane.mark(COPIED_OUT)

    def _finish(self, lane: Any, first: int) -> None:
        with self._watched.adding("waiting"):
            lane.rest()
        if self._clock:
            self._watched.chunks.append(lane.times(self._clock))
        for move in self._outs:
            self._copy(move.at(first), lane.host + move.offset, move.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        with self._watched.adding("copying"):
            copy([(to, source, nbytes)], self._threads)


def _move(made: Program, value: Value, array: Array) -> _Move:
    offset = made.places.of(value.buffer)
    return _Move(array.address, array.image_bytes, offset, value.buffer.nbytes)
