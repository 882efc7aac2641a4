"""Page-locked memory for arrays of staged calls, which the bus then reads and writes in place.

Ordinary arrays are copied twice: by the bus, and between there and page-locked memory by the host's
cores, which take longer than the buses of two GPUs. Memory can be page-locked where it is, but only
by its owner: CUDA would go on using the pages of an array that has been freed. So this memory is
made here, and whoever takes a block of it says when it is free again.

Making a block takes about twice as long as making ordinary memory. So none is lent for a result of
a size that is asked for the first time.
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

# Copies of less take the host's cores hardly any time.
SMALLEST = 8 << 20
# A new block has at most this part of the memory that is available.
_PART = 4
# A free block goes if it is not one of the last so many that were taken.
_REMEMBERED = 16
# Sizes that were asked for, the latest.
_KNOWN_SIZES = 64
_HUGE_PAGE = 2 << 20
# Flag of cuMemHostRegister: for every GPU.
_PORTABLE = 1


class _Block:
    """Memory of `nbytes`, a multiple of a huge page's, and the number of the call that took it
    last."""

    def __init__(self, nbytes: int, gpu: Gpu, before_fork: Callable[[], None]) -> None:
        self._made = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._made))
        # Huge pages begin at multiples of their size.
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
        """Make the pages, by so many threads, and lock them. Raises `GpuFailed`."""
        address, nbytes, *_ = self.memory
        native.ask_for_huge_pages(address, nbytes)
        native.populate(address, nbytes, threads)
        # A fork would have the parent write to other pages than CUDA does.
        self._made.madvise(mmap.MADV_DONTFORK)
        size = ctypes.c_size_t(nbytes)
        with self._gpu.active():
            driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, _PORTABLE)
        self.is_locked = True

    def unlock(self) -> None:
        """Make this ordinary memory."""
        if self.is_locked:
            # After a failed kernel CUDA refuses all that comes, and writes nothing any more.
            with contextlib.suppress(GpuFailed), self._gpu.active():
                driver.call("cuMemHostUnregister", ctypes.c_void_p(self.memory.address))
            self._made.madvise(mmap.MADV_DOFORK)
        self.is_locked = False

    def close(self) -> None:
        """Give the memory back to the system."""
        self.unlock()
        self._made.close()


class Pool:
    """Blocks of page-locked memory, used again. May be used by several threads at once."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._blocks: list[_Block] = []
        self._sizes: dict[int, None] = {}
        self._calls = 0
        self._is_refused = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no blocks at all."""
        return not self._blocks

    def lend(self, nbytes: int, gpu: Gpu, threads: int) -> HostMemory | None:
        """At least so many bytes for a result, as `take` has them; `None` where ordinary memory is
        better: for less than `SMALLEST`, for a size that is asked for the first time, and where
        `take` would raise."""
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
        """At least so many bytes, locked by way of `gpu` for all, the pages made by so many
        threads. Raises `NotEnoughMemory`, and `GpuFailed` where CUDA locks none."""
        with self._mutex:
            return self._take(nbytes, gpu, threads)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether this is page-locked memory of the pool."""
        with self._mutex:
            return any(b.is_locked and b.covers(address, nbytes) for b in self._blocks)

    def unlock_all(self) -> None:
        """Make all blocks ordinary memory, while no call uses them; those that are free go back to
        the system."""
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
        """Whether the size was asked for before; from now on it was."""
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
            # Python's end would take the memory from arrays that MXNet still has.
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
        """Give back free blocks that are not locked any more, or that nobody has taken for long."""
        oldest = self._calls - _REMEMBERED
        gone = [b for b in self._blocks if b.is_free and (not b.is_locked or b.taken < oldest)]
        self._blocks = [block for block in self._blocks if block not in gone]
        for block in gone:
            block.close()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE


pool = Pool()
