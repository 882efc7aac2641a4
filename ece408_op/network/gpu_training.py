"""Both passes of a network with gradients on one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import op_log, settings
from ..backends.cpu.native import copy
from ..errors import NotEnoughMemory
from . import residents
from .chunk_pipeline import COPIED_BYTES
from .gpu_memory import Block, GpuMemory
from .gradients.joint_builder import TwoPasses
from .host_arrays import ITEM_BYTES
from .machines.machine import Recorded, Run
from .memory_planner import Places, aligned, places
from .residents import Resident
from .values import ARENA, SAVED, Step, Steps, Value

# Recordings of passes are kept for this number of places of their memory.
_MOST_RECORDED = 16
_NOWHERE = -1
SEED_BYTES = 8
_passes = itertools.count(1)
# The offset of an array in a program's block, its address on the host, and its size in bytes.
_Move = tuple[int, int, int]


class Saved:
    """Memory that a forward pass saves on the GPU. Backward passes only read it."""

    def __init__(self, block: Block) -> None:
        self.block = block
        # The number of the pass, and the seed of its random numbers.
        self.number, self.seed = 0, np.zeros(1, np.uint64)


class _Group:
    """Numbers of arrays, divided by whether a resident parameter is in an array's place."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.held: list[tuple[int, Resident]] = []
        self.loose = list(numbers)

    def divide(self, in_places: Sequence[Resident | None]) -> None:
        pairs = [(number, in_places[number]) for number in self.numbers]
        self.held = [(number, resident) for number, resident in pairs if resident is not None]
        self.loose = [number for number, resident in pairs if resident is None]


class Given(NamedTuple):
    """The host arrays of a pass, in order: their addresses and their versions, as in `Array`."""

    addresses: list[int]
    versions: list[int]


