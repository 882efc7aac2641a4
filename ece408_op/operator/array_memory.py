"""MXNet's arrays as raw memory, without a copy, and when nobody uses them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from .loading import load_mxnet


def pointer(array: Any) -> int:
    """Address of the first element of a dense NDArray, on the CPU or the GPU.

    Does not wait for the array: inside an operator's forward and backward it is complete, elsewhere
    call `array.wait_to_read()` first, even if the address is not used (see `make_plain`). The
    address is valid as long as the array exists.
    """
    base = _base()
    address = ctypes.c_void_p()
    base.check_call(base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0


@functools.lru_cache(maxsize=1)
def _base() -> Any:
    return load_mxnet().base


def make_plain(arrays: Sequence[Any]) -> None:
    """Undo oneDNN's layouts, in which MXNet's inference puts a convolution's weights: it copies
    such an array for every call of a node of ours, and nobody can tell whether it has changed.

    Waits first: an array that MXNet is about to write may have no memory yet, and then `pointer`
    and MXNet would each allocate some.
    """
    wait_for_uses(arrays)
    # A convolution asks for a layout of oneDNN's while it runs, and the array gets it afterwards.
    wait_for_uses(arrays)
    for array in arrays:
        pointer(array)


def wait_for_uses(arrays: Iterable[Any]) -> None:
    """Wait for the end of every operator that has been given one of the arrays."""
    base = _base()
    for array in arrays:
        base.check_call(base._LIB.MXNDArrayWaitToWrite(array.handle))
