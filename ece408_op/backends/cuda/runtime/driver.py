"""Functions of CUDA's driver that PyCUDA does not have, called in the driver's library."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....errors import GpuFailed
from .device import RESTART


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The driver's library. Raises `OSError` where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call the function of this name. Raises `GpuFailed` for what it refuses."""
    error = getattr(library(), name)(*arguments)
    if error:
        raise GpuFailed(f"{name} failed with CUDA error {error}{RESTART}")


def address(name: str) -> int:
    """Where the function of this name lies, for compiled code."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0