class GpuTrainingProgram(TwoPasses):
    """Both passes for inputs of some shapes. `inputs` are the network's, and the gradients for its
    `outputs`. All of them have one block of memory on the GPU, where a backward pass still finds
    what its forward pass read, unless another one came between, or the array has another version:
    MXNet, too, computes gradients from what arrays contain then. `averages` are the numbers of the
    inputs whose new values are the last results. Here, arrays are numbered as a backward pass has
    them: the network's inputs, the gradients for the outputs, the results.

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
        self._outputs, self._arrays = outputs, [*inputs, *steps.outputs[outputs:]]
        self._found = _places(steps)
        self.saved_bytes = self._found.saved_bytes
        forward, backward = steps.for_images[: steps.forward], steps.for_images[steps.forward :]
        self._passes = [forward, backward]
        # The number of averages; 0 if one is read after its new value is there.
        moved = len(averages)
        for number, value in zip(averages, self._arrays[len(self._arrays) - moved :]):
            if max(_uses(backward, inputs[number])) > min(_uses(backward, value)):
                moved = 0
        first, end = len(inputs) - outputs, len(self._arrays)
        variables, results = inputs[:first], range(len(inputs), end)
        self._gradients, moving = results[: len(results) - moved], range(end - moved, end)
        read = _read(inputs[first:], backward)
        self._groups = [
            [_Group(_read(variables, forward))],
            [*map(_Group, (_read(variables, backward), read, self._gradients, moving))],
        ]
        self._variables = first
        # Arrays that are copied together are adjacent.
        early = dict.fromkeys(self._groups[0][0].numbers)
        others = [value for value in inputs if value.buffer.number not in early]
        self._offsets: dict[int, int] = {}
        self._nbytes = 0
        for value in (*(inputs[number] for number in early), *others, *steps.outputs):
            self._offsets[id(value.buffer)] = self._nbytes
            self._nbytes = aligned(self._nbytes + value.buffer.nbytes)
        # By buffer: the resident parameter in its place, and the address.
        self._residents: dict[int, tuple[Resident, int]] = {}
        # Where arrays were when residents were searched for, in which generation, and these.
        self._addresses = [_NOWHERE] * end
        self._generation = residents.generation
        self._in_places: list[Resident | None] = [None] * end
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

    def forward(self, given: Given, saved: Saved, seed: int = 0) -> list[float] | None:
        """Compute the outputs, and save what `backward` reads. The inputs are given, then the
        outputs. Random numbers are of a `seed` of 64 bits."""
        saved.number, saved.seed[0] = next(_passes), seed
        given = self._with_seed(given, self._variables + self._outputs, saved)
        with self._active() as lane:
            self._find(0, given.addresses)
            self._bring(lane, self._groups[0][0], given, saved.number)
            seconds = self._compute(lane, 0, saved)
            outputs = zip(self.steps.outputs, given.addresses[self._variables :])
            self._send(lane, list(outputs))
        return seconds

    def backward(self, given: Given, saved: Saved) -> list[float] | None:
        """Compute the wanted gradients, then the new moving averages. The inputs of the forward
        pass are given, then the gradients for the outputs, then the results."""
        given = self._with_seed(given, len(self._arrays), saved)
        variables, heads, gradients, averages = self._groups[1]
        with self._active() as lane:
            self._memory.wait()
            self._find(1, given.addresses)
            self._bring(lane, variables, given, saved.number)
            self._bring(lane, heads, given, next(_passes))
            for _, average in averages.held:
                # Also if the pass is interrupted.
                average.is_ahead = True
            seconds = self._compute(lane, 1, saved)
            loose = (*gradients.loose, *averages.loose)
            self._send(lane, [(self._arrays[n], given.addresses[n]) for n in loose])
            for number, resident in gradients.held:
                resident.gradient_version = given.versions[number]
        residents.averages.update(given.addresses[number] for number in averages.loose)
        return seconds

    def _with_seed(self, given: Given, count: int, saved: Saved) -> Given:
        """Return as many arrays: the seed is the last of the network's inputs."""
        if len(given.addresses) < count:
            addresses, versions = map(list, given)
            addresses.insert(self._variables - 1, saved.seed.ctypes.data)
            versions.insert(self._variables - 1, 0)
            given = Given(addresses, versions)
        return given

    @contextmanager
    def _active(self) -> Iterator[Any]:
        machine, arena = self._machine, self._found.device_bytes
        with machine.lock, machine.active(), self._memory.lane(arena, self._nbytes) as lane:
            yield lane

    def _bring(self, lane: Any, group: _Group, given: Given, of_pass: int) -> None:
        """Copy those arrays to the GPU that it does not have since this pass."""
        for number, resident in group.held:
            if resident.version != given.versions[number]:
                resident.bring(given.versions[number])
        moves: list[_Move] = []
        brought: dict[int, tuple[int, int]] = {}
        for number in group.loose:
            known = self._passes_of.pop(number, None)
            brought[number] = of_pass, given.versions[number]
            if known != brought[number]:
                moves.append(self._move(self._arrays[number], given.addresses[number]))
        if moves and self._memory.is_busy and self._has_landing(moves):
            self._bring_beside(lane, moves)
        else:
            for part in _parts(moves):
                _copy([(lane.host + at, address, nbytes) for at, address, nbytes in part])
                for first, nbytes in _runs(part):
                    address = self._block.address + first
                    lane.bring(address - lane.device, nbytes, lane.host + first)
            lane.brought()
        self._passes_of.update(brought)

    def _move(self, value: Value, address: int) -> _Move:
        return self._offsets[id(value.buffer)], address, ITEM_BYTES[value.dtype] * value.elements

    def _has_landing(self, moves: Sequence[_Move]) -> bool:
        """Return whether there is memory for `_bring_beside`."""
        nbytes = sum(aligned(nbytes) for *_, nbytes in moves)
        if self._landing is None or self._landing.nbytes < nbytes:
            # What is lent may have been another's, which work in progress reads.
            self._memory.wait()
            self._landing = None
            with suppress(NotEnoughMemory):
                self._landing = self._memory.lend(nbytes, "training: the next images")
        return self._landing is not None

    def _bring_beside(self, lane: Any, moves: Sequence[_Move]) -> None:
        """Copy arrays to the GPU during the work in progress, which may still read those before."""
        assert self._landing is not None
        begins = [0, *itertools.accumulate(aligned(nbytes) for *_, nbytes in moves)]
        landing = self._landing.address
        lane.wait_for_copies()
        for begin, (at, address, nbytes) in zip(begins, moves):
            _copy([(lane.host + at, address, nbytes)])
            lane.bring(landing + begin - lane.device, nbytes, lane.host + at)
        lane.brought()
        for begin, (at, _, nbytes) in zip(begins, moves):
            lane.move(self._block.address + at, landing + begin, nbytes)

    def _find(self, of: int, addresses: Sequence[int]) -> None:
        """Find the resident parameters in the places of a pass's arrays."""
        if self._generation != residents.generation:
            self._generation = residents.generation
            self._addresses = [_NOWHERE] * len(self._addresses)
        before = list(self._in_places)
        try:
            for group in self._groups[of]:
                for number in group.numbers:
                    if addresses[number] != self._addresses[number]:
                        self._search(number, addresses[number])
        finally:
            if self._in_places != before:
                for group in itertools.chain(*self._groups):
                    group.divide(self._in_places)

    def _search(self, number: int, address: int) -> None:
        """Find the resident parameter in the place of an array at an address, and note where it or
        its gradient is."""
        is_gradient, value = number in self._gradients, self._arrays[number]
        found = residents.find(address, value.shape, self._machine, is_gradient)
        key = id(value.buffer)
        before = self._residents.get(key)
        if found is None and before is not None and not is_gradient:
            before[0].check(None)
        self._addresses[number], self._in_places[number] = address, found
        self._passes_of.pop(number, None)
        self._residents.pop(key, None)
        if found is not None:
            place = found.gradient if is_gradient else found.weight
            self._residents[key] = found, place.address
        if self._residents.get(key) != before:
            self._forget()

    def _forget(self) -> None:
        """Discard the recordings."""
        self._memory.ended.extend(self._recorded.values())
        self._recorded = {}

    def _send(self, lane: Any, results: Sequence[tuple[Value, int]]) -> None:
        """Copy results, if any, to addresses when all work is done; else leave it in progress."""
        moves = [self._move(*each) for each in results]
        self._memory.is_busy = True
        if not moves:
            return
        for first, nbytes in _runs(moves):
            lane.copy_out(self._block.address + first - lane.device, nbytes, lane.host + first)
        self._memory.wait()
        _copy([(address, lane.host + at, nbytes) for at, address, nbytes in moves])

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


def _parts(moves: Sequence[_Move]) -> Iterator[list[_Move]]:
    """Yield the moves in parts of some size."""
    part: list[_Move] = []
    size = 0
    for move in moves:
        part.append(move)
        size += move[-1]
        if size >= COPIED_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _runs(moves: Sequence[_Move]) -> Iterator[tuple[int, int]]:
    """Yield the begin and the size of each range that adjacent moves fill."""
    begin = end = -1
    for place, _, nbytes in moves:
        if place != aligned(end) or begin < 0:
            if begin >= 0:
                yield begin, end - begin
            begin = place
        end = place + nbytes
    if begin >= 0:
        yield begin, end - begin
