"""Both passes of a network with gradients on one GPU."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .. import op_log, settings
from ..backends.cpu.native import copy
from ..errors import NotEnoughMemory
from .host_arrays import Array
from .machines.machine import GpuMachine, Recorded, Run
from .memory_planner import aligned, places
from .values import ARENA, SAVED, Step, Steps, Value

# Arrays are copied to page-locked memory, and on to the GPU, in blocks of this size.
_COPIED_BYTES = 8 << 20
_passes = itertools.count(1)


class Block:
    """Bytes on a GPU, which return to the memory that lent them when this object ends."""

    def __init__(self, memory: GpuMemory, address: int, nbytes: int) -> None:
        self._memory, self.address, self.nbytes = memory, address, nbytes

    def __del__(self) -> None:
        self._memory.returned.append((self.address, self.nbytes))


class GpuMemory:
    """Blocks of a GPU's memory that are lent, and kept for the next loan when they come back. Only
    `returned` and `ended` may be used without the machine's lock, and the machine active."""

    def __init__(self, machine: GpuMachine) -> None:
        self.machine = machine
        # What garbage collection leaves, possibly in the middle of other work.
        self.returned: deque[tuple[int, int]] = deque()
        self.ended: deque[Recorded] = deque()
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        self._nbytes = 0

    def lend(self, nbytes: int, use: str) -> Block:
        """Return a block of this size. Raises `NotEnoughMemory`, which says the `use`."""
        self._collect()
        nbytes = max(1, nbytes)
        if not self._idle[nbytes]:
            self._make_room(nbytes, use)
            self._idle[nbytes].append(self.machine.allocate(nbytes))
            self._nbytes += nbytes
        return Block(self, self._idle[nbytes].pop(), nbytes)

    def trim(self) -> None:
        """Free what is not lent."""
        self._collect()
        for nbytes, addresses in self._idle.items():
            for address in addresses:
                self.machine.free(address)
                self._nbytes -= nbytes
        self._idle.clear()

    def _collect(self) -> None:
        while self.ended:
            self.ended.popleft().close()
        while self.returned:
            address, nbytes = self.returned.popleft()
            self._idle[nbytes].append(address)

    def _make_room(self, nbytes: int, use: str) -> None:
        if self._nbytes + nbytes <= self.machine.budget(self._nbytes):
            return
        self.trim()
        budget = self.machine.budget(self._nbytes)
        if self._nbytes + nbytes > budget:
            raise NotEnoughMemory(
                f"{use} takes {nbytes} bytes on the GPU beside {self._nbytes} of other passes, and "
                f"{budget} may be used: {self._nbytes + nbytes - budget} too many; use a smaller "
                "batch, or allow more (ECE408_GPU_MEMORY)"
            )


_memories: dict[tuple[object, ...], GpuMemory] = {}
_lock = threading.Lock()


def memory_of(machine: GpuMachine) -> GpuMemory:
    """Return the memory that all networks that train on a machine share."""
    with _lock:
        return _memories.setdefault(machine.key, GpuMemory(machine))


class Saved:
    """What a forward pass saves on the GPU for its backward passes, which only read it."""

    def __init__(self, block: Block) -> None:
        self.block = block
        # The number of the pass.
        self.number = 0


