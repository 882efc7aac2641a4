"""Host arrays passed to a network."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from ..errors import UnsupportedProblem

ITEM_BYTES = {"float32": 4, "float16": 2, "uint8": 1}
# Types of a network's outputs.
RESULTS = ("float32", "float16")


class Array(NamedTuple):
    """A contiguous array in host memory. `version` changes whenever the contents may have changed
    since an earlier call with an array at this address."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    version: int

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def image_bytes(self) -> int:
        """Bytes per image."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])


def check(dtype: str, name: str, types: Collection[str]) -> None:
    """Raise `UnsupportedProblem` unless the type is one of these."""
    if dtype not in types:
        raise UnsupportedProblem(f"{name} is of type {dtype}; use {' or '.join(types)}")
