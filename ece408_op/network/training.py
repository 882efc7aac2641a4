"""Networks with gradients: a forward pass that saves what the backward pass reads."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import settings
from ..backends.cpu import program
from ..backends.cpu.cpu_backend import chosen_isa
from ..errors import InvalidProblem
from . import gpu_memory, gpu_training, machines
from .builder import Lowering
from .gpu_training import GpuTrainingProgram
from .gradients import SEED, Joint, differentiate
from .gradients.joint_builder import JointBuilder, TwoPasses
from .graph import Graph
from .host_arrays import ITEM_BYTES, Array, check
from .machines.cpu import CpuCode, Memory
from .machines.machine import GpuMachine, Machine
from .operators import reshaping
from .values import INPUT, Buffer, Steps, Value

# Maximum number of programs kept.
_MOST_PROGRAMS = 8


class Training:
    """A network given as MXNet's JSON graph, with gradients for the variables `wanted`; `names` are
    its variables in order. With `train` it is as in training. It runs `on` a machine, as `Network`
    does, and on one GPU only: that of MXNet's `cpu(device)`. Programs share memory for the arrays
    of one pass. Thread-safe.

    Raises `UnsupportedProblem` for operators whose gradients are not computed.
    """

    def __init__(
        self,
        symbol_json: str,
        names: Sequence[str],
        wanted: Sequence[str],
        train: bool = True,
        on: str = "cpu",
        device: int = 0,
    ) -> None:
        graph = Graph.parse(symbol_json).pooled_first()
        graph.check_inputs(names)
        self._differentiated = partial(differentiate, graph, wanted, train, on != "cpu")
        self._joint = self._differentiated()
        self._names, self._wanted, self._on = tuple(names), tuple(wanted), (on, device)
        self._lock = threading.Lock()
        self._arena = _Arena()
        self._programs: OrderedDict[Any, TrainingProgram | GpuTrainingProgram] = OrderedDict()

    @property
    def averages(self) -> tuple[str, ...]:
        """The moving averages of normalisation, in the order of their new values."""
        return self._joint.averages

    @property
    def fixed(self) -> tuple[str, ...]:
        """The gammas that MXNet sets to 1 in training."""
        return self._joint.fixed

    def program(self, inputs: Sequence[Array]) -> TrainingProgram | GpuTrainingProgram:
        """Return the program for inputs of these shapes and types. Raises `UnsupportedProblem`,
        `InvalidProblem` and `NoUsableGpu`."""
        if len(inputs) != len(self._names):
            raise InvalidProblem(f"the network takes {len(self._names)} arrays, not {len(inputs)}")
        machine = machines.of_context(*self._on)
        shapes = tuple((each.shape, each.dtype) for each in inputs)
        precisions = settings.precision(), settings.gradient_precision()
        key = shapes, precisions, chosen_isa(), machine.key
        with self._lock:
            if key not in self._programs:
                if len(self._programs) >= _MOST_PROGRAMS:
                    self._programs.popitem(last=False)
                self._programs[key] = self._made(inputs, machine)
            self._programs.move_to_end(key)
            return self._programs[key]

    def _made(
        self, inputs: Sequence[Array], machine: Machine
    ) -> TrainingProgram | GpuTrainingProgram:
        values = {}
        for number, (name, array) in enumerate(zip(self._names, inputs)):
            check(array.dtype, name, ("float32",) if name in self._wanted else ITEM_BYTES)
            buffer = Buffer(INPUT, array.nbytes, number)
            values[name] = Value(buffer, array.shape, dtype=array.dtype)
        if self._joint.draws:
            values[SEED] = Value(Buffer(INPUT, gpu_training.SEED_BYTES, len(values)), (2,))
        lowering, outputs = machine.lowering(settings.precision()), self._joint.outputs
        if not isinstance(machine, GpuMachine):
            builder = JointBuilder(lowering, self._joint, values)
            return TrainingProgram(builder.build_joint(), builder.inputs, outputs, self._arena)
        memory = gpu_memory.memory_of(machine)
        steps, given = _built(lowering, self._joint, values)
        if not gpu_training.fits(steps, memory):
            steps, given = _built(lowering, self._differentiated(recomputes=True), values)
        averages = [self._names.index(name) for name in self.averages]
        return GpuTrainingProgram(memory, steps, given, outputs, averages)


def _built(lowering: Lowering, joint: Joint, values: dict[str, Value]) -> tuple[Steps, list[Value]]:
    """Return the steps for a GPU, and the inputs."""
    builder = JointBuilder(lowering, joint, values)
    steps = builder.build_joint()
    room = reshaping.room(joint.graph.nodes, builder.shapes)
    if room.goes_on:
        builder = JointBuilder(lowering, joint, values, room)
        steps = builder.build_joint()
    return steps, builder.inputs


class _Arena:
    """Memory of one pass at a time."""

    def __init__(self) -> None:
        self.lock, self.memory = threading.Lock(), Memory(0)


class TrainingProgram(CpuCode, TwoPasses):
    """Both passes for inputs of some shapes. The caller owns the `saved_bytes` of memory between
    them: `forward` writes there, and `backward` only reads, so it may run again. Both take arrays
    of exactly these shapes, and raise `InvalidProblem` for others, and `NotEnoughMemory`."""

    def __init__(self, steps: Steps, inputs: list[Value], outputs: int, arena: _Arena) -> None:
        super().__init__(steps, inputs[: len(inputs) - outputs])
        self._values, self._outputs, self._arena = inputs, outputs, arena

    def forward(self, inputs: Sequence[Array], outputs: Sequence[Array], saved: int) -> None:
        """Compute the outputs, and save at an address what `backward` reads."""
        values = self._values[: len(self._values) - self._outputs]
        _check([*inputs, *outputs], [*values, *self.steps.outputs[: self._outputs]])
        self._compute(slice(self.steps.forward), [*inputs, *outputs], saved)

    def backward(
        self,
        inputs: Sequence[Array],
        head_gradients: Sequence[Array],
        results: Sequence[Array],
        saved: int,
    ) -> None:
        """Compute the wanted gradients, then the new moving averages, from the gradients for the
        outputs. The inputs are those of the forward pass."""
        given = [*inputs, *head_gradients]
        _check([*given, *results], [*self._values, *self.steps.outputs[self._outputs :]])
        self._compute(slice(self.steps.forward, None), [*given, *results], saved)

    def _compute(self, part: slice, arrays: Sequence[Array], saved: int) -> None:
        """Run one of the passes on its arrays: the outputs, or the gradients for them, follow the
        inputs."""
        bases = (ctypes.c_void_p * (1 + self.first_kept))()
        for number, array in enumerate(arrays, 1):
            bases[number] = array.address
        bases[len(bases) - 1] = saved
        first, end, _ = part.indices(len(self.for_images))
        size = ctypes.sizeof(program.Step)
        steps = (program.Step * (end - first)).from_buffer(self.for_images, first * size)
        with self._arena.lock:
            if self.arena_bytes > self._arena.memory.nbytes:
                self._arena.memory = Memory(self.arena_bytes)
            bases[0] = self._arena.memory.address
            program.run(steps, len(steps), bases, settings.threads(), self.isa)


def _check(arrays: Sequence[Array], expected: Sequence[Value]) -> None:
    found = [(each.shape, each.dtype) for each in arrays]
    right = [(each.shape, each.dtype) for each in expected]
    if found != right:
        raise InvalidProblem(f"the arrays are {found}; this program takes {right}")
