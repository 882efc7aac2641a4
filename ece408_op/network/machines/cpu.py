"""The CPU as a network's machine: one call of C computes a program."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ... import settings
from ...backends import Done
from ...backends.cpu import native, program
from ...backends.cpu.cpu_backend import chosen_isa
from ...backends.cpu.program import Kind
from ...errors import NotEnoughMemory
from ..host_arrays import Array
from ..memory_planner import Places, aligned, places
from ..values import ARENA, INPUT, LASTING, OUTPUT, SAVED, WEIGHT, Buffer, Step, Steps, Value
from .cpu_steps import CpuPlan, CpuSteps
from .machine import Machine

_LINE = 64
# 0 is none of the compiled operator's numbers.
_numbers = itertools.count(1)


class Cpu(Machine):
    """The machine. Calls of different networks run at the same time."""

    backend = "cpu"
    key = ("cpu",)
    lock = contextlib.nullcontext()

    def lowering(self, precision: str) -> CpuSteps:
        return CpuSteps(chosen_isa(), precision == "strict")

    def done(self, plan: CpuPlan, seconds: float) -> Done:
        convolves = plan.kind == Kind.CONVOLVE
        strict = convolves and program.Convolve.from_buffer_copy(plan.of).strict
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


class KeptCode:
    """What one program of a graph was the first to need of its weights, for the others too: arrays
    that its steps compute from weights, by their recipes in `made`, and copies of weights, in
    `nbytes` of memory. The steps may read what was kept `before`. `copies` are the numbers, places
    and bytes of the copied weights; `packed` the places of packed ones."""

    def __init__(
        self,
        steps: Steps,
        found: Places,
        inputs: int,
        copies: Sequence[Buffer],
        before: Sequence[KeptCode],
    ) -> None:
        self.number = next(_numbers)
        self.made, self.before = steps.lasting, before
        # Only programs of these settings read it.
        self.settings = settings.precision(), chosen_isa()
        written = [step.arrays["y"].buffer for step in steps.for_weights]
        self.offsets: dict[object, int] = {buffer: found.of(buffer) for buffer in written}
        self.nbytes = found.lasting_bytes
        self.copies: list[tuple[int, int, int]] = []
        for buffer in copies:
            self.offsets[_key(buffer)] = self.nbytes
            self.copies.append((buffer.number, self.nbytes, buffer.nbytes))
            self.nbytes = aligned(self.nbytes + buffer.nbytes)
        packs = zip(written, steps.for_weights)
        self.packed = [self.offsets[y] for y, step in packs if _plan(step).kind == Kind.PACK]
        places_of = _PlacesOf(found, inputs, 1 + inputs, [*before, self], False)
        self.steps = places_of.program(steps.for_weights)


class CpuCode:
    """Steps as structures, for calls that bring `arena_bytes` of memory, with what is kept of their
    weights: by other programs of the graph, from which `kept` are those in order of creation, and
    by this one. Operands are in the arena, the inputs, the outputs, what is kept, and `saved_bytes`
    of the caller's between its passes. It `reads` the weights of these numbers in place."""

    def __init__(
        self, steps: Steps, inputs: Sequence[Value], kept: Sequence[KeptCode] = ()
    ) -> None:
        self.steps = steps
        self.isa = chosen_isa()
        found = places(replace(steps, outputs=[]), ())
        self.arena_bytes, self.saved_bytes = found.device_bytes, found.saved_bytes
        self.kept, read = _needed(steps, kept)
        copies = read if self.copies else []
        self.reads = sorted({buffer.number for buffer in read})
        if steps.for_weights or copies:
            more = self.keep(steps, found, len(inputs), copies, self.kept)
            self.kept = [*self.kept, more]
        self.first_kept = 1 + len(inputs) + len(steps.outputs)
        places_of = _PlacesOf(found, len(inputs), self.first_kept, self.kept, True)
        self.for_images = places_of.program(steps.for_images)

    # Makes what is kept; whether that has copies of weights, which are read in their place.
    keep: ClassVar[type[Any]] = KeptCode
    copies: ClassVar[bool] = False


class Kept(KeptCode):
    """With its memory."""

    def __init__(
        self,
        steps: Steps,
        found: Places,
        inputs: int,
        copies: Sequence[Buffer],
        before: Sequence[Kept],
    ) -> None:
        super().__init__(steps, found, inputs, copies, before)
        # Calls with these weights may read it.
        self.generation = -1
        # A kernel could not pack weights that are not finite, and reads them in place.
        self.reads_weights = False
        self._memory = Memory(self.nbytes)
        self.address = self._memory.address
        self._isa = chosen_isa()
        addresses = *[None] * (1 + inputs), *(each.address for each in [*before, self])
        self._bases = (ctypes.c_void_p * len(addresses))(*addresses)

    def prepare(self, arrays: Sequence[Array], generation: int) -> None:
        """Compute and copy it from these weights, unless it is of them."""
        if self.generation == generation:
            return
        self.generation = -1
        for number, place, nbytes in self.copies:
            ctypes.memmove(self.address + place, arrays[number].address, nbytes)
        for number, array in enumerate(arrays, 1):
            self._bases[number] = array.address
        program.run(self.steps, len(self.steps), self._bases, settings.threads(), self._isa)
        packed = (ctypes.c_int32.from_address(self.address + place) for place in self.packed)
        self.reads_weights = not all(flag.value for flag in packed)
        self.generation = generation


