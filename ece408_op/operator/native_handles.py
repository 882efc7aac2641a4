"""Things that the compiled library keeps for nodes of a graph while somebody in Python owns them.

MXNet may make a node's operator anew for every call; what it keeps is found by a name, one of the
node's attributes.
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

# A node's attribute with the name of its packed weights' owner.
KEEPS = "keeps"


class Owner:
    """`names` for `count` nodes, which keep something of a kind, "network" or "weights", until this
    is gone.

    Whoever makes one keeps the arrays of parameters or weights alive: MXNet could put others where
    they are, which would be taken for them.
    """

    names: Sequence[str] = ()  # also of one that an interrupt keeps from being made

    def __init__(self, kind: str, count: int) -> None:
        self._kind = kind
        self._library = library()  # modules may be gone when `__del__` is called
        token = secrets.token_hex(16)
        self.names = [f"{token}.{number}" for number in range(count)]
        self.renew()

    def renew(self) -> None:
        """Have operators that are made from now on keep something of their own."""
        self._each("own")

    def forget(self, arrays: Sequence[Any]) -> None:
        """Have nodes make again what they keep of weights: their next arrays are these, which MXNet
        may put where the last ones were. Of memory that is not MXNet's own they keep nothing.
        No call of the nodes may be under way."""
        self._each("forget", not are_foreign(arrays))

    def _each(self, verb: str, *given: int) -> None:
        function = getattr(self._library, f"ece408_{self._kind}_{verb}")
        for name in self.names:
            function(name.encode(), *given)

    def __del__(self) -> None:
        if self.names:
            self._each("release")


def are_foreign(arrays: Sequence[Any]) -> bool:
    """Whether one of the NDArrays lies in memory that is not MXNet's own, which others may write
    without MXNet counting that. So do all where that cannot be told."""
    return not _knows_memory() or _are_foreign(arrays)


def _are_foreign(arrays: Sequence[Any]) -> bool:
    handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
    return bool(library().ece408_are_foreign(handles, len(arrays)))


@functools.lru_cache(maxsize=1)
def _knows_memory() -> bool:
    """Whether MXNet says of an array whose memory it has where the headers that it came with do."""
    nd = load_mxnet().nd
    lent = nd.from_numpy(np.zeros(1, np.float32))
    return not _are_foreign([nd.zeros(1, ctx=load_mxnet().cpu())]) and _are_foreign([lent])


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The compiled library, which is there (see `compiled_operator.missing`)."""
    return ctypes.CDLL(str(compiled_operator.LIBRARY))


@functools.lru_cache(maxsize=1)
def locked_library() -> Any:
    """The same, whose functions are called with Python's lock."""
    return ctypes.PyDLL(str(compiled_operator.LIBRARY))


def install(mxnet: Any) -> None:
    """Have nothing kept of weights from the moment that MXNet lends memory of its own to another
    library by DLPack: MXNet does not count what that writes."""
    if compiled_operator.missing() is not None:
        return
    functions = mxnet.base._LIB
    give = functions.MXNDArrayToDLPack

    def given(*arguments: Any) -> Any:
        library().ece408_weights_are_shared()
        return give(*arguments)

    functions.MXNDArrayToDLPack = given
