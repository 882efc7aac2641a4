"""What MXNet's autograd wants of arrays, which MXNet does not say in Python."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# MXNet's number for the request to add a gradient to what its array holds.
_ADD = 3
# Until MXNet is watched from its first array on.
_may_add = True


def watch(base: Any) -> None:
    """Note from now on, before there is any array, which gradients are to be added."""
    global _may_add
    _may_add = False
    mark_variables = base._LIB.MXAutogradMarkVariables

    @functools.wraps(mark_variables, assigned=())
    def marking(count: Any, arrays: Any, requests: Any, gradients: Any) -> Any:
        global _may_add
        number = getattr(count, "value", count)
        _may_add = _may_add or any(requests[n] == _ADD for n in range(number))
        return mark_variables(count, arrays, requests, gradients)

    base._LIB.MXAutogradMarkVariables = marking


def may_add() -> bool:
    """Whether any array may have a gradient that is to be added to what is there."""
    return _may_add


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
