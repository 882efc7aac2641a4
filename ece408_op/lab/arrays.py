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
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 1, 2, 0x10, 0x20

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

    def close(self) -> None:
        os.close(self.number)

    def fill(self, place: Place, values: np.ndarray) -> None:
        """Write an array, with canaries around it."""
        whole = np.full(place.size, CANARY, np.uint8)
        whole[place.begin : place.begin + place.nbytes] = values.reshape(-1).view(np.uint8)
        os.ftruncate(self.number, max(os.fstat(self.number).st_size, place.offset + place.size))
        self._write(place.offset, whole)

    def read(self, place: Place, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of the float32 array in a place."""
        whole = self._whole(place)
        found = whole[place.begin : place.begin + place.nbytes].view(np.float32)
        return found.reshape(shape).copy()

    def strays(self, place: Place) -> list[int]:
        """Which bytes of the margins have changed, counted from the array's first."""
        whole = self._whole(place)
        whole[place.begin : place.begin + place.nbytes] = CANARY
        return [int(i) - place.begin for i in np.flatnonzero(whole != CANARY)]

    def _write(self, offset: int, content: np.ndarray) -> None:
        with mmap.mmap(self.number, 0) as view:
            view[offset : offset + content.size] = content.tobytes()

    def _whole(self, place: Place) -> np.ndarray:
        with mmap.mmap(self.number, 0, prot=mmap.PROT_READ) as view:
            content = view[place.offset : place.offset + place.size]
        return np.frombuffer(content, np.uint8).copy()


class Mapped:
    """An array in the process that runs a kernel; `address` is where it begins."""

    def __init__(self, number: int, place: Place, read_only: bool, margins: str) -> None:
        self._size = place.size
        self._base = _map(None, place.size, _NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        protection = _READ if read_only and margins == "closed" else _READ | _WRITE
        cut = 0 if margins == "open" else PAGE
        part = (self._base + cut, place.size - 2 * cut)
        _map(*part, protection, _SHARED | _FIXED, number, place.offset + cut)
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
