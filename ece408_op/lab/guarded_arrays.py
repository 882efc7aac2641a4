"""Host arrays shared by two processes, each between guard pages.

A layout gives the arrays' offsets in a memory file. The process that runs a kernel maps each so
that it ends at a page boundary: an access beyond it ends the process. With `open` margins the pages
around it are accessible, and show afterwards what was written.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import NotEnoughMemory
from ..problem import ConvProblem

PAGE = mmap.PAGESIZE
# MXNet's alignment of arrays.
ALIGNMENT = 64
CANARY = 0xFF  # as floats, NaN
_NONE, _READ, _WRITE = 0, 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _POPULATE = 1, 2, 0x10, 0x20, 0x8000
# Seals that fix the size, and themselves; and a mode that punches a hole without changing the size.
_F_ADD_SEALS, _SEALS, _PUNCH_HOLE = 1033, 1 | 2 | 4, 1 | 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_long),
]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Place:
    """An array of `nbytes` in the file: its pages begin at `offset`, between margins of one page
    each."""

    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Bytes of its pages and of both margins."""
        return -(-self.nbytes // PAGE) * PAGE + 2 * PAGE

    @property
    def begin(self) -> int:
        """Offset of the array in its pages: it ends with them, except for alignment."""
        return PAGE + (self.size - 2 * PAGE - self.nbytes) // ALIGNMENT * ALIGNMENT


def layout(sizes: list[int]) -> list[Place]:
    """Return places for consecutive arrays of these sizes."""
    places, offset = [], 0
    for nbytes in sizes:
        places.append(Place(offset, nbytes))
        offset += places[-1].size
    return places


class HostArrays:
    """x, w and y of one problem after the other, in the process that writes inputs and reads
    outputs. `number` is the descriptor of their memory file, whose size is sealed. Only pages that
    are written take memory."""

    def __init__(self) -> None:
        self.number = os.memfd_create("ece408-lab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._size = os.sysconf("SC_PHYS_PAGES") * PAGE
        os.ftruncate(self.number, self._size)
        fcntl.fcntl(self.number, _F_ADD_SEALS, _SEALS)
        self._content = np.empty(0, np.uint8)
        self._places: list[Place] = []
        self._shapes: list[tuple[int, ...]] = []
        self._inputs: tuple[np.ndarray, ...] = ()

    def close(self) -> None:
        os.close(self.number)

    def release(self) -> None:
        """Free the memory; the arrays must not be in use."""
        self._content = np.empty(0, np.uint8)
        _libc.fallocate(self.number, _PUNCH_HOLE, 0, self._size)

    def excess(self) -> int:
        """Bytes of the file in excess of the arrays."""
        return (os.fstat(self.number).st_blocks << 9) - self._content.size

    def place(self, problem: ConvProblem, margins: str = "closed") -> dict[str, Any]:
        """Allocate a problem's arrays, with y filled with NaN; return the other process's part of a
        request."""
        self._shapes = [problem.x_shape, problem.w_shape, problem.y_shape]
        self._places = layout([4 * math.prod(shape) for shape in self._shapes])
        # The last one first, to allocate the file's whole size.
        for place in reversed(self._places):
            self._whole(place)[:] = CANARY
        places = [(place.offset, place.nbytes) for place in self._places]
        self._inputs = ()
        return {"places": places, "margins": margins}

    def fill(self, x: np.ndarray, w: np.ndarray) -> None:
        """Write the inputs."""
        self._inputs = (x, w)
        for index, array in enumerate(self._inputs):
            self.array(index)[...] = array

    def array(self, role: int) -> np.ndarray:
        """Return the float32 array x, w or y, by number; it shares memory with the other
        process."""
        place = self._places[role]
        inner = self._whole(place)[place.begin : place.begin + place.nbytes]
        return inner.view(np.float32).reshape(self._shapes[role])

    def output(self) -> np.ndarray:
        """Return y, which the next problem overwrites."""
        return self.array(2)

    def damage(self) -> list[str]:
        """Describe the changes by the call since `fill`, except to its output."""
        found = []
        for role, place in zip("xwy", self._places):
            before, behind = self._margins(place)
            found += damage(role, np.flatnonzero(before != CANARY) - len(before), behind != CANARY)
        for index, array in enumerate(self._inputs):
            if self.array(index).tobytes() != array.tobytes():
                found.append(f"writes into its input {'xw'[index]}")
        return found

    def _margins(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        whole = self._whole(place)
        return whole[: place.begin], whole[place.begin + place.nbytes :]

    def _whole(self, place: Place) -> np.ndarray:
        end = place.offset + place.size
        if self._content.size < end:
            if end > self._size:
                raise NotEnoughMemory(f"the machine has no memory for arrays of {end >> 20} MiB")
            self._content = np.frombuffer(mmap.mmap(self.number, end), np.uint8)
        return self._content[place.offset : end]


def damage(role: str, before: np.ndarray, behind: np.ndarray) -> list[str]:
    """Describe changed bytes around an array: at the (negative) distances `before` from its start,
    and where the mask `behind`, from its end, is set."""
    if before.size:
        return [f"writes {-before[0]} bytes before {role}"]
    changed = np.flatnonzero(behind)
    return [f"writes {changed[-1] + 1} bytes behind {role}"] if changed.size else []


class Mapped:
    """An array in the process that runs a kernel; `address` is its start."""

    def __init__(self, number: int, place: Place, read_only: bool, margins: str) -> None:
        self._size, self._nbytes = place.size, place.nbytes
        self._base = _map(None, place.size, _NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        protection = _READ if read_only and margins == "closed" else _READ | _WRITE
        cut = 0 if margins == "open" else PAGE
        part = (self._base + cut, place.size - 2 * cut)
        # All pages are populated, so that no call is the first to touch one.
        flags = _SHARED | _FIXED | _POPULATE
        _map(*part, protection, flags, number, place.offset + cut)
        self.address = self._base + place.begin

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """The array's bytes."""
        return (ctypes.c_char * self._nbytes).from_address(self.address)

    def close(self) -> None:
        _libc.munmap(self._base, self._size)


def _map(
    address: int | None, size: int, protection: int, flags: int, number: int, offset: int
) -> int:
    found = _libc.mmap(address, size, protection, flags, number, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)
