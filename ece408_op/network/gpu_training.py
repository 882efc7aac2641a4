"""Both passes of a network with gradients on one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from .. import op_log, settings
from ..backends.cpu.native import copy
from ..errors import NotEnoughMemory
from . import residents
from .chunk_pipeline import COPIED_BYTES
from .gpu_memory import Block, GpuMemory
from .gradients.joint_builder import TwoPasses
from .host_arrays import Array
from .machines.machine import Recorded, Run
from .memory_planner import Places, aligned, places
from .residents import Resident
from .values import ARENA, SAVED, Step, Steps, Value

# Recordings of passes are kept for this number of places of their memory.
_MOST_RECORDED = 16
_NOWHERE = -1
SEED_BYTES = 8
_passes = itertools.count(1)


class Saved:
    """Memory that a forward pass saves on the GPU. Backward passes only read it."""

    def __init__(self, block: Block) -> None:
        self.block = block
        # The number of the pass, and the seed of its random numbers.
        self.number, self.seed = 0, np.zeros(1, np.uint64)


class GpuTrainingProgram(TwoPasses):
    """Both passes for inputs of some shapes. `variables` are the network's inputs, and `inputs`
    also has the gradients for its `outputs`. All of them have one block of memory on the GPU, where
    a backward pass still finds what its forward pass read, unless another one came between, or the
    array has another version: MXNet, too, computes gradients from what arrays contain then.
    `averages` are the numbers of the variables whose new values are the last results.

    A backward pass of which nothing is copied to the host is left in progress when it returns.

    Passes raise `NotEnoughMemory`, `GpuFailed` and compiler errors, and return the seconds of each
    step if the log of op times is collecting them.
    """

    def __init__(
        self,
        memory: GpuMemory,
        steps: Steps,
        inputs: Sequence[Value],
        outputs: int,
        averages: Sequence[int],
    ) -> None:
        self.steps, self._memory, self._machine = steps, memory, memory.machine
        self._outputs = outputs
        variables = len(inputs) - outputs
        self._found = _places(steps)
        self.saved_bytes = self._found.saved_bytes
        self._inputs = inputs
        forward, backward = steps.for_images[: steps.forward], steps.for_images[steps.forward :]
        self._passes = [forward, backward]
        # The number of averages; 0 if one is read after its new value is there.
        self._moved = len(averages)
        for number, value in zip(averages, steps.outputs[len(steps.outputs) - self._moved :]):
            if max(_uses(backward, inputs[number])) > min(_uses(backward, value)):
                self._moved = 0
        self._variables = [_read(inputs[:variables], forward), _read(inputs[:variables], backward)]
        self._given = _read(inputs[variables:], backward)
        # Arrays that are copied together are adjacent.
        first = dict.fromkeys(self._variables[0])
        others = [value for value in inputs if value.buffer.number not in first]
        self._offsets: dict[int, int] = {}
        self._nbytes = 0
        for value in (*(inputs[number] for number in first), *others, *steps.outputs):
            self._offsets[id(value.buffer)] = self._nbytes
            self._nbytes = aligned(self._nbytes + value.buffer.nbytes)
        # By buffer: the resident parameter in its place, and the address.
        self._residents: dict[int, tuple[Resident, int]] = {}
        # For inputs and then results: the arrays' addresses when residents were searched for, in
        # which generation, and what was found.
        self._values = [*inputs, *steps.outputs[outputs:]]
        self._addresses: list[int] = [_NOWHERE] * len(self._values)
        self._searched: list[Resident | None] = [None] * len(self._values)
        self._generation = residents.generation
        self._results = range(len(inputs), len(self._values))
        self._gradients = self._results[: len(self._results) - self._moved]
        # By input: the number of the pass whose values its copy has, and the array's version.
        self._passes_of: dict[int, tuple[int, int]] = {}
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        # Where the next images wait for the end of work in progress.
        self._landing: Block | None = None
        with self._machine.lock, self._machine.active():
            loaded = self._machine.load([step.plan for step in steps.for_images])
            self._block = memory.lend(self._nbytes, "training: the network's arrays")
        self._loaded = dict(zip(map(id, steps.for_images), loaded))
        self._workspaces = {
            id(step): self._found.workspaces.get(number, 0)
            for number, step in enumerate(steps.for_images)
        }

    def __del__(self) -> None:
        self._memory.ended.extend(vars(self).get("_recorded", {}).values())

    def room(self) -> Saved:
        """Return memory for what a forward pass saves."""
        with self._machine.lock, self._machine.active():
            return Saved(self._memory.lend(self.saved_bytes, "training: what is saved of a batch"))

    def forward(
        self, inputs: Sequence[Array], outputs: Sequence[Array], saved: Saved, seed: int = 0
    ) -> list[float] | None:
        """Compute the outputs, and save what `backward` reads. Random numbers are of a `seed` of 64
        bits."""
        saved.number, saved.seed[0] = next(_passes), seed
        inputs = self._with_seed(inputs, saved)
        with self._active() as lane:
            self._bring(lane, self._variables[0], inputs, saved.number)
            seconds = self._compute(lane, 0, saved)
            self._send(lane, zip(self.steps.outputs[: self._outputs], outputs))
        return seconds

    def backward(
        self,
        inputs: Sequence[Array],
        head_gradients: Sequence[Array],
        results: Sequence[Array],
        saved: Saved,
    ) -> list[float] | None:
        """Compute the wanted gradients, then the new moving averages, from the gradients for the
        outputs. The inputs are those of the forward pass."""
        given = [*self._with_seed(inputs, saved), *head_gradients]
        pairs = zip(self.steps.outputs[self._outputs :], results)
        gradients = len(results) - self._moved
        with self._active() as lane:
            self._memory.wait()
            self._bring(lane, self._variables[1], given, saved.number)
            self._bring(lane, self._given, given, next(_passes))
            stay = self._find(self._results, results)
            for average in filter(None, stay[gradients:]):
                # Also if the pass is interrupted.
                average.is_ahead = True
            seconds = self._compute(lane, 1, saved)
            self._send(lane, [pair for pair, each in zip(pairs, stay) if each is None])
            for each, array in zip(stay[:gradients], results):
                if each is not None:
                    each.gradient_version = array.version
        moved = zip(stay[gradients:], results[gradients:])
        residents.averages.update(array.address for each, array in moved if each is None)
        return seconds

    def _with_seed(self, inputs: Sequence[Array], saved: Saved) -> Sequence[Array]:
        if len(inputs) + self._outputs == len(self._inputs):
            return inputs
        return [*inputs, Array(saved.seed.ctypes.data, (SEED_BYTES // 4,), "float32", 0)]

    @contextmanager
    def _active(self) -> Iterator[Any]:
        machine, arena = self._machine, self._found.device_bytes
        with machine.lock, machine.active(), self._memory.lane(arena, self._nbytes) as lane:
            yield lane

    def _bring(
        self, lane: Any, numbers: Sequence[int], arrays: Sequence[Array], of_pass: int
    ) -> None:
        """Copy those arrays to the GPU that it does not have since this pass."""
        moves: list[tuple[int, Array]] = []
        brought: dict[int, tuple[int, int]] = {}
        given = [arrays[number] for number in numbers]
        for number, array, resident in zip(numbers, given, self._find(numbers, given)):
            if resident is None:
                known = self._passes_of.pop(number, None)
                brought[number] = of_pass, array.version
                if known != brought[number]:
                    moves.append((self._offsets[id(self._inputs[number].buffer)], array))
            elif resident.version != array.version:
                resident.bring(array.version)
        if moves and self._memory.is_busy and self._has_landing(moves):
            self._bring_beside(lane, moves)
        else:
            for part in _parts(moves):
                _copy([(lane.host + at, array.address, array.nbytes) for at, array in part])
                for first, nbytes in _runs(part):
                    address = self._block.address + first
                    lane.bring(address - lane.device, nbytes, lane.host + first)
            lane.brought()
        self._passes_of.update(brought)

    def _has_landing(self, moves: Sequence[tuple[int, Array]]) -> bool:
        """Return whether there is memory for `_bring_beside`."""
        nbytes = sum(aligned(array.nbytes) for _, array in moves)
        if self._landing is None or self._landing.nbytes < nbytes:
            # What is lent may have been another's, which work in progress reads.
            self._memory.wait()
            self._landing = None
            with suppress(NotEnoughMemory):
                self._landing = self._memory.lend(nbytes, "training: the next images")
        return self._landing is not None

    def _bring_beside(self, lane: Any, moves: Sequence[tuple[int, Array]]) -> None:
        """Copy arrays to the GPU during the work in progress, which may still read those before."""
        assert self._landing is not None
        begins = [0, *itertools.accumulate(aligned(array.nbytes) for _, array in moves)]
        landing = self._landing.address
        lane.wait_for_copies()
        for begin, (at, array) in zip(begins, moves):
            _copy([(lane.host + at, array.address, array.nbytes)])
            lane.bring(landing + begin - lane.device, array.nbytes, lane.host + at)
        lane.brought()
        for begin, (at, array) in zip(begins, moves):
            lane.move(self._block.address + at, landing + begin, array.nbytes)

    def _find(self, numbers: Sequence[int], arrays: Sequence[Array]) -> list[Resident | None]:
        """Return the resident parameters in the places of inputs or results, if any."""
        if self._generation != residents.generation:
            self._generation = residents.generation
            self._addresses = [_NOWHERE] * len(self._addresses)
        addresses = self._addresses
        for number, array in zip(numbers, arrays):
            if array.address != addresses[number]:
                self._search(number, array)
        return [self._searched[number] for number in numbers]

    def _search(self, number: int, array: Array) -> None:
        """Find the resident parameter in the place of an array, and note where it or its gradient
        is."""
        is_gradient = number in self._gradients
        found = residents.find(array, self._machine, is_gradient)
        self._addresses[number], self._searched[number] = array.address, found
        self._passes_of.pop(number, None)
        key = id(self._values[number].buffer)
        before = self._residents.pop(key, None)
        if found is not None:
            place = found.gradient if is_gradient else found.weight
            self._residents[key] = found, place.address
        elif before is not None and not is_gradient:
            before[0].check(None)
        if self._residents.get(key) != before:
            self._forget()

    def _forget(self) -> None:
        """Discard the recordings."""
        self._memory.ended.extend(self._recorded.values())
        self._recorded = {}

    def _send(self, lane: Any, results: Iterable[tuple[Value, Array]]) -> None:
        """Copy results, if any, to arrays when all work is done; else leave it in progress."""
        moves = [(self._offsets[id(value.buffer)], array) for value, array in results]
        self._memory.is_busy = True
        if not moves:
            return
        for first, nbytes in _runs(moves):
            lane.copy_out(self._block.address + first - lane.device, nbytes, lane.host + first)
        self._memory.wait()
        _copy([(array.address, lane.host + at, array.nbytes) for at, array in moves])

    def _compute(self, lane: Any, of: int, saved: Saved) -> list[float] | None:
        steps = self._passes[of]
        if op_log.collecting():
            return self._machine.timed(lane, self._resolved(steps, lane, saved))
        key = of, lane.device, lane.host, saved.block.address
        if key not in self._recorded:
            if len(self._recorded) >= _MOST_RECORDED:
                self._forget()
            runs = self._resolved(steps, lane, saved)
            self._recorded[key] = self._machine.record(lane, runs)
        self._recorded[key].launch()
        return None

    def _resolved(self, steps: Sequence[Step], lane: Any, saved: Saved) -> list[Run]:
        runs = []
        for step in steps:
            pointers = {n: self._address(v, lane, saved) for n, v in step.arrays.items()}
            if step.plan.workspace_bytes:
                pointers["workspace"] = lane.device + self._workspaces[id(step)]
            runs.append(Run(self._loaded[id(step)], pointers))
        return runs

    def _address(self, value: Value, lane: Any, saved: Saved) -> int:
        buffer = value.buffer
        if buffer.kind in (ARENA, SAVED):
            base = lane.device if buffer.kind == ARENA else saved.block.address
            return base + self._found.of(buffer) + value.offset
        if id(buffer) in self._residents:
            return self._residents[id(buffer)][1] + value.offset
        return self._block.address + self._offsets[id(buffer)] + value.offset


def fits(steps: Steps, memory: GpuMemory) -> bool:
    """Return whether the GPU has room for what a batch takes."""
    found = _places(steps)
    return memory.has_room(found.saved_bytes + found.device_bytes)


def _places(steps: Steps) -> Places:
    return places(replace(steps, outputs=[]), ())


def _uses(steps: Sequence[Step], value: Value) -> list[int]:
    """Return the numbers of the steps that read or write an array."""
    arrays = (step.arrays.values() for step in steps)
    return [n for n, of in enumerate(arrays) if any(each.buffer is value.buffer for each in of)]


def _copy(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy on the host; other threads are worth their time for large copies only."""
    is_large = sum(nbytes for *_, nbytes in copies) >= COPIED_BYTES // 8
    copy(copies, settings.threads() if is_large else 1)


def _read(values: Sequence[Value], steps: Sequence[Step]) -> list[int]:
    """Return the numbers of the inputs that steps read."""
    read = {id(value.buffer) for step in steps for value in step.arrays.values()}
    return [value.buffer.number for value in values if id(value.buffer) in read]


def _parts(moves: Sequence[tuple[int, Array]]) -> Iterator[list[tuple[int, Array]]]:
    """Yield the moves in parts of some size."""
    part: list[tuple[int, Array]] = []
    nbytes = 0
    for move in moves:
        part.append(move)
        nbytes += move[1].nbytes
        if nbytes >= COPIED_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _runs(moves: Sequence[tuple[int, Array]]) -> Iterator[tuple[int, int]]:
    """Yield the begin and the size of each range that adjacent moves fill."""
    begin = end = -1
    for place, array in moves:
        if place != aligned(end) or begin < 0:
            if begin >= 0:
                yield begin, end - begin
            begin = place
        end = place + array.nbytes
    if begin >= 0:
        yield begin, end - begin