class GpuTrainingProgram:
    """Both passes for inputs of some shapes. `variables` are the network's inputs, and `inputs`
    also has the gradients for its `outputs`. All of them have one block of memory on the GPU, and
    stay there until other arrays come. A version of 0 says that an array's contents are unknown
    in each forward pass.

    Passes raise `NotEnoughMemory`, `GpuFailed` and compiler errors, and return the seconds of each
    step if the log of op times is collecting them.
    """

    def __init__(
        self, memory: GpuMemory, steps: Steps, inputs: Sequence[Value], outputs: int
    ) -> None:
        self.steps, self._memory, self._machine = steps, memory, memory.machine
        self._outputs = outputs
        variables = len(inputs) - outputs
        self._found = places(replace(steps, outputs=[]), ())
        self.saved_bytes = self._found.saved_bytes
        self._values = [*inputs, *steps.outputs]
        self._offsets: dict[int, int] = {}
        self._nbytes = 0
        for value in self._values:
            self._offsets[id(value.buffer)] = self._nbytes
            self._nbytes = aligned(self._nbytes + value.buffer.nbytes)
        forward, backward = steps.for_images[: steps.forward], steps.for_images[steps.forward :]
        self._passes = [forward, backward]
        self._variables = [_read(inputs[:variables], forward), _read(inputs[:variables], backward)]
        self._given = _read(inputs[variables:], backward)
        # What each variable's copy was made of.
        self._sources: dict[int, object] = {}
        self._recorded: dict[tuple[int, ...], Recorded] = {}
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

    @property
    def output_shapes(self) -> list[tuple[int, ...]]:
        return [value.shape for value in self.steps.outputs[: self._outputs]]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Those of the gradients and the new moving averages."""
        return [value.shape for value in self.steps.outputs[self._outputs :]]

    def room(self) -> Saved:
        """Return memory for what a forward pass saves."""
        with self._machine.lock, self._machine.active():
            return Saved(self._memory.lend(self.saved_bytes, "training: what is saved of a batch"))

    def forward(
        self, inputs: Sequence[Array], outputs: Sequence[Array], saved: Saved
    ) -> list[float] | None:
        """Compute the outputs, and save what `backward` reads."""
        saved.number = next(_passes)
        with self._active() as lane:
            self._bring(lane, self._variables[0], inputs, saved.number)
            seconds = self._compute(lane, 0, saved)
            self._send(lane, self.steps.outputs[: self._outputs], outputs)
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
        given = [*inputs, *head_gradients]
        with self._active() as lane:
            self._bring(lane, self._variables[1], given, saved.number)
            self._bring(lane, self._given, given, next(_passes))
            seconds = self._compute(lane, 1, saved)
            self._send(lane, self.steps.outputs[self._outputs :], results)
        return seconds

    @contextmanager
    def _active(self) -> Iterator[Any]:
        machine, arena = self._machine, self._found.device_bytes
        with machine.lock, machine.active():
            limit = machine.budget(0)
            with machine.lanes(1, arena, self._nbytes, limit) as (lane,):
                yield lane

    def _bring(
        self, lane: Any, numbers: Iterable[int], arrays: Sequence[Array], of_pass: int
    ) -> None:
        """Copy those arrays to the GPU that have changed."""
        stale: list[tuple[int, Array]] = []
        for number in numbers:
            array = arrays[number]
            source = (array.address, array.version) if array.version else of_pass
            if self._sources.get(number) != source:
                self._sources.pop(number, None)
                stale.append((number, array))
        for part in _parts([(self._place(number), array) for number, array in stale]):
            copy([(lane.host + at, array.address, array.nbytes) for at, array in part], _threads())
            for first, nbytes in _runs(part):
                address = self._block.address + first
                lane.bring(address - lane.device, nbytes, lane.host + first)
        lane.brought()
        for number, array in stale:
            known = array.version != 0
            self._sources[number] = (array.address, array.version) if known else of_pass

    def _send(self, lane: Any, values: Sequence[Value], arrays: Sequence[Array]) -> None:
        """Copy results to arrays; wait for all work."""
        moves = [(self._offsets[id(v.buffer)], array) for v, array in zip(values, arrays)]
        for first, nbytes in _runs(moves):
            lane.copy_out(self._block.address + first - lane.device, nbytes, lane.host + first)
        lane.wait()
        copy([(array.address, lane.host + at, array.nbytes) for at, array in moves], _threads())

    def _compute(self, lane: Any, of: int, saved: Saved) -> list[float] | None:
        steps = self._passes[of]
        if op_log.collecting():
            return self._machine.timed(lane, self._resolved(steps, lane, saved))
        key = of, lane.device, lane.host, saved.block.address
        if key not in self._recorded:
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
        return self._block.address + self._offsets[id(buffer)] + value.offset

    def _place(self, number: int) -> int:
        return self._offsets[id(self._values[number].buffer)]


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
        if nbytes >= _COPIED_BYTES:
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


def _threads() -> int:
    return settings.threads()
