"""A network for a number of images of given sizes, on one GPU: its steps, memory and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import settings
from ...errors import UnsupportedProblem
from .arrays import Array
from .builder import Builder
from .graph import Graph
from .inputs import Inputs
from .machine import Machine, Recorded, Run
from .memory import Places, places
from .operators import lower, shapes
from .values import LASTING, WEIGHT, Step, Steps, Value

# Recordings that are kept: of lanes whose memory has moved, or of which there are many.
_MOST_RECORDINGS = 8


def build(graph: Graph, inputs: Inputs, machine: Machine) -> tuple[Steps, list[Value]]:
    """The steps for inputs, and the arrays that these are. Raises `UnsupportedProblem`."""
    values = inputs.values()
    builder = Builder(machine.target, settings.precision(), inputs.images)
    steps = builder.build(graph, values, lower)
    room = shapes.room(graph.nodes, builder.shapes)
    if room.goes_on:
        values = inputs.values()
        builder = Builder(machine.target, settings.precision(), inputs.images, room)
        steps = builder.build(graph, values, lower)
    return steps, list(values.values())


class Program:
    """Steps with memory and code. To be made, used and closed with the machine active."""

    def __init__(self, machine: Machine, steps: Steps, inputs: list[Value]) -> None:
        self.steps = steps
        read = {id(value.buffer) for step in steps.for_images for value in step.arrays.values()}
        # The inputs of which there is an element for each image, without those that nothing reads.
        self.images = [value for value in inputs if not value.constant and id(value.buffer) in read]
        self.places: Places = places(steps, inputs)
        # What was made of weights is made of those of this stamp.
        self.stamp = -1
        self._machine = machine
        all_steps = [*steps.for_weights, *steps.for_images]
        loaded = machine.load([step.plan for step in all_steps])
        self._loaded = dict(zip(map(id, all_steps), loaded))
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._lasting = machine.allocate(self.places.lasting_bytes)

    def prepare(self, lane: Any, weights: Mapping[int, int]) -> None:
        """Compute what is made of weights alone, which are at these addresses by number."""
        self.forget()
        runs = self._runs(self.steps.for_weights, lane, weights)
        recorded = self._machine.record(lane, runs)
        try:
            recorded.launch()
            lane.wait()
        finally:
            recorded.close()

    def launch(self, lane: Any, weights: Mapping[int, int]) -> None:
        """Enqueue all steps for the images that are in the lane."""
        key = lane.device, lane.host
        if key not in self._recorded:
            if len(self._recorded) == _MOST_RECORDINGS:
                self.forget()
            runs = self._runs(self.steps.for_images, lane, weights)
            self._recorded[key] = self._machine.record(lane, runs)
        self._recorded[key].launch()

    def timed(self, lane: Any, weights: Mapping[int, int]) -> list[float]:
        """The same one by one, and the seconds that each took."""
        return self._machine.timed(lane, self._runs(self.steps.for_images, lane, weights))

    def forget(self) -> None:
        """Give up what was recorded; addresses may have changed."""
        for each in self._recorded.values():
            each.close()
        self._recorded.clear()

    def close(self) -> None:
        self.forget()
        self._machine.free(self._lasting)

    def _runs(self, steps: list[Step], lane: Any, weights: Mapping[int, int]) -> list[Run]:
        for_images = steps is self.steps.for_images
        runs = []
        for number, step in enumerate(steps):
            pointers = {
                name: self._address(value, lane, weights) for name, value in step.arrays.items()
            }
            workspace = self.places.workspaces.get(number) if for_images else self.places.host_bytes
            if step.plan.workspace_bytes:
                pointers["workspace"] = lane.device + (workspace or 0)
            runs.append(Run(self._loaded[id(step)], pointers))
        return runs

    def _address(self, value: Value, lane: Any, weights: Mapping[int, int]) -> int:
        buffer = value.buffer
        if buffer.kind == WEIGHT:
            return weights[buffer.number] + value.offset
        base = self._lasting if buffer.kind == LASTING else lane.device
        return base + self.places.of(buffer) + value.offset


def refused(steps: Steps, images: int, asked: Sequence[Array]) -> str | None:
    """Why the steps' outputs are not those that are asked for, or are so for another number of
    images; `None` if they are."""
    for value, array in zip(steps.outputs, asked):
        same = value.shape == array.shape
        if not same and (value.shape[:1] != (images,) or value.shape[1:] != array.shape[1:]):
            return f"an output has shape {value.shape}, not {array.shape}"
    return None


def check(steps: Steps, images: int, asked: Sequence[Array]) -> None:
    """Raise `UnsupportedProblem` if `refused` has a reason."""
    reason = refused(steps, images, asked)
    if reason is not None:
        raise UnsupportedProblem(reason)
