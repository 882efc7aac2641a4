"""Arrays in memory that two processes share, each between pages that are not to be touched.

A layout says where arrays lie in a file in memory. The process that runs a kernel maps each by
itself, so that it ends where a page does: what reads or writes behind it ends the process. With
`open` margins the pages around it can be read and written, and show afterwards what was.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE
# As MXNet aligns its arrays.
ALIGNMENT = 64
CANARY = 0xFF  # as floats, NaN
_NONE, _READ, _WRITE = 0, 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _POPULATE = 1, 2, 0x10, 0x20, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Place:
    """An array of `nbytes` in the file: its pages, between a page of margin on either side, begin
    at `offset`."""

    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Bytes of its pages and of both margins."""
        return -(-self.nbytes // PAGE) * PAGE + 2 * PAGE

    @property
    def begin(self) -> int:
        """Where in its pages the array begins, so that it ends with them, but for alignment."""
        return PAGE + (self.size - 2 * PAGE - self.nbytes) // ALIGNMENT * ALIGNMENT


def layout(sizes: list[int]) -> list[Place]:
    """Places of arrays of so many bytes, one after the other."""
    places, offset = [], 0
    for nbytes in sizes:
        places.append(Place(offset, nbytes))
        offset += places[-1].size
    return places


class File:
    """The file, as the process that writes inputs and reads outputs sees it: `number` is its
    descriptor."""

    def __init__(self) -> None:
        self.number = os.memfd_create("ece408-lab", os.MFD_CLOEXEC)
        self._content = np.empty(0, np.uint8)

    def close(self) -> None:
        os.close(self.number)

    def array(self, place: Place, shape: tuple[int, ...]) -> np.ndarray:
        """The float32 array in a place, itself: what the other process writes shows."""
        whole = self._whole(place)
        return whole[place.begin : place.begin + place.nbytes].view(np.float32).reshape(shape)

    def guard(self, place: Place) -> None:
        """Fill the margins with canaries."""
        for part in self._margins(place):
            part[:] = CANARY

    def strays(self, place: Place) -> list[int]:
        """Which bytes of the margins have changed, counted from the array's first."""
        before, behind = self._margins(place)
        found = [int(i) - place.begin for i in np.flatnonzero(before != CANARY)]
        return found + [place.nbytes + int(i) for i in np.flatnonzero(behind != CANARY)]

    def _margins(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        whole = self._whole(place)
        return whole[: place.begin], whole[place.begin + place.nbytes :]

    def _whole(self, place: Place) -> np.ndarray:
        end = place.offset + place.size
        if self._content.size < end:
            os.ftruncate(self.number, end)
            self._content = np.frombuffer(mmap.mmap(self.number, end), np.uint8)
        return self._content[place.offset : end]


class Mapped:
    """An array in the process that runs a kernel; `address` is where it begins."""

    def __init__(self, number: int, place: Place, read_only: bool, margins: str) -> None:
        self._size = place.size
        self._base = _map(None, place.size, _NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        protection = _READ if read_only and margins == "closed" else _READ | _WRITE
        cut = 0 if margins == "open" else PAGE
        part = (self._base + cut, place.size - 2 * cut)
        # With all pages there, so that no call is the first to touch one.
        flags = _SHARED | _FIXED | _POPULATE
        _map(*part, protection, flags, number, place.offset + cut)
        self.address = self._base + place.begin

    def close(self) -> None:
        _libc.munmap(self._base, self._size)


def _map(
    address: int | None, size: int, protection: int, flags: int, number: int, offset: int
) -> int:
    found = _libc.mmap(address, size, protection, flags, number, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)
