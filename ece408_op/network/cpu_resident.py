"""A network on the CPU: one program per input size."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .. import settings
from ..backends.cpu.cpu_backend import chosen_isa
from . import network_program
from .chunk_pipeline import Pass, Timings, Watched
from .gpu_weights import WeightsNeeded
from .graph import Graph
from .inputs import Call
from .machines.cpu import CpuProgram, Memory
from .machines.machine import Machine
from .resident import Part

# Maximum number of programs kept, for other input sizes or settings: those of one setting share
# their packed weights.
_MOST_PROGRAMS = 8


class CpuResident:
    """Programs of one graph. Calls are serialised: they share the memory of their arrays."""

    def __init__(self, machine: Machine, graph: Graph) -> None:
        self.machine = machine
        self._graph = graph
        self._lock = threading.Lock()
        self._programs: OrderedDict[Any, CpuProgram] = OrderedDict()
        self._arena = Memory(0)

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs for a call's inputs; its outputs do not count."""
        with self._lock:
            return [value.shape for value in self._program(call).steps.outputs]

    def compute(self, call: Call, part: Part, how: Callable[[Pass], Any]) -> Any:
        """Compute a call; `how` is a method of `Pass`. Raises `WeightsNeeded`,
        `UnsupportedProblem`, `InvalidProblem` and `NotEnoughMemory`."""
        begin = time.perf_counter()
        with self._lock:
            made = self._program(call)
            network_program.check(made.steps, call.inputs.images, call)
            if made.arena_bytes > self._arena.nbytes:
                self._arena = Memory(made.arena_bytes)
            if not made.is_ready(call.generation):
                if not call.are_held:
                    raise WeightsNeeded
                made.prepare(call.arrays, call.generation)
            seconds = made.run(self._arena, call.arrays, call.outputs, how is Pass.timed)
        if how is Pass.watched:
            return Watched(time.perf_counter() - begin)
        return Timings(made.steps.for_images, seconds) if seconds is not None else None

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            self._programs.clear()
            self._arena = Memory(0)

    def _program(self, call: Call) -> CpuProgram:
        key = call.inputs, settings.precision(), chosen_isa()
        if key not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.popitem(last=False)
            others = [each for of, each in self._programs.items() if of[1:] == key[1:]]
            kept = sorted({k for each in others for k in each.kept}, key=lambda k: k.number)
            lasting = {what: arrays for each in kept for what, arrays in each.made.items()}
            steps, values = network_program.build(
                self._graph, call.inputs, self.machine, lasting=lasting
            )
            self._programs[key] = CpuProgram(steps, values, kept)
        self._programs.move_to_end(key)
        return self._programs[key]
