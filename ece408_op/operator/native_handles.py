"""The compiled library, and what it knows of the memory of MXNet's arrays."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from . import compiled_operator
from .loading import load_mxnet


def is_foreign(array: Any) -> bool:
    """Return whether an NDArray is in memory that MXNet does not own and others may write to
    without MXNet counting that. If this is unknown, each counts as such."""
    return not _knows_memory() or _is_foreign(array)


def _is_foreign(array: Any) -> bool:
    return bool(library().ece408_is_foreign(array.handle))


@functools.lru_cache(maxsize=1)
def _knows_memory() -> bool:
    """Return whether arrays have the memory layout that the headers in use declare."""
    nd = load_mxnet().nd
    lent = nd.from_numpy(np.zeros(1, np.float32))
    return not _is_foreign(nd.zeros(1, ctx=load_mxnet().cpu())) and _is_foreign(lent)


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled library, which must exist (see `compiled_operator.missing`)."""
    return ctypes.CDLL(str(compiled_operator.LIBRARY))


@functools.lru_cache(maxsize=1)
def quick_library() -> Any:
    """Return `library` for functions that end at once: other Python threads wait meanwhile, which
    takes less time than to change between them."""
    found = ctypes.PyDLL(str(compiled_operator.LIBRARY))
    found.ece408_variable_of.restype = ctypes.c_void_p
    return found


def variable_of(array: Any) -> int | None:
    """Return MXNet's variable of an array: one for all arrays in the same memory; or `None` if no
    memory is planned yet."""
    return quick_library().ece408_variable_of(array.handle)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def quick_mxnet() -> Any:
    """Return MXNet's library for such functions."""
    return ctypes.PyDLL(load_mxnet().base._LIB._name)


def install(mxnet: Any) -> None:
    """Stop keeping weights when MXNet first lends its memory to another library by DLPack: MXNet
    does not count that library's writes."""
    if compiled_operator.missing() is not None:
        return
    functions = mxnet.base._LIB
    give = functions.MXNDArrayToDLPack

    def given(*arguments: Any) -> Any:
        library().ece408_memory_is_shared()
        return give(*arguments)

    functions.MXNDArrayToDLPack = given
