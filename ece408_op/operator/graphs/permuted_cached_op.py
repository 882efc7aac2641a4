"""CachedOps with inputs in an order of their own, and calls of them by handles."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Flags = Sequence[tuple[str, Any]]


class OrderedOp:
    """A CachedOp of a symbol whose inputs are given in the order of `names`, some of which may be
    missing. Those in `data` change in each call."""

    def __init__(
        self, plain: Any, symbol: Any, names: Sequence[str], data: Collection[str], flags: Flags
    ) -> None:
        own = symbol.list_inputs()
        self._order = [names.index(name) for name in own]
        is_data = [name in data for name in own]
        indices = [
            (key, [place for place, each in enumerate(is_data) if each == wanted])
            for key, wanted in (("data_indices", True), ("param_indices", False))
        ]
        self._op = plain(symbol, [*indices, *flags])
        self._repeated = _Handles((), ())

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return self._op(*(given[number] for number in self._order), **keywords)

    def repeat(self, arrays: Sequence[Any], data: Mapping[int, Any]) -> list[Any]:
        """Call it with `arrays` and, at some positions, `data`. Faster if `arrays` is the same
        object as in the last call. Raises `MXNetError`."""
        repeated = self._repeated
        if repeated.arrays is not arrays:
            repeated = self._repeated = _Handles(arrays, self._order)
        return repeated.call(self._op, data)


class _Handles:
    """The handles of arrays in an order. `None` marks arrays that each call supplies."""

    def __init__(self, arrays: Sequence[Any], order: Sequence[int]) -> None:
        self.arrays = arrays
        self._places = {number: place for place, number in enumerate(order)}
        self._handles = handles_of([arrays[number] for number in order])

    def call(self, op: Any, data: Mapping[int, Any]) -> list[Any]:
        from mxnet import _global_var
        from mxnet.base import _LIB, NDArrayHandle, check_call

        # A copy: other threads may call at the same time.
        handles = type(self._handles).from_buffer_copy(self._handles)
        for number, array in data.items():
            handles[self._places[number]] = array.handle
        count, outputs = ctypes.c_int(0), ctypes.POINTER(NDArrayHandle)()
        storage = ctypes.POINTER(ctypes.c_int)()
        results = map(ctypes.byref, (count, outputs, storage))
        check_call(_LIB.MXInvokeCachedOpEx(op.handle, len(handles), handles, *results))
        return [
            _global_var._ndarray_cls(NDArrayHandle(outputs[n]), stype=storage[n])
            for n in range(count.value)
        ]


def handles_of(arrays: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
    """Return MXNet's handles of arrays, or of `None`, for C functions."""
    handles = (array.handle if array is not None else None for array in arrays)
    return (ctypes.c_void_p * len(arrays))(*handles)
