"""Objects in the compiled library that belong to graph nodes, owned by Python objects.

MXNet may recreate a node's operator for every call; its objects are found by a name, which is one
of the node's attributes.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiled_operator
from .loading import load_mxnet


class Owner:
    """`names` for `count` nodes, which keep a network for the owner's lifetime.

    The creator must keep the arrays of parameters alive: MXNet could reuse their memory for others,
    which would be mistaken for them.
    """

    names: Sequence[str] = ()  # also defined if an interrupt prevents construction

    def __init__(self, count: int) -> None:
        self._library = library()  # modules may be gone when `__del__` is called
        token = secrets.token_hex(16)
        self.names = [f"{token}.{number}" for number in range(count)]
        self._each("own")

    def _each(self, verb: str) -> None:
        function = getattr(self._library, f"ece408_network_{verb}")
        for name in self.names:
            function(name.encode())

    def __del__(self) -> None:
        if self.names:
            self._each("release")


def are_foreign(arrays: Sequence[Any]) -> bool:
    """Return whether one of the NDArrays is in memory that MXNet does not own and others may write
    to without MXNet counting that. If this is unknown, all count as such."""
    return not _knows_memory() or _are_foreign(arrays)


def _are_foreign(arrays: Sequence[Any]) -> bool:
    handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
    return bool(library().ece408_are_foreign(handles, len(arrays)))


@functools.lru_cache(maxsize=1)
def _knows_memory() -> bool:
    """Return whether arrays have the memory layout that the headers in use declare."""
    nd = load_mxnet().nd
    lent = nd.from_numpy(np.zeros(1, np.float32))
    return not _are_foreign([nd.zeros(1, ctx=load_mxnet().cpu())]) and _are_foreign([lent])


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled library, which must exist (see `compiled_operator.missing`)."""
    return ctypes.CDLL(str(compiled_operator.LIBRARY))


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
