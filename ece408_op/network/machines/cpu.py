"""The CPU as a network's machine: one call of C computes a program."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ... import settings
from ...backends import Done
from ...backends.cpu import native, program
from ...backends.cpu.cpu_backend import chosen_isa
from ...backends.cpu.program import Kind
from ...errors import NotEnoughMemory
from ..host_arrays import Array
from ..memory_planner import aligned, places
from ..values import ARENA, INPUT, LASTING, OUTPUT, WEIGHT, Step, Steps, Value
from .cpu_steps import CpuPlan, CpuSteps
from .machine import Machine

_LINE = 64
_MEMBERS = {field[1]: field[0] for field in program.Of._fields_}


class Cpu(Machine):
    """The machine. Calls of different networks run at the same time."""

    backend = "cpu"
    key = ("cpu",)
    lock = contextlib.nullcontext()

    def lowering(self, precision: str) -> CpuSteps:
        return CpuSteps(chosen_isa(), precision == "strict")

    def done(self, plan: CpuPlan, seconds: float) -> Done:
        strict = plan.kind == Kind.CONVOLVE and plan.of.strict
        return Done(plan.name, "strict" if strict else "float32")

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Memory:
    """Bytes from a cache line on. Raises `NotEnoughMemory`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._array = np.empty(nbytes + _LINE, np.uint8)
        except MemoryError:
            raise NotEnoughMemory(
                f"the network takes {nbytes} bytes for its arrays, and there is no room; use a "
                "smaller batch"
            ) from None
        self.address = -(-self._array.ctypes.data // _LINE) * _LINE
        native.ask_for_huge_pages(self.address, nbytes)


class CpuCode:
    """Steps as structures, for calls that bring `arena_bytes` of memory and keep `lasting_bytes` of
    their weights. With `copies`, weights that images need are copied there, too, unless they are
    packed."""

    def __init__(self, steps: Steps, inputs: int, copies: bool) -> None:
        self.steps = steps
        self.isa = chosen_isa()
        self._inputs = inputs
        self._places = places(replace(steps, outputs=[]), ())
        self.arena_bytes = self._places.device_bytes
        self.lasting_bytes = self._places.lasting_bytes
        self._copied: dict[int, tuple[int, int]] = {}
        for step in steps.for_images if copies else ():
            self._copy_weights(step)
        self.for_weights = self._made(steps.for_weights, False)
        self.for_images = self._made(steps.for_images, True)

    def _copy_weights(self, step: Step) -> None:
        """Plan copies of the weights that a call would read, except those that are packed."""
        packed = ("w", "bias") if "packed" in step.arrays else ()
        for name, value in step.arrays.items():
            buffer = value.buffer
            if buffer.kind == WEIGHT and name not in packed and buffer.number not in self._copied:
                self._copied[buffer.number] = self.lasting_bytes, buffer.nbytes
                self.lasting_bytes = aligned(self.lasting_bytes + buffer.nbytes)

    def _made(self, steps: Sequence[Step], for_images: bool) -> Any:
        made = (program.Step * len(steps))()
        for of, step in zip(made, steps):
            plan = step.plan
            assert isinstance(plan, CpuPlan)
            of.kind = plan.kind
            setattr(of.of, _MEMBERS[type(plan.of)], plan.of)
            for number, name in enumerate(plan.inputs):
                value = step.arrays[name] if name else None
                of.inputs[number] = self._operand(value, for_images)
            of.out = self._operand(step.arrays["y"], for_images)
        return made

    def _operand(self, value: Value | None, for_images: bool) -> program.Operand:
        if value is None:
            return program.Operand(base=-1)
        buffer, kind = value.buffer, program.TYPES[value.dtype]
        offset = value.offset
        if buffer.kind in (ARENA, LASTING):
            base = 1 if buffer.kind == LASTING else 0
            offset += self._places.of(buffer)
        elif buffer.kind == OUTPUT:
            base = 2 + self._inputs + buffer.number
        elif for_images and buffer.number in self._copied:
            base, offset = 1, offset + self._copied[buffer.number][0]
        else:
            base = 2 + buffer.number
        image = 0 if value.shape[:1] == (1,) else value.image
        return program.Operand(offset, image, base, kind)


class CpuProgram(CpuCode):
    """Code with its lasting memory. Weights are read in `prepare` only, unless `reads_weights` is
    set after it: a kernel could not pack some that are not finite."""

    def __init__(self, steps: Steps, inputs: Sequence[Value]) -> None:
        super().__init__(steps, len(inputs), copies=True)
        self.reads_weights = False
        # Calls with these weights are prepared.
        self.generation = -1
        self._packed = [step.arrays["y"] for step in steps.for_weights if _kind(step) == Kind.PACK]
        self._data = [each.buffer.number for each in inputs if each.buffer.kind == INPUT]
        self._lasting = Memory(self.lasting_bytes)
        count = 2 + len(inputs) + len(steps.outputs)
        self._bases = (ctypes.c_void_p * count)(None, self._lasting.address)

    def prepare(self, arena: Memory, arrays: Sequence[Array]) -> None:
        """Copy and pack weights."""
        self._bases[0] = arena.address
        for number, (offset, nbytes) in self._copied.items():
            ctypes.memmove(self._lasting.address + offset, arrays[number].address, nbytes)
        self._place(arrays, range(self._inputs))
        self._run(self.for_weights, False)
        packed = (self._lasting.address + self._places.of(y.buffer) for y in self._packed)
        self.reads_weights = not all(ctypes.c_int32.from_address(at).value for at in packed)

    def run(
        self, arena: Memory, arrays: Sequence[Array], outputs: Sequence[Array], timed: bool
    ) -> list[float] | None:
        """Compute the outputs; return the seconds of each step if `timed`."""
        self._bases[0] = arena.address
        self._place(arrays, range(self._inputs) if self.reads_weights else self._data)
        for number, array in enumerate(outputs, 2 + self._inputs):
            self._bases[number] = array.address
        return self._run(self.for_images, timed)

    def _place(self, arrays: Sequence[Array], numbers: Iterable[int]) -> None:
        for number in numbers:
            self._bases[2 + number] = arrays[number].address

    def _run(self, steps: Any, timed: bool) -> list[float] | None:
        return program.run(steps, len(steps), self._bases, settings.threads(), self.isa, timed)


def _kind(step: Step) -> Kind | None:
    return step.plan.kind if isinstance(step.plan, CpuPlan) else None
