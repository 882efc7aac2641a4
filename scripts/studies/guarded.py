"""Arrays next to forbidden memory: a stray access ends the process."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_NONE, _READ = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def place(values: np.ndarray, side: str, read_only: bool = False) -> np.ndarray:
    """Return a copy of `values` that ends (side "end") or begins ("start") at a forbidden page.

    On the other side it has a canary of 0xff bytes, NaN as floats; `canary_intact` checks it.
    """
    pages = -(-max(values.nbytes, 1) // mmap.PAGESIZE) + 1
    size = pages * mmap.PAGESIZE
    # Faster to fill than a shared one.
    region = mmap.mmap(-1, size + 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(region, np.uint8)
    everything[:] = 0xFF
    start = mmap.PAGESIZE + (size - values.nbytes if side == "end" else 0)
    array = everything[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    base = everything.ctypes.data
    _protect(base, mmap.PAGESIZE, _NONE)
    _protect(base + mmap.PAGESIZE + size, mmap.PAGESIZE, _NONE)
    if read_only:
        _protect(base + mmap.PAGESIZE, size, _READ)
    return array


def canary_intact(array: np.ndarray, side: str) -> bool:
    """Tell whether the bytes between the array and the far forbidden page are unchanged since
    `place`."""
    slack = mmap.PAGESIZE - array.nbytes % mmap.PAGESIZE
    start = array.ctypes.data - slack if side == "end" else array.ctypes.data + array.nbytes
    return bytes((ctypes.c_char * slack).from_address(start)) == b"\xff" * slack
