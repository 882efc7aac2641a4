"""A GPU's memory, and its lane, that are lent to networks that train."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from ..errors import NotEnoughMemory
from .machines.machine import GpuMachine, Recorded


class Block:
    """Bytes on a GPU, which return to the memory that lent them when this object ends."""

    def __init__(self, memory: GpuMemory, address: int, nbytes: int) -> None:
        self._memory, self.address, self.nbytes = memory, address, nbytes

    def __del__(self) -> None:
        self._memory.returned.append((self.address, self.nbytes))


class GpuMemory:
    """Blocks of a GPU's memory that are lent, and kept for the next loan when they come back; and a
    lane, on which work may be in progress between calls. Only `returned` and `ended` may be used
    without the machine's lock, and the machine active."""

    def __init__(self, machine: GpuMachine) -> None:
        self.machine = machine
        # Whether a user of the lane left work in progress on it, and whether that reads the last
        # `_shared_bytes` of the lane's host memory.
        self.is_busy = self.is_shared_busy = False
        self._shared_bytes = 0
        self._lane: Any = None
        self._lanes = contextlib.ExitStack()
        # Filled by garbage collection, possibly in the middle of other work.
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

    @contextlib.contextmanager
    def lane(self, device_bytes: int, host_bytes: int) -> Iterator[Any]:
        """Provide the lane, with this much memory. Its work follows that in progress, of which the
        host memory's first part may still be read as `Lane.bring` says. Whoever leaves work in
        progress sets `is_busy`. Raises `NotEnoughMemory` and `GpuFailed`."""
        host_bytes += self._shared_bytes
        lane = self._lane
        if lane and (lane.device_bytes < device_bytes or lane.host_bytes < host_bytes):
            self.settle()
        if not self._lane:
            limit = self.machine.budget(0)
            lanes = self.machine.lanes(1, device_bytes, host_bytes, limit)
            (self._lane,) = self._lanes.enter_context(lanes)
        try:
            yield self._lane
        except BaseException:
            self.is_busy = True
            self.settle()
            raise
        if not self.is_busy:
            self.settle()

    def wait(self) -> None:
        """Wait for the work in progress. Raises `GpuFailed`."""
        if self.is_busy:
            self.is_busy = self.is_shared_busy = False
            self._lane.wait()

    def settle(self) -> None:
        """Wait for the work in progress, and let others have the lane. Raises `GpuFailed`."""
        try:
            self.wait()
        finally:
            self._lane = None
            self._lanes.close()

    @contextlib.contextmanager
    def shared(self, nbytes: int) -> Iterator[tuple[Any, int]]:
        """Provide the lane, and a place of this size in its host memory that only work of this
        method's callers reads, and none in progress does."""
        if self.is_shared_busy or nbytes > self._shared_bytes:
            self.settle()
            self._shared_bytes = max(self._shared_bytes, nbytes)
        with self.lane(0, 0) as lane:
            yield lane, lane.host_bytes - self._shared_bytes

    def has_room(self, nbytes: int) -> bool:
        """Return whether this much could be lent now. Takes the machine's lock."""
        with self.machine.lock, self.machine.active():
            self._collect()
            idle = sum(size * len(addresses) for size, addresses in self._idle.items())
            return self._nbytes - idle + nbytes <= self.machine.budget(self._nbytes)

    def trim(self) -> None:
        """Free what is not lent."""
        self._collect()
        for nbytes, addresses in self._idle.items():
            for address in addresses:
                self.machine.free(address)
                self._nbytes -= nbytes
        self._idle.clear()

    def _collect(self) -> None:
        if self.ended:
            self.wait()
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


_memories: dict[GpuMachine, GpuMemory] = {}
_lock = threading.Lock()


def memory_of(machine: GpuMachine) -> GpuMemory:
    """Return the memory that all networks that train on a machine share."""
    with _lock:
        return _memories.setdefault(machine, GpuMemory(machine))


@atexit.register
def _return_lanes() -> None:
    """Before Python discards the modules that lanes need."""
    for memory in _memories.values():
        memory._lanes.close()
