"""A network on one GPU: its weights, which stay there, and its batch in chunks that go through it.

Chunks go round a ring of lanes, each a stream with memory of its own: while one's kernels run, the
next one's images are copied in, and the last one's results out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import settings
from ...errors import Ece408Error, NotEnoughMemory
from ..cpu.native import copy
from ..cuda.runtime.device import COPIED_OUT
from . import program
from .arrays import Array
from .graph import Graph
from .machine import Machine
from .program import Inputs, Program
from .values import OUTPUT, Steps, Value

# What a chunk's inputs take at most, unless one image takes more: enough to keep a GPU busy.
_CHUNK_BYTES = 40 << 20
# Inputs are copied to page-locked memory, and on, in pieces of this size.
_PIECE_BYTES = 4 << 20
_MOST_LANES = 3
# Programs for other sizes of images, or other numbers, that are kept.
_MOST_PROGRAMS = 4


@dataclass
class _Weight:
    """A weight on the GPU, and which array it is a copy of."""

    address: int
    nbytes: int
    source: Array | None = None


@dataclass
class Timings:
    """Seconds of each step of a program, by its place, summed over chunks."""

    program: Program
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        pairs = zip(self.seconds or [0.0] * len(seconds), seconds)
        self.seconds = [a + b for a, b in pairs]


class Resident:
    """All methods are to be called with the machine's lock held and the machine active."""

    def __init__(self, machine: Machine, graph: Graph) -> None:
        self.machine = machine
        self._graph = graph
        self._weights: dict[int, _Weight] = {}
        # Counts the times that weights have changed.
        self._stamp = 0
        self._programs: OrderedDict[tuple[Inputs, str], _Ready] = OrderedDict()

    def ready(self, inputs: Inputs, outputs: Sequence[Array]) -> _Ready:
        """The program for inputs, and how to cut their images into chunks.

        Raises `UnsupportedProblem`, `NotEnoughMemory`, and what compiling raises.
        """
        key = inputs, settings.precision()
        if key not in self._programs:
            while len(self._programs) >= _MOST_PROGRAMS:
                self._programs.popitem(last=False)[1].program.close()
            self._programs[key] = self._made(inputs, outputs)
        self._programs.move_to_end(key)
        return self._programs[key]

    def compute(
        self,
        ready: _Ready,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        first: int,
        timed: bool,
    ) -> Timings | None:
        """Compute the images from `first` on, as many as `ready` is for; how long it took if it is
        to be `timed`."""
        self._bring_weights(ready.program, inputs)
        ring = (ready.lanes, ready.program.places.device_bytes)
        host_bytes, limit = ready.program.places.host_bytes, ready.limit
        with self.machine.lanes(*ring, host_bytes, limit) as lanes:
            if ready.program.stamp != self._stamp:
                ready.program.prepare(lanes[0], self._addresses())
                ready.program.stamp = self._stamp
            run = _Pass(ready, lanes, self._addresses(), inputs, outputs)
            if timed:
                return run.timed(first)
            run.all(first)
            return None

    def close(self) -> None:
        """Give all memory back."""
        for each in self._programs.values():
            each.program.close()
        self._programs.clear()
        for weight in self._weights.values():
            self.machine.free(weight.address)
        self._weights.clear()

    def _addresses(self) -> dict[int, int]:
        return {number: weight.address for number, weight in self._weights.items()}

    def _bring_weights(self, made: Program, inputs: Sequence[Array]) -> None:
        """Copy weights to the GPU that are not there, or have changed."""
        changed = False
        for number, array in enumerate(inputs):
            if made.inputs[number].constant:
                weight = self._weights.get(number)
                if weight is None or weight.source != array:
                    self._bring(number, array)
                    changed = True
        if changed:
            self._stamp += 1

    def _bring(self, number: int, array: Array) -> None:
        weight = self._weights.get(number)
        if weight is None or weight.nbytes != array.nbytes:
            if weight is not None:
                del self._weights[number]
                self.machine.free(weight.address)
            for each in self._programs.values():
                each.program.forget()
            weight = _Weight(self.machine.allocate(array.nbytes), array.nbytes)
            self._weights[number] = weight
        weight.source = None
        self.machine.upload(weight.address, array.address, array.nbytes)
        weight.source = array

    def _made(self, inputs: Inputs, outputs: Sequence[Array]) -> _Ready:
        """Chunks as large as is of use, or as fit into memory; of a network that computes images
        from each other there is one."""
        whole = inputs.images()
        images = self._wanted(inputs)
        own = sum(each.program.places.lasting_bytes for each in self._programs.values())
        own += sum(weight.nbytes for weight in self._weights.values())
        budget = self.machine.budget(own)
        while True:
            steps, values = self._divided(inputs, images, outputs)
            images = steps.images if steps.divisible else whole
            found = program.places(steps, values)
            weights = sum(value.buffer.nbytes for value in values if value.constant)
            limit = budget - weights - found.lasting_bytes
            lanes = min(_MOST_LANES, -(-whole // max(1, images)), limit // found.device_bytes)
            if lanes >= 1:
                return _Ready(Program(self.machine, steps, values), whole, lanes, limit)
            if images <= 1 or not steps.divisible:
                needed = weights + found.lasting_bytes + found.device_bytes
                raise NotEnoughMemory(
                    f"the network takes {needed} bytes on the GPU for "
                    f"{'one image' if images == 1 else f'its {images} images'}, and {budget} may "
                    "be used; allow more (ECE408_GPU_MEMORY) or free memory of the GPU"
                )
            images = -(-images // 2)

    def _wanted(self, inputs: Inputs) -> int:
        """Images of a chunk if memory were no concern; chunks are about as large as each other."""
        whole = inputs.images()
        one = sum(
            value.buffer.nbytes // max(1, whole)
            for value in inputs.values().values()
            if not value.constant
        )
        chunks = -(-whole // max(1, _CHUNK_BYTES // max(1, one)))
        return -(-whole // max(1, chunks))

    def _divided(
        self, inputs: Inputs, images: int, outputs: Sequence[Array]
    ) -> tuple[Steps, list[Value]]:
        """The steps for so many images, or for all where they cannot be taken apart."""
        if images < inputs.images():
            try:
                found = program.build(self._graph, inputs.of_images(images), self.machine)
            except Ece408Error:
                # Shapes in the graph may be for all images: then that is what is tried next.
                found = None
            if found and found[0].divisible and not program.refused(found[0], images, outputs):
                return found
        found = program.build(self._graph, inputs, self.machine)
        program.check(found[0], 0, outputs)
        if images < inputs.images():
            found[0].divisible = False
        return found


@dataclass(frozen=True)
class _Ready:
    """A program, the images of a call, how many lanes it goes round, and the bytes that these may
    have."""

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


class _Pass:
    """One call's chunks on one GPU."""

    def __init__(
        self,
        ready: _Ready,
        lanes: Sequence[Any],
        weights: dict[int, int],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        self._ready, self._lanes, self._weights = ready, lanes, weights
        self._threads = settings.threads()
        made = ready.program
        self._ins = [
            _move(made, value, array)
            for value, array in zip(made.inputs, inputs)
            if not value.constant
        ]
        self._outs = [_move(made, value, array) for value, array in zip(made.outputs(), outputs)]

    def all(self, origin: int) -> None:
        """Do all chunks; `origin` is where in the caller's arrays the first image is."""
        made = self._ready.program
        under_way: deque[tuple[Any, int]] = deque()
        for number, first in enumerate(self._ready.chunks()):
            if len(under_way) == len(self._lanes):
                self._finish(*under_way.popleft())
            lane = self._lanes[number % len(self._lanes)]
            self._bring(lane, origin + first)
            made.launch(lane, self._weights)
            self._send(lane)
            under_way.append((lane, origin + first))
        while under_way:
            self._finish(*under_way.popleft())

    def timed(self, origin: int) -> Timings:
        """The same one after the other, each step by itself."""
        found = Timings(self._ready.program)
        lane = self._lanes[0]
        for first in self._ready.chunks():
            self._bring(lane, origin + first)
            found.add(found.program.timed(lane, self._weights))
            self._send(lane)
            self._finish(lane, origin + first)
        return found

    def _bring(self, lane: Any, first: int) -> None:
        for move in self._ins:
            for done in range(0, move.nbytes, _PIECE_BYTES):
                size, offset = min(_PIECE_BYTES, move.nbytes - done), move.offset + done
                copy(lane.host + offset, move.at(first) + done, size, self._threads)
                lane.copy_in(offset, size)

    def _send(self, lane: Any) -> None:
        for move in self._outs:
            lane.copy_out(move.offset, move.nbytes)
        lane.mark(COPIED_OUT)

    def _finish(self, lane: Any, first: int) -> None:
        lane.rest()
        for move in self._outs:
            copy(move.at(first), lane.host + move.offset, move.nbytes, self._threads)


def _move(made: Program, value: Value, array: Array) -> _Move:
    offset = made.places.of(value.buffer) + (value.offset if value.buffer.kind == OUTPUT else 0)
    return _Move(array.address, array.image_bytes, offset, value.buffer.nbytes)
