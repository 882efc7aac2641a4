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

from . import compiled_operator

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

    def forget(self) -> None:
        """Have nodes make again what they keep: their next arrays are others, which MXNet may put
        where the last ones were. No call of the nodes may be under way."""
        self._each("forget")

    def _each(self, verb: str) -> None:
        function = getattr(self._library, f"ece408_{self._kind}_{verb}")
        for name in self.names:
            function(name.encode())

    def __del__(self) -> None:
        if self.names:
            self._each("release")


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The compiled library, which is there (see `compiled_operator.missing`)."""
    return ctypes.CDLL(str(compiled_operator.LIBRARY))


@functools.lru_cache(maxsize=1)
def locked_library() -> Any:
    """The same, whose functions are called with Python's lock."""
    return ctypes.PyDLL(str(compiled_operator.LIBRARY))


def install(mxnet: Any) -> None:
    """Have nothing kept of weights from the moment that an array shares its memory with another
    library by DLPack: MXNet does not count what that writes. (The memory of `from_numpy` is made
    read-only.)"""
    if compiled_operator.missing() is not None:
        return
    functions = mxnet.base._LIB
    give, take = functions.MXNDArrayToDLPack, functions.MXNDArrayFromDLPackEx

    def given(*arguments: Any) -> Any:
        library().ece408_weights_are_shared()
        return give(*arguments)

    def taken(tensor: Any, is_read_only: Any, array: Any) -> Any:
        if not is_read_only:
            library().ece408_weights_are_shared()
        return take(tensor, is_read_only, array)

    functions.MXNDArrayToDLPack, functions.MXNDArrayFromDLPackEx = given, taken
