"""Whether MXNet's autograd wants an array's gradient, which MXNet does not say in Python."""

from __future__ import annotations

import ctypes
from typing import Any


def has_gradient(array: Any) -> bool:
    """Whether the array has a place for a gradient, or is a result that has been recorded.

    An array that a recorded operator has only read is neither.
    """
    from mxnet.base import _LIB, SymbolHandle
    from mxnet.symbol import Symbol

    if array.grad is not None:
        return True
    handle = SymbolHandle()
    # It fails for an array that no recorded operator has seen.
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)):
        return False
    # What has been read only is recorded as a variable.
    return Symbol(handle).get_children() is not None
