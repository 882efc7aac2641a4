"""Access to the memory of MXNet's arrays without a copy, and waiting for their users."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from .loading import load_mxnet


def pointer(array: Any) -> int:
    """Return the address of the first element of a dense NDArray, on the CPU or the GPU.

    Does not wait for the array: inside an operator's forward and backward it is complete; elsewhere
    call `array.wait_to_read()` first, even if the contents are not read (see `make_plain`). The
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
    """Convert weights from oneDNN's blocked layouts, which MXNet's inference gives them, to the
    plain one. MXNet would copy a blocked array in every call of one of our nodes, and its changes
    cannot be detected.

    Waits first: an array that MXNet is about to write may have no memory yet; `pointer` and MXNet
    would then both allocate some.
    """
    wait_for_uses(arrays)
    # A convolution requests oneDNN's layout while it runs; the array is converted afterwards.
    wait_for_uses(arrays)
    for array in arrays:
        pointer(array)


def wait_for_uses(arrays: Iterable[Any]) -> None:
    """Wait for every operator that uses one of the arrays."""
    base = _base()
    for array in arrays:
        base.check_call(base._LIB.MXNDArrayWaitToWrite(array.handle))
