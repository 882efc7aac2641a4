"""CUDA driver functions that PyCUDA lacks, called through the driver's library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....errors import GpuFailed
from .device import RESTART


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Return the driver's library. Raises `OSError` if it is missing."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call the function of this name. Raises `GpuFailed` if it returns an error."""
    error = getattr(library(), name)(*arguments)
    if error:
        raise GpuFailed(f"{name} failed with CUDA error {error}{RESTART}")


def address(name: str) -> int:
    """Return the address of the function of this name, for compiled code."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0
