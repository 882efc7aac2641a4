"""Reader of MXNet's parameter files, which `mx.nd.save` writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import CheckpointMismatch, NotEnoughMemory

_LIST = 0x112
# First number of an array, by version; before these came the number of its dimensions.
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_SPARSE = {1: "row_sparse", 2: "csr"}
_DTYPES = {
    **{0: "float32", 1: "float64", 2: "float16", 3: "uint8", 4: "int32", 5: "int8", 6: "int64"},
    **{7: "bool", 8: "int16", 9: "uint16", 10: "uint32", 11: "uint64"},
}
_BFLOAT16 = 12
# NumPy 1 has no arrays of more dimensions.
_MOST_DIMENSIONS = 32


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a parameter file by name, with the prefixes `arg:` and `aux:`.

    They share the memory of the file's bytes and are read-only, except those that NumPy cannot use
    where they are. bfloat16 becomes float32. An array that MXNet had not allocated has no elements.

    Raises `CheckpointMismatch` for a damaged file, for sparse arrays, and for a list without names,
    and `NotEnoughMemory`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error.strerror}") from error
    except MemoryError:
        reason = "is larger than the free memory; end other programs, or take another machine"
        raise NotEnoughMemory(f"{path} {reason}") from None
    return parse(content, path)


def parse(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """As `read`, from the file's bytes; errors name the path."""
    return _File(path, content).arrays()


def split(
    arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return arguments and auxiliary states by name without prefix; names without one are those of
    arguments."""
    auxiliary = {n[len("aux:") :]: array for n, array in arrays.items() if n.startswith("aux:")}
    others = ((name, array) for name, array in arrays.items() if not name.startswith("aux:"))
    return {n[len("arg:") :] if n.startswith("arg:") else n: a for n, a in others}, auxiliary


class _File:
    """A file's bytes, read from front to back. Sizes are checked before anything is allocated."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content
        self._place = 0

    def arrays(self) -> dict[str, np.ndarray]:
        if len(self._content) < 8 or self._numbers("Q", 1, "its magic number") != (_LIST,):
            raise CheckpointMismatch(
                f"{self._path} is not a parameter file of MXNet: it does not begin with the number "
                f"{_LIST:#x}; copy or download it again"
            )
        self._numbers("Q", 1, "its head")
        # An array takes 4 bytes or more, a name 8.
        arrays = [self._array(number) for number in range(self._count("arrays", 4))]
        names = [self._name(number) for number in range(self._count("names", 8))]
        if len(names) != len(arrays):
            reason = f"it has {len(arrays)} arrays and {len(names)} names"
            raise self._damaged(f"{reason}; save a dict of arrays")
        return dict(zip(names, arrays))

    def _damaged(self, reason: str) -> CheckpointMismatch:
        return CheckpointMismatch(f"{self._path} cannot be read: {reason}")

    def _skip(self, nbytes: int, what: str) -> int:
        """Pass over bytes, and return where they begin."""
        left = len(self._content) - self._place
        if nbytes > left:
            raise self._damaged(
                f"{what} needs {nbytes} bytes, and {left} are left; the file is cut short or "
                "damaged, copy it again"
            )
        self._place += nbytes
        return self._place - nbytes

    def _numbers(self, kind: str, count: int, what: str) -> tuple[int, ...]:
        form = f"<{count}{kind}"
        return struct.unpack_from(form, self._content, self._skip(struct.calcsize(form), what))

    def _count(self, what: str, least: int) -> int:
        (count,) = self._numbers("Q", 1, f"the number of {what}")
        left = len(self._content) - self._place
        if count * least > left:
            raise self._damaged(
                f"{count} {what} do not fit into the {left} bytes that are left; the file is cut "
                "short or damaged, copy it again"
            )
        return count

    def _name(self, number: int) -> str:
        what = f"name {number}"
        (length,) = self._numbers("Q", 1, what)
        start = self._skip(length, what)
        try:
            return self._content[start : self._place].decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not UTF-8; copy the file again") from None

    def _array(self, number: int) -> np.ndarray:
        what = f"array {number}"
        (version,) = self._numbers("I", 1, what)
        if version in (_V2, _V3):
            self._check_dense(what)
        elif version != _V1 and version > _MOST_DIMENSIONS:
            raise self._damaged(
                f"{what} begins with {version:#x}, which no version of MXNet writes; copy the file "
                "again"
            )
        shape = self._shape(version, what)
        if shape is None:
            return np.empty(0, np.float32)
        _device, _device_number, code = self._numbers("i", 3, what)
        if code != _BFLOAT16 and code not in _DTYPES:
            raise self._damaged(f"{what} is of the unknown type {code}; copy the file again")
        return self._elements(shape, code, what)

    def _check_dense(self, what: str) -> None:
        (storage,) = self._numbers("i", 1, what)
        if storage in _SPARSE:
            raise self._damaged(
                f"{what} is {_SPARSE[storage]}, and only dense arrays are read; save it after "
                "tostype('default')"
            )
        if storage != 0:
            raise self._damaged(f"{what} is stored in the unknown way {storage}; copy it again")

    def _shape(self, version: int, what: str) -> tuple[int, ...] | None:
        """Return an array's shape, or `None` if MXNet had not allocated it."""
        if version not in (_V1, _V2, _V3):
            return self._numbers("I", version, what) or None
        (count,) = self._numbers("i", 1, what)
        if count == (-1 if version == _V3 else 0):
            return None
        if not 0 <= count <= _MOST_DIMENSIONS:
            raise self._damaged(f"{what} has {count} dimensions; copy the file again")
        shape = self._numbers("q", count, what)
        if version == _V3 and -1 in shape:
            return None
        if min(shape, default=0) < 0:
            raise self._damaged(f"{what} has shape {shape}; copy the file again")
        return shape

    def _elements(self, shape: tuple[int, ...], code: int, what: str) -> np.ndarray:
        stored = np.dtype({_BFLOAT16: "uint16", 7: "uint8"}.get(code) or _DTYPES[code])
        count = math.prod(shape)
        start = self._skip(count * stored.itemsize, f"{what} of shape {shape}")
        try:
            found = np.frombuffer(self._content, stored.newbyteorder("<"), count, start)
            found = found.reshape(shape) if count else np.empty(shape, stored)
        except ValueError:
            raise self._damaged(f"{what} has shape {shape}; copy the file again") from None
        if code == _BFLOAT16:
            # It is the first half of a float32.
            return np.left_shift(found, 16, dtype=np.uint32).view(np.float32)
        if code == 7:
            return found != 0
        return found if found.flags.aligned else found.copy()
