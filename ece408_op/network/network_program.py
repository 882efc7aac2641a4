"""Program of a network for a fixed input size on one GPU: steps, memory and launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import settings
from ..errors import Ece408Error, UnsupportedProblem
from .builder import Builder, Room
from .graph import Graph
from .host_arrays import ITEM_BYTES
from .inputs import Call, Inputs
from .machines.machine import GpuMachine, Machine, Recorded, Run
from .memory_planner import Places, places
from .operators import lower, reshaping
from .values import LASTING, WEIGHT, Lasting, Step, Steps, Value

# Number of lanes whose recordings are kept. Lanes may move, or be many.
_MOST_LANES = 8
# Keys of recordings; early steps use the number of their first image.
ALL, LATE = -1, -2


def build(
    graph: Graph,
    inputs: Inputs,
    machine: Machine,
    chosen_for: int | None = None,
    lasting: Lasting | None = None,
) -> tuple[Steps, list[Value]]:
    """Return the steps for inputs, and the arrays of the inputs. Kernels are chosen for
    `chosen_for` images if given; the steps may read `lasting` arrays of other programs. Raises
    `UnsupportedProblem`."""

    def built(room: Room) -> tuple[Steps, list[Value], Room]:
        values = inputs.values()
        builder = Builder(
            *(machine.lowering(settings.precision()), inputs.images, room, chosen_for),
            *(inputs.results, lasting),
        )
        steps = builder.build(graph, values, lower)
        return steps, list(values.values()), reshaping.room(graph.nodes, builder.shapes)

    guess = graph.room or Room()
    try:
        steps, values, room = built(guess)
    except Ece408Error:
        if not guess.goes_on:
            raise
        guess = Room()
        steps, values, room = built(guess)
    if room != guess:
        steps, values, _ = built(room)
    graph.room = room
    return steps, values


class Program:
    """Steps with memory and code. Create, use and close it with the machine active."""

    def __init__(self, machine: GpuMachine, steps: Steps, inputs: list[Value]) -> None:
        self.steps = steps
        read = {id(value.buffer) for step in steps.for_images for value in step.arrays.values()}
        # The inputs with one element per image, except unused ones.
        self.images = [value for value in inputs if not value.constant and id(value.buffer) in read]
        self.places: Places = places(steps, inputs)
        # The stamp of the weights that the lasting arrays were computed from.
        self.stamp = -1
        self.machine = machine
        early = steps.early.steps if steps.early else []
        all_steps = [*steps.for_weights, *steps.for_images, *early]
        loaded = machine.load([step.plan for step in all_steps])
        self._loaded = dict(zip(map(id, all_steps), loaded))
        self._workspaces = {id(step): self.places.host_bytes for step in steps.for_weights}
        for these in (steps.for_images, early):
            self._workspaces |= {
                id(step): self.places.workspaces.get(number, 0) for number, step in enumerate(these)
            }
        # By the lane's addresses, then by what is recorded.
        self._recorded: dict[tuple[int, int], dict[int, Recorded]] = {}
        self._lasting = machine.allocate(self.places.lasting_bytes)

    def prepare(self, lane: Any, weights: Mapping[int, int]) -> None:
        """Run the steps that depend on weights alone; `weights` maps their numbers to addresses."""
        self.forget()
        runs = self._runs(self.steps.for_weights, lane, weights)
        recorded = self.machine.record(lane, runs)
        try:
            recorded.launch()
            lane.wait()
        finally:
            recorded.close()

    def microbatches(self) -> list[tuple[int, int]]:
        """Return the first image and the number of images of each microbatch of the early steps.

        All have one size; the last one may overlap the one before it."""
        if self.steps.early is None:
            return []
        size, whole = self.steps.early.images, self.steps.images
        return [(min(at, whole - size), size) for at in range(0, whole, size)]

    def launch(self, lane: Any, weights: Mapping[int, int]) -> None:
        """Enqueue all steps for the images in the lane."""
        self._launch(ALL, self.steps.for_images, lane, weights)

    def launch_early(self, lane: Any, weights: Mapping[int, int], first: int) -> None:
        """Enqueue the early steps for the microbatch at `first`, whose images are in the lane."""
        assert self.steps.early is not None
        self._launch(first, self.steps.early.steps, lane, weights)

    def launch_late(self, lane: Any, weights: Mapping[int, int]) -> None:
        """Enqueue the steps that follow the early ones."""
        assert self.steps.early is not None
        late = self.steps.for_images[len(self.steps.early.steps) :]
        self._launch(LATE, late, lane, weights)

    def _launch(self, what: int, steps: list[Step], lane: Any, weights: Mapping[int, int]) -> None:
        """Enqueue steps, recorded once per lane. `what` is ALL, LATE or the first image of early
        steps."""
        key = lane.device, lane.host
        if key not in self._recorded:
            if len(self._recorded) == _MOST_LANES:
                self.forget()
            self._recorded[key] = {}
        recorded = self._recorded[key]
        if what not in recorded:
            runs = self._runs(steps, lane, weights, max(0, what))
            recorded[what] = self.machine.record(lane, runs)
        recorded[what].launch()

    def timed(self, lane: Any, weights: Mapping[int, int]) -> list[float]:
        """Run all steps one by one and return the seconds of each."""
        return self.machine.timed(lane, self._runs(self.steps.for_images, lane, weights))

    def forget(self) -> None:
        """Discard the recordings, because addresses may have changed."""
        for recorded in self._recorded.values():
            for each in recorded.values():
                each.close()
        self._recorded.clear()

    def close(self) -> None:
        self.forget()
        self.machine.free(self._lasting)

    def _runs(
        self, steps: list[Step], lane: Any, weights: Mapping[int, int], first: int = 0
    ) -> list[Run]:
        """Resolve the steps' addresses; microbatch steps start at image `first`."""
        runs = []
        for step in steps:
            pointers = {
                name: self._address(value, lane, weights, first)
                for name, value in step.arrays.items()
            }
            if step.plan.workspace_bytes:
                pointers["workspace"] = lane.device + self._workspaces[id(step)]
            runs.append(Run(self._loaded[id(step)], pointers))
        return runs

    def _address(self, value: Value, lane: Any, weights: Mapping[int, int], first: int) -> int:
        buffer = value.buffer
        if buffer.kind == WEIGHT:
            return weights[buffer.number] + value.offset
        base = self._lasting if buffer.kind == LASTING else lane.device
        if not value.constant:
            base += first * ITEM_BYTES[value.dtype] * (value.image or value.per_image)
        return base + self.places.of(buffer) + value.offset


def refused(steps: Steps, images: int, call: Call) -> str | None:
    """Return why the steps for `images` images, a chunk or the whole call, do not produce the
    call's outputs, or `None` if they do."""
    whole = call.inputs.images
    for value, array in zip(steps.outputs, call.outputs):
        expected = array.shape
        if images < whole and array.shape[:1] == (whole,):
            expected = (images, *array.shape[1:])
        elif images < whole:
            return f"an output of shape {array.shape} does not have one element per image"
        if value.shape != expected:
            return f"an output has shape {value.shape}, not {expected}"
    return None


def check(steps: Steps, images: int, call: Call) -> None:
    """Raise `UnsupportedProblem` if `refused` returns a reason."""
    reason = refused(steps, images, call)
    if reason is not None:
        raise UnsupportedProblem(reason)
