"""Arrays on the host that a network is called with."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import UnsupportedProblem

ITEM_BYTES = {"float32": 4, "float16": 2, "uint8": 1}
# Of a network's outputs. Inside all is of float32.
RESULTS = ("float32", "float16")


@dataclass(frozen=True)
class Array:
    """An array in the host's memory, contiguous. `version` differs whenever what is in it may have
    changed since an earlier call with an array at this address."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    version: int

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def image_bytes(self) -> int:
        """Of one image."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])


def check(dtype: str, name: str, types: Collection[str]) -> None:
    """Raise `UnsupportedProblem` unless the type is one of these."""
    if dtype not in types:
        raise UnsupportedProblem(f"{name} is of type {dtype}; use {' or '.join(types)}")
