"""Builder of a graph with gradients: two passes, and what is saved between them."""

from __future__ import annotations

import math

from ..builder import Builder, Lowering, Operand, Room, values_of
from ..graph import Entry
from ..host_arrays import ITEM_BYTES
from ..values import ARENA, INPUT, SAVED, Buffer, Steps, Value
from . import Joint
from .lowering import lower


class JointBuilder(Builder):
    """Builds the steps of a graph with gradients."""

    def __init__(
        self, lowering: Lowering, joint: Joint, values: dict[str, Value], room: Room | None = None
    ) -> None:
        super().__init__(lowering, 0, room, results=["float32"] * len(joint.graph.heads))
        # Those of the network, then the gradients for its outputs.
        self.inputs = list(values.values())
        self._joint, self._values = joint, values

    def build_joint(self) -> Steps:
        """Return the steps. Raises `UnsupportedProblem` and `InvalidProblem`."""
        joint, steps = self._joint, self.steps
        graph, found = joint.graph, dict[Entry, Operand]()
        self._uses, self._counts = graph.uses, graph.outputs
        saved: list[Buffer] = []
        for number, node in enumerate(graph.nodes):
            if number == joint.backward:
                saved = self._cut(found)
            if node.op != "null":
                self._node(found, number, node, lower)
            else:
                is_given = number < joint.backward
                value = self._values[node.name] if is_given else self._gradient_of(number)
                self._bind(found, Entry(number), self.given(value))
        for number in range(joint.outputs, len(graph.heads)):
            self._output(found[graph.heads[number]], number)
        late = steps.for_images[steps.forward :]
        read = {id(value.buffer) for step in late for value in step.arrays.values()}
        for buffer in saved:
            # Of the others only the shape was needed.
            buffer.kind = SAVED if id(buffer) in read else ARENA
        return steps

    def _cut(self, found: dict[Entry, Operand]) -> list[Buffer]:
        """End the forward pass: no later step overwrites what it leaves."""
        joint = self._joint
        late = joint.graph.nodes[joint.backward :]
        entries = {entry for node in late for entry in node.inputs if entry in found}
        buffers = [value.buffer for entry in sorted(entries) for value in values_of(found[entry])]
        saved = [buffer for buffer in buffers if buffer.kind == ARENA]
        for buffer in saved:
            buffer.kind = SAVED
        for number in range(joint.outputs):
            self._output(found[joint.graph.heads[number]], number)
        self.steps.forward = len(self.steps.for_images)
        return saved

    def _gradient_of(self, number: int) -> Value:
        """Return the array of the gradient for an output, one of the nodes after the cut."""
        shape = self.steps.outputs[number - self._joint.backward].shape
        buffer = Buffer(INPUT, ITEM_BYTES["float32"] * math.prod(shape), len(self.inputs))
        self.inputs.append(Value(buffer, shape))
        return self.inputs[-1]


class TwoPasses:
    """The `steps` of a graph with gradients and `_outputs` outputs."""

    steps: Steps
    _outputs: int

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        return [value.shape for value in self.steps.outputs[: self._outputs]]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Those of the gradients and the new moving averages."""
        return [value.shape for value in self.steps.outputs[self._outputs :]]
