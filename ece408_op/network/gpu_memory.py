"""A GPU's memory that is lent to networks that train."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from ..errors import NotEnoughMemory
from .machines.machine import GpuMachine, Recorded


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


_memories: dict[GpuMachine, GpuMemory] = {}
_lock = threading.Lock()


def memory_of(machine: GpuMachine) -> GpuMemory:
    """Return the memory that all networks that train on a machine share."""
    with _lock:
        return _memories.setdefault(machine, GpuMemory(machine))
