"""A network for a number of images of given sizes, on one GPU: its steps, memory and launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import settings
from ...errors import UnsupportedProblem
from .arrays import ITEM_BYTES, Array
from .builder import Builder
from .graph import Graph
from .machine import Machine, Recorded, Run
from .memory import Places, places
from .operators import lower, shapes
from .values import INPUT, LASTING, WEIGHT, Buffer, Step, Steps, Value

# Recordings that are kept: of lanes whose memory has moved, or of which there are many.
_MOST_RECORDINGS = 8


@dataclass(frozen=True)
class Inputs:
    """What the arrays that a network is called with are like: names, shapes and types, and which
    are weights."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    parameters: frozenset[str]

    @classmethod
    def of(
        cls, names: Sequence[str], arrays: Sequence[Array], parameters: frozenset[str]
    ) -> Inputs:
        shapes = tuple(array.shape for array in arrays)
        return cls(tuple(names), shapes, tuple(array.dtype for array in arrays), parameters)

    def are_images(self) -> list[bool]:
        """Of each input, whether it has an element for each image."""
        return [name not in self.parameters for name in self.names]

    def images(self) -> int:
        """How many there are: what the first axis of all inputs but weights counts, or 0 where they
        differ."""
        found = {
            shape[0] if shape else 0 for shape, mine in zip(self.shapes, self.are_images()) if mine
        }
        return found.pop() if len(found) == 1 else 0

    def of_images(self, images: int) -> Inputs:
        """The same for another number of images."""
        shapes = tuple(
            (images, *shape[1:]) if mine else shape
            for shape, mine in zip(self.shapes, self.are_images())
        )
        return Inputs(self.names, shapes, self.dtypes, self.parameters)

    def values(self) -> dict[str, Value]:
        """Arrays to build steps on."""
        found = {}
        each = zip(self.names, self.shapes, self.dtypes, self.are_images())
        for number, (name, shape, dtype, mine) in enumerate(each):
            nbytes = ITEM_BYTES[dtype] * math.prod(shape)
            buffer = Buffer(INPUT if mine else WEIGHT, nbytes, number)
            found[name] = Value(buffer, shape, dtype=dtype)
        return found


def build(graph: Graph, inputs: Inputs, machine: Machine) -> tuple[Steps, list[Value]]:
    """The steps for inputs, and the arrays that these are. Raises `UnsupportedProblem`."""
    values = inputs.values()
    builder = Builder(machine.target, settings.precision(), inputs.images())
    steps = builder.build(graph, values, lower)
    room = shapes.room(graph.nodes, builder.shapes)
    if room.goes_on:
        values = inputs.values()
        builder = Builder(machine.target, settings.precision(), inputs.images(), room)
        steps = builder.build(graph, values, lower)
    return steps, list(values.values())


class Program:
    """Steps with memory and code. To be made, used and closed with the machine active."""

    def __init__(self, machine: Machine, steps: Steps, inputs: list[Value]) -> None:
        self.steps = steps
        self.inputs = inputs
        self.places: Places = places(steps, inputs)
        # Which weights `lasting` was made of: `Resident.stamp`.
        self.stamp = -1
        self._machine = machine
        all_steps = [*steps.for_weights, *steps.for_images]
        loaded = machine.load([step.plan for step in all_steps])
        self._loaded = dict(zip(map(id, all_steps), loaded))
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._lasting = machine.allocate(self.places.lasting_bytes)

    def outputs(self) -> list[Value]:
        return self.steps.outputs

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
    """Why the steps' outputs are not those of `asked`, seen for so many images, or `None`."""
    for value, array in zip(steps.outputs, asked):
        wanted = (images, *array.shape[1:]) if images else array.shape
        if value.shape != wanted:
            return f"an output has shape {value.shape}, not {wanted}"
    return None


def check(steps: Steps, images: int, asked: Sequence[Array]) -> None:
    """Raise `UnsupportedProblem` if `refused` has a reason."""
    reason = refused(steps, images, asked)
    if reason is not None:
        raise UnsupportedProblem(reason)
