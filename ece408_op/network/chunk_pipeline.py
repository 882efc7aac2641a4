"""Pipeline of a batch's chunks on one GPU, over a ring of lanes.

A lane is a stream with its own memory. While the kernels of one chunk run, the next chunk is copied
in and the results of the one before are copied out.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..backends.cpu.native import copy
from ..backends.cuda.runtime.device import BEGIN, COMPUTED, COPIED_OUT
from .host_arrays import Array
from .inputs import Call
from .network_program import Program
from .values import Step, Value

# Number of chunks whose kernels run concurrently. Two fill the GPU; more would end at the same
# time, and the GPU would then wait for the next images.
_AT_ONCE = 2
# Images are copied to page-locked memory, and on to the GPU, in blocks of this size.
COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class Ready:
    """A program, the number of lanes for its chunks, and the memory limit of all lanes in bytes."""

    program: Program
    lanes: int
    limit: int

    def chunks(self, images: range) -> list[int]:
        """Return the first image of each chunk of `images`. All chunks have one size, so the last
        one may overlap the one before, or begin before `images`, and computes some images again."""
        if not self.program.steps.divisible or not images:
            return [0]
        size = self.program.steps.images
        return [max(0, min(at, images.stop - size)) for at in images[::size]]


@dataclass
class Timings:
    """Seconds of each step that depends on images, in order, summed over chunks."""

    steps: Sequence[Step]
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        pairs = zip(self.seconds or [0.0] * len(seconds), seconds)
        self.seconds = [a + b for a, b in pairs]


@dataclass
class Watched:
    """Timeline of a call, in seconds since it began.

    Host: total, copying between arrays and page-locked memory, and waiting for the GPU; the rest is
    enqueuing. GPU, for each chunk: when the first copy to it began, when the last copy ended, when
    the kernels ended, and when the results had been copied back.
    """

    seconds: float = 0.0
    copying: float = 0.0
    waiting: float = 0.0
    chunks: list[tuple[float, ...]] = field(default_factory=list)

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """Add the time of the block to the attribute `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


@dataclass(frozen=True)
class _Move:
    """A copy between a caller's array and a lane: the caller's address and bytes per image, the
    offset in the lane's memory, the bytes of a chunk, and whether the array is page-locked."""

    address: int
    image_bytes: int
    offset: int
    nbytes: int
    is_locked: bool

    def at(self, first: int) -> int:
        return self.address + first * self.image_bytes

    def part(self, first: int, images: int) -> _Move:
        """Return the copy of some of a chunk's images."""
        skipped, nbytes = first * self.image_bytes, images * self.image_bytes
        return replace(
            self, address=self.address + skipped, offset=self.offset + skipped, nbytes=nbytes
        )


class Pass:
    """One pass over some images of a call, using `lanes`; `threads` threads copy on the host.
    `weights` maps a weight's number to its address."""

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
                self._complete(*under_way.popleft())
            lane = self._lanes[number % len(self._lanes)]
            self._start(lane, first, number)
            self._send(lane)
            under_way.append((lane, first))
        if len(self._chunks) == 1:
            # Latency matters more than the core that this wait occupies.
            with self._watched.adding("waiting"):
                self._lanes[0].wait()
        while under_way:
            self._complete(*under_way.popleft())

    def watched(self) -> Watched:
        """Compute all chunks and return where the time went."""
        self._clock = self._lanes[0]
        self._clock.start_clock()
        with self._watched.adding("seconds"):
            self.all()
        return self._watched

    def timed(self) -> Timings:
        """Compute the chunks one after the other, and time each step."""
        found = Timings(self._ready.program.steps.for_images)
        lane = self._lanes[0]
        for first in self._chunks:
            self._bring(lane, first, self._ins)
            found.add(self._ready.program.timed(lane, self._weights))
            self._send(lane)
            self._complete(lane, first)
        return found

    def _start(self, lane: Any, first: int, number: int) -> None:
        """Enqueue a chunk's copies to the GPU and its steps. Only the first chunk runs early steps:
        later ones arrive while the GPU computes the chunks before them."""
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
            if move.is_locked:
                # Results are not copied so: after an error, copies may go on for a while.
                lane.bring(move.offset, move.nbytes, source)
                continue
            for done in range(0, move.nbytes, COPIED_BYTES):
                size, offset = min(COPIED_BYTES, move.nbytes - done), move.offset + done
                self._copy(lane.host + offset, source + done, size)
                lane.bring(offset, size)
        lane.brought()

    def _send(self, lane: Any) -> None:
        for move in self._outs:
            lane.copy_out(move.offset, move.nbytes)
        lane.mark(COPIED_OUT)

    def _complete(self, lane: Any, first: int) -> None:
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
    is_locked = made.machine.is_page_locked(array.address, array.nbytes)
    offset, nbytes = made.places.of(value.buffer), value.buffer.nbytes
    return _Move(array.address, array.image_bytes, offset, nbytes, is_locked)
