"""State of MXNet's autograd that its Python interface does not expose."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

# MXNet's code for adding a gradient to the array's contents.
_ADD = 3
# True until `watch` has seen all arrays since the first one.
_may_add = True


def watch(base: Any) -> None:
    """From now on, before any array exists, record which gradients are to be added."""
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
    """Return whether any array may have a gradient that is to be added."""
    return _may_add


def has_gradient(array: Any) -> bool:
    """Return whether the array has a gradient, or is a recorded result.

    An array that a recorded operator has only read has neither.
    """
    from mxnet.base import _LIB, SymbolHandle
    from mxnet.symbol import Symbol

    if array.grad is not None:
        return True
    handle = SymbolHandle()
    # The call fails for an array that no recorded operator has used.
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)):
        return False
    # An array that was only read is recorded as a variable.
    return Symbol(handle).get_children() is not None
