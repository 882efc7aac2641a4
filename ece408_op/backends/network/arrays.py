"""Arrays on the host that a network is called with."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import UnsupportedProblem

ITEM_BYTES = {"float32": 4, "float16": 2, "uint8": 1}
# Inside a network all is of float32; results are converted where the caller wants another one.
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


def check(array: Array, name: str, types: Collection[str] = tuple(ITEM_BYTES)) -> None:
    """Raise `UnsupportedProblem` unless the array is of one of these types."""
    if array.dtype not in types:
        raise UnsupportedProblem(
            f"{name} is of type {array.dtype}; networks on the GPU have {', '.join(types)} there"
        )
