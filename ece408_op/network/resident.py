"""A network on one GPU: resident weights, and one program per input size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional, TypeVar

from .. import settings
from ..errors import Ece408Error, NotEnoughMemory
from . import gpu_memory, microbatches, network_program
from .chunk_pipeline import Pass, Ready
from .gpu_weights import Weights
from .graph import Graph
from .inputs import Call, Inputs
from .machines.machine import GpuMachine
from .network_program import Program
from .values import Early, Steps, Value

# Maximum bytes of a chunk's inputs, unless one image needs more: enough to keep a GPU busy.
_CHUNK_BYTES = 40 << 20
_MOST_LANES = 4
# Early steps are used for at most this number of chunks: their additional launches occupy the host
# and delay the copies of the next chunks.
_MOST_WITH_EARLY = 2
# Maximum number of programs kept, for other input sizes or batch sizes.
_MOST_PROGRAMS = 4

_T = TypeVar("_T")
_Key = tuple[Inputs, str, Optional[int]]


@dataclass(frozen=True)
class Part:
    """The images of a call that one GPU computes, the number of images its program is made for, and
    the number of host threads that copy them."""

    images: range
    planned: int
    threads: int


class Resident:
    """Call all methods with the machine's lock held and the machine active."""

    def __init__(self, machine: GpuMachine, graph: Graph, parameters: Sequence[int]) -> None:
        self.machine = machine
        self._graph = graph
        self._weights = Weights(machine, parameters)
        self._programs: OrderedDict[_Key, Ready] = OrderedDict()

    def compute(self, call: Call, part: Part, how: Callable[[Pass], _T]) -> _T:
        """Compute a part of a call; `how` is a method of `Pass`.

        Raises `WeightsNeeded`, `UnsupportedProblem`, `InvalidProblem`, `NotEnoughMemory`,
        `GpuFailed`, and compiler errors.
        """
        most = part.planned
        while True:
            ready = self.ready(call, part.planned, most)
            try:
                return self._computed(ready, call, part, how)
            except NotEnoughMemory:
                # Less memory is available than was reported free.
                steps = ready.program.steps
                self._forget_programs()
                if steps.images <= 1 or not steps.divisible:
                    raise
                most = steps.images // 2

    def ready(self, call: Call, images: int, most: int) -> Ready:
        """Return the program for `images` images of a call, with at most `most` per chunk."""
        inputs = call.inputs.of_images(images)
        key = inputs, settings.precision(), settings.gpu_memory()
        if key not in self._programs:
            while len(self._programs) >= _MOST_PROGRAMS:
                self._programs.popitem(last=False)[1].program.close()
            try:
                self._programs[key] = self._made(inputs, call, most)
            except NotEnoughMemory:
                if not self._programs:
                    raise
                self._forget_programs()
                self._programs[key] = self._made(inputs, call, most)
        self._programs.move_to_end(key)
        return self._programs[key]

    def close(self) -> None:
        """Free all memory."""
        self._forget_programs()
        self._weights.close()

    def _forget_programs(self) -> None:
        for each in self._programs.values():
            each.program.close()
        self._programs.clear()

    def _computed(self, ready: Ready, call: Call, part: Part, how: Callable[[Pass], _T]) -> _T:
        made, weights = ready.program, self._weights
        if weights.bring(call.arrays, call.generation, call.are_held):
            for each in self._programs.values():
                each.program.forget()
        sizes = made.places.device_bytes, made.places.host_bytes
        # Networks that train may have all its memory.
        gpu_memory.memory_of(self.machine).settle()
        with self.machine.lanes(ready.lanes, *sizes, ready.limit) as lanes:
            if made.stamp != weights.stamp:
                made.prepare(lanes[0], weights.addresses())
                made.stamp = weights.stamp
            return how(Pass(ready, lanes, weights.addresses(), call, part.images, part.threads))

    def _made(self, inputs: Inputs, call: Call, most: int) -> Ready:
        """Build a program with the largest useful chunks that fit into memory; a network that
        computes images from other images has a single chunk."""
        whole = inputs.images
        images = min(_wanted(inputs), most)
        own = sum(each.program.places.lasting_bytes for each in self._programs.values())
        budget = self.machine.budget(own + self._weights.nbytes())
        while True:
            steps, values = self._divided(inputs, images, call)
            images = steps.images if steps.divisible else whole
            chunks = -(-whole // images) if steps.divisible and images else 1
            steps.early = self._early(inputs, steps) if chunks <= _MOST_WITH_EARLY else None
            found = network_program.places(steps, values)
            lasting = sum(value.buffer.nbytes for value in values if value.constant)
            lasting += found.lasting_bytes
            limit = budget - lasting
            lanes = min(_MOST_LANES, chunks, limit // found.device_bytes)
            if lanes >= 1:
                return Ready(Program(self.machine, steps, values), lanes, limit)
            if images <= 1 or not steps.divisible:
                raise NotEnoughMemory(
                    f"the network takes {lasting + found.device_bytes} bytes on the GPU for "
                    f"{'one image' if images == 1 else 'its inputs as a whole'}, and {budget} may "
                    "be used; allow more (ECE408_GPU_MEMORY) or free memory of the GPU"
                )
            images = -(-images // 2)

    def _early(self, inputs: Inputs, steps: Steps) -> Early | None:
        """Return a chunk's early steps, if any."""

        def few(images: int) -> Steps:
            fewer = inputs.of_images(images)
            return network_program.build(self._graph, fewer, self.machine, steps.images)[0]

        try:
            return microbatches.early(steps, inputs.image_bytes(), few)
        except Ece408Error:  # As in `_divided`.
            return None

    def _divided(self, inputs: Inputs, images: int, call: Call) -> tuple[Steps, list[Value]]:
        """Return the steps for `images` images, or for all if the batch cannot be split."""
        if images < inputs.images:
            try:
                found = network_program.build(self._graph, inputs.of_images(images), self.machine)
            except Ece408Error:
                # A graph that is valid for the whole batch may be invalid for fewer images:
                # constant shapes, slices of axis 0. Errors of the graph itself are raised below.
                found = None
            if found and found[0].divisible and not network_program.refused(found[0], images, call):
                return found
        found = network_program.build(self._graph, inputs, self.machine)
        network_program.check(found[0], inputs.images, call)
        if images < inputs.images:
            found[0].divisible = False
        return found


def _wanted(inputs: Inputs) -> int:
    """Return the images per chunk without a memory limit; chunks have about equal sizes."""
    chunks = -(-inputs.images // max(1, _CHUNK_BYTES // max(1, inputs.image_bytes())))
    return -(-inputs.images // max(1, chunks))
