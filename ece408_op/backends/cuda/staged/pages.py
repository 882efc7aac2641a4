"""Large pages for large results: a fresh array's pages come into being as they are written."""

from __future__ import annotations

import ctypes
import mmap

# From here on the system call is worth its time.
_LARGE_BYTES = 8 << 20


def advise_huge(address: int, nbytes: int) -> None:
    """Ask the kernel for huge pages where none are yet; what is there stays as it is.

    By pages of 4 KiB, making a fresh array's memory takes longer than copying results into it. A
    system that has no huge pages says no, which is as well.
    """
    if nbytes < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
