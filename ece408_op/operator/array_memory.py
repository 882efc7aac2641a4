"""Access to the memory of MXNet's arrays without a copy, and waiting for their users."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .loading import load_mxnet
from .native_handles import variable_of


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


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_actions: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_act = _Function(lambda context, number: _actions.pop(number)())
# An MXNet Context: the type and the number of the first CPU.
_FIRST_CPU = (ctypes.c_int32 * 4)(1)


def do_between_uses(arrays: Iterable[Any], action: Callable[[], None]) -> None:
    """Call `action` on a thread of MXNet's when every operator that uses one of the arrays has
    ended, and wait for it, which counts as a write to each. Raises the error of an earlier write.

    One operation for all arrays: to wait for each by itself takes 0.1 ms.
    """
    base, number = _base(), next(_numbers)
    # MXNet would wait forever for an operation that writes twice to the same memory.
    different = {variable_of(array): array.handle for array in arrays}
    different.pop(None, None)
    handles = (ctypes.c_void_p * len(different))(*different.values())
    _actions[number] = action
    written = handles, len(handles)
    base.check_call(
        base._LIB.MXEnginePushSyncND(
            *(_act, ctypes.c_void_p(number), None, _FIRST_CPU, None, 0),
            *(*written, None, 0, b"ece408_wait"),
        )
    )
    try:
        # Writes are counted one after the other.
        for handle in handles:
            base.check_call(base._LIB.MXNDArrayWaitToRead(ctypes.c_void_p(handle)))
    finally:
        # After an array's error MXNet does not call it.
        _actions.pop(number, None)


def wait_for_uses(arrays: Iterable[Any]) -> None:
    """Wait for every operator that uses one of the arrays. Raises the error of an earlier write."""
    if several := list(arrays):
        do_between_uses(several, lambda: None)
