"""MXNet's arrays as raw memory, without a copy, and when nobody uses them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

from .loading import load_mxnet


def pointer(array: Any) -> int:
    """Address of the first element of a dense NDArray, on the CPU or the GPU.

    Does not wait for the array: inside an operator's forward and backward it is complete, elsewhere
    call `array.wait_to_read()` first. The address is valid as long as the array exists.
    """
    base = _base()
    address = ctypes.c_void_p()
    base.check_call(base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0


@functools.lru_cache(maxsize=1)
def _base() -> Any:
    return load_mxnet().base


def wait_for_uses(arrays: Iterable[Any]) -> None:
    """Wait for the end of every operator that has been given one of the arrays."""
    base = _base()
    for array in arrays:
        base.check_call(base._LIB.MXNDArrayWaitToWrite(array.handle))
