"""Pool of page-locked memory for arrays of staged calls, which the GPU then accesses directly.

Ordinary arrays are copied twice: over the bus, and by the host's cores between the array and
page-locked memory, which takes longer than the buses of two GPUs. Existing memory can be
page-locked, but only safely by its owner: CUDA would go on using the pages of a freed array. So
this pool allocates the memory, and its users return it.

Allocating a block takes about twice as long as allocating ordinary memory. So the first result of a
size gets none.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

from ....errors import GpuFailed, NotEnoughMemory
from ....host import footprint
from ... import HostMemory
from ...cpu import native
from . import driver
from .device import Gpu, immortal

# The time of smaller copies on the host is negligible.
SMALLEST = 8 << 20
# A new block takes at most 1 / _PART of the available memory.
_PART = 4
# A free block is released unless it is among this number of most recently used ones.
_REMEMBERED = 16
# Number of recently requested sizes that are remembered.
_KNOWN_SIZES = 64
_HUGE_PAGE = 2 << 20
# Flag of cuMemHostRegister: valid for every GPU.
_PORTABLE = 1


class _Block:
    """Memory of `nbytes`, a multiple of the huge page size, and the number of its last use."""

    def __init__(self, nbytes: int, gpu: Gpu, before_fork: Callable[[], None]) -> None:
        self._made = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._made))
        # Huge pages are aligned to their size.
        address = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        self.memory = HostMemory(address, nbytes, ctypes.c_int(0), before_fork)
        self.taken = 0
        self.is_locked = False
        self._gpu = gpu

    @property
    def is_free(self) -> bool:
        return not self.memory.busy.value

    def covers(self, address: int, nbytes: int) -> bool:
        start = self.memory.address
        return start <= address and address + nbytes <= start + self.memory.nbytes

    def lock(self, threads: int) -> None:
        """Touch the pages with this number of threads, then lock them. Raises `GpuFailed`."""
        address, nbytes, *_ = self.memory
        native.ask_for_huge_pages(address, nbytes)
        native.populate(address, nbytes, threads)
        # After a fork, copy-on-write would give the parent other pages than CUDA uses.
        self._made.madvise(mmap.MADV_DONTFORK)
        size = ctypes.c_size_t(nbytes)
        with self._gpu.active():
            driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, _PORTABLE)
        self.is_locked = True

    def unlock(self) -> None:
        """Unlock the pages."""
        if self.is_locked:
            # After a failed kernel CUDA refuses every call, and writes nothing any more.
            with contextlib.suppress(GpuFailed), self._gpu.active():
                driver.call("cuMemHostUnregister", ctypes.c_void_p(self.memory.address))
            self._made.madvise(mmap.MADV_DOFORK)
        self.is_locked = False

    def close(self) -> None:
        """Return the memory to the system."""
        self.unlock()
        self._made.close()


class Pool:
    """Reusable blocks of page-locked memory. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._blocks: list[_Block] = []
        self._sizes: dict[int, None] = {}
        self._calls = 0
        self._is_refused = False

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no blocks."""
        return not self._blocks

    def lend(self, nbytes: int, gpu: Gpu, threads: int) -> HostMemory | None:
        """Take at least `nbytes` for a result; `None` if ordinary memory is better: for less than
        `SMALLEST`, for a size that is requested for the first time, and where `take` would
        raise."""
        if nbytes < SMALLEST:
            return None
        with self._mutex:
            if self._is_refused or not (self._free(nbytes) or self._is_known(nbytes)):
                return None
            try:
                return self._take(nbytes, gpu, threads)
            except NotEnoughMemory:
                return None
            except GpuFailed:
                self._is_refused = True
                return None

    def take(self, nbytes: int, gpu: Gpu, threads: int) -> HostMemory:
        """Take at least `nbytes`, locked through `gpu` for all GPUs; this number of threads touches
        the pages. Raises `NotEnoughMemory`, and `GpuFailed` if CUDA cannot lock memory."""
        with self._mutex:
            return self._take(nbytes, gpu, threads)

    def covers(self, address: int, nbytes: int) -> bool:
        """Return whether this is page-locked memory of the pool."""
        with self._mutex:
            return any(b.is_locked and b.covers(address, nbytes) for b in self._blocks)

    def unlock_all(self) -> None:
        """Unlock all blocks, while no call uses them; free blocks are returned to the system."""
        with self._mutex:
            for block in self._blocks:
                block.unlock()
            self._clear()

    def _take(self, nbytes: int, gpu: Gpu, threads: int) -> HostMemory:
        self._calls += 1
        block = self._free(nbytes) or self._make(nbytes, gpu, threads)
        block.memory.busy.value = 1
        block.taken = self._calls
        return block.memory

    def _free(self, nbytes: int) -> _Block | None:
        size = _rounded(nbytes)
        fitting = (b for b in self._blocks if b.is_locked and b.memory.nbytes == size and b.is_free)
        return next(fitting, None)

    def _is_known(self, nbytes: int) -> bool:
        """Return whether the size was requested before, and remember it."""
        known = nbytes in self._sizes
        self._sizes.pop(nbytes, None)
        self._sizes[nbytes] = None
        if len(self._sizes) > _KNOWN_SIZES:
            del self._sizes[next(iter(self._sizes))]
        return known

    def _make(self, nbytes: int, gpu: Gpu, threads: int) -> _Block:
        self._clear()
        available = footprint.available_bytes()
        if nbytes > available // _PART:
            raise NotEnoughMemory(
                f"{nbytes / (1 << 30):.1f} GiB of page-locked memory would be more than a quarter "
                f"of the {available / (1 << 30):.1f} GiB that are free; use ordinary arrays, or "
                "close other programs"
            )
        try:
            # Python's exit would free memory of arrays that MXNet still holds.
            block = immortal(_Block(_rounded(nbytes), gpu, self.unlock_all))
        except OSError as error:
            raise NotEnoughMemory(
                f"{nbytes / (1 << 30):.1f} GiB of page-locked memory cannot be had ({error}); use "
                "ordinary arrays, or raise the process's limit (ulimit -v)"
            ) from error
        try:
            block.lock(threads)
        except GpuFailed:
            block.close()
            raise
        self._blocks.append(block)
        return block

    def _clear(self) -> None:
        """Release free blocks that are unlocked or have not been used for long."""
        oldest = self._calls - _REMEMBERED
        gone = [b for b in self._blocks if b.is_free and (not b.is_locked or b.taken < oldest)]
        self._blocks = [block for block in self._blocks if block not in gone]
        for block in gone:
            block.close()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE


pool = Pool()