class CpuProgram(CpuCode):
    """Code with the memory of what is kept. Calls may read weights only if they are not `is_ready`
    until `prepare`."""

    kept: list[Kept]

    def __init__(self, steps: Steps, inputs: Sequence[Value], kept: Sequence[Kept] = ()) -> None:
        super().__init__(steps, inputs, kept)
        self._inputs = len(inputs)
        self._data = [each.buffer.number for each in inputs if each.buffer.kind == INPUT]
        addresses = *[None] * self.first_kept, *(each.address for each in self.kept)
        self._bases = (ctypes.c_void_p * len(addresses))(*addresses)
        self._weights = [each.buffer.number for each in inputs if each.buffer.kind == WEIGHT]
        if self.kept:
            # Kernels that do not read weights want some address of them.
            for number in self._weights:
                self._bases[1 + number] = self.kept[0].address

    keep, copies = Kept, True

    def is_ready(self, generation: int) -> bool:
        """Return whether it computes with these weights, and reads none."""
        return all(e.generation == generation and not e.reads_weights for e in self.kept)

    def prepare(self, arrays: Sequence[Array], generation: int) -> None:
        """Copy and pack weights."""
        for each in self.kept:
            each.prepare(arrays, generation)
        for number in self._weights:
            self._bases[1 + number] = arrays[number].address

    def run(
        self, arena: Memory, arrays: Sequence[Array], outputs: Sequence[Array], timed: bool
    ) -> list[float] | None:
        """Compute the outputs; return the seconds of each step if `timed`."""
        bases = self._bases
        bases[0] = arena.address
        for number in self._data:
            bases[1 + number] = arrays[number].address
        for number, array in enumerate(outputs, 1 + self._inputs):
            bases[number] = array.address
        steps = self.for_images
        return program.run(steps, len(steps), bases, settings.threads(), self.isa, timed)


def _needed(steps: Steps, kept: Sequence[KeptCode]) -> tuple[list[Any], list[Buffer]]:
    """Return what steps need of what is kept, and the weights that a call would read besides."""
    where = {key: each for each in kept for key in each.offsets}
    needed: set[KeptCode] = set()
    read: dict[object, Buffer] = {}
    for step in (*steps.for_weights, *steps.for_images):
        of_weights, packed = step.arrays["y"].constant, _plan(step).reads_packed
        for name, value in step.arrays.items():
            buffer, key = value.buffer, _key(value.buffer)
            if buffer.kind == WEIGHT and (of_weights or (packed and name == "w")):
                continue
            if key in where:
                needed |= {where[key], *where[key].before}
            elif buffer.kind == WEIGHT:
                read[key] = buffer
    return [each for each in kept if each in needed], list(read.values())


def _key(buffer: Buffer) -> object:
    """Return what names an array of weights in all programs of the graph."""
    return (buffer.number, buffer.nbytes) if buffer.kind == WEIGHT else buffer


class _PlacesOf:
    """The places of arrays in a program's bases: the arena, its inputs, its outputs, from base
    `first` on what is kept of weights, and what is saved between passes. Steps `for_images` read
    copies of weights."""

    def __init__(
        self, found: Places, inputs: int, first: int, kept: Sequence[KeptCode], for_images: bool
    ) -> None:
        self._found, self._inputs, self._for_images = found, inputs, for_images
        self._saved = first + len(kept)
        self._kept = {
            key: (base, offset)
            for base, each in enumerate(kept, first)
            for key, offset in each.offsets.items()
        }

    def program(self, steps: Sequence[Step]) -> Any:
        made = []
        for step in steps:
            plan = _plan(step)
            inputs, also = self._all(step, plan.inputs), self._all(step, plan.also)
            made.append((plan.kind, inputs, self._of(step.arrays["y"]), also, plan.of))
        return program.steps_of(made)

    def _all(self, step: Step, names: Sequence[str]) -> bytes:
        found = map(step.arrays.get, names)
        return b"".join([self._of(each) if each else program.NOWHERE for each in found])

    def _of(self, value: Value) -> bytes:
        buffer, key = value.buffer, _key(value.buffer)
        base, offset = 0, value.offset
        if buffer.kind == ARENA:
            offset += self._found.of(buffer)
        elif buffer.kind == SAVED:
            base, offset = self._saved, offset + self._found.of(buffer)
        elif key in self._kept and (self._for_images or buffer.kind == LASTING):
            base, first = self._kept[key]
            offset += first
        else:
            base = 1 + buffer.number + (self._inputs if buffer.kind == OUTPUT else 0)
        image = 0 if value.shape[:1] == (1,) else value.image
        return program.PLACE.pack(offset, image, base, program.TYPES[value.dtype])


def _plan(step: Step) -> CpuPlan:
    assert isinstance(step.plan, CpuPlan)
    return step.plan
