"""C callbacks of an operator written in Python, shared by all its nodes.

`mxnet.operator.register` creates functions for each node. These form reference cycles, so every
deleted executor leaves hundreds of objects until Python's garbage collector runs. Here MXNet's
contexts contain the node's number, and MXNet's delete callback removes the object with that number.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any, Callable

import mxnet as mx

from .. import errors
from . import python_calls

_Int, _Ints, _Number = ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
_Names = ctypes.POINTER(ctypes.c_char_p)
_Arrays = ctypes.POINTER(ctypes.c_void_p)
# MXNet's codes for the role of an array in an operator, and for what to do with results.
_INPUT, _OUTPUT, _INPUT_GRADIENT, _OUTPUT_GRADIENT, _STATE = range(5)
_REQUESTS = ("null", "write", "inplace", "add")

# Forks wait until these have been deleted (see `fork_safety`), so nodes are in MXNet's own table.
_nodes: dict[int, Any] = mx.operator._registry.ref_holder
_storage_names = mx.operator._STORAGE_TYPE_ID_TO_STR
_storage_numbers = mx.operator._STORAGE_TYPE_STR_TO_ID
_types, _type_numbers = mx.operator._DTYPE_MX_TO_NP, mx.operator._DTYPE_NP_TO_MX
# Arrays that MXNet copies as soon as a call returns.
_answer = threading.local()


class _Callbacks(ctypes.Structure):
    """MXNet's `MXCallbackList`."""

    _fields_ = [("count", ctypes.c_int), ("functions", _Arrays), ("contexts", _Arrays)]


def register(name: str, prop: type) -> None:
    """Make MXNet create nodes of this name through `prop`, a `CustomOpProp`."""

    @_called(ctypes.c_char_p, _Int, _Names, _Names, ctypes.POINTER(_Callbacks))
    def create(_: bytes, count: int, keys: Any, values: Any, made: Any) -> None:
        given = {keys[n].decode(): values[n].decode() for n in range(count)}
        _give(made, prop(**given), _DESCRIPTION)

    # MXNet may call it as long as the process lives.
    _nodes[mx.operator._registry.inc()] = create
    python_calls.register(mx, name, create, _FUNCTIONS)


def _called(*types: Any) -> Callable[[Callable[..., None]], Any]:
    """Wrap a function as a callback for MXNet that returns 1, or 0 after an error, which is
    remembered. MXNet's own callbacks print errors to stdout, which is for results."""

    def made(function: Callable[..., None]) -> Any:
        def answer(*arguments: Any) -> int:
            return errors.remembered(lambda: function(*arguments))

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(answer)

    return made


def _give(made: Any, thing: Any, functions: ctypes.Array[ctypes.c_void_p]) -> None:
    number = mx.operator._registry.inc()
    contexts = _lasting((ctypes.c_void_p * len(functions))(*[number] * len(functions)))
    _nodes[number] = thing, contexts
    made[0] = _Callbacks(len(functions), functions, contexts)


def _lasting(array: Any) -> Any:
    """Keep an array that MXNet may read after Python's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
    return array


def _of(number: int) -> Any:
    return _nodes[number][0]


def _fill(numbers: Any, count: int, parts: Sequence[Sequence[Any]], codes: Any) -> None:
    found = [each for part in parts for each in part]
    _check_count(found, count)
    for place, each in enumerate(found):
        numbers[place] = codes[each]


def _check_count(found: Sequence[Any], count: int) -> None:
    if len(found) != count:
        raise ValueError(f"{len(found)} answers for {count} arrays")


@_called(_Number)
def _delete(number: int) -> None:
    _, contexts = _nodes.pop(number)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(contexts))


@functools.cache
def _texts(names: tuple[str, ...]) -> Any:
    texts = [*(name.encode() for name in names), None]
    return (ctypes.c_char_p * len(texts))(*texts)


@_called(ctypes.POINTER(_Names), _Number)
def _list_arguments(names: Any, number: int) -> None:
    names[0] = _texts(tuple(_of(number).list_arguments()))


@_called(ctypes.POINTER(_Names), _Number)
def _list_outputs(names: Any, number: int) -> None:
    names[0] = _texts(tuple(_of(number).list_outputs()))


@_called(ctypes.POINTER(_Names), _Number)
def _list_states(names: Any, number: int) -> None:
    names[0] = _texts(tuple(_of(number).list_auxiliary_states()))


@_called(_Int, _Ints, ctypes.POINTER(_Ints), _Number)
def _infer_shape(count: int, dimensions: Any, shapes: Any, number: int) -> None:
    prop = _of(number)
    inputs = range(len(prop.list_arguments()))
    parts = prop.infer_shape([[shapes[n][i] for i in range(dimensions[n])] for n in inputs])
    found = [each for part in parts for each in part]
    _check_count(found, count)
    _answer.kept = [(ctypes.c_int * len(each))(*each) for each in found]
    for place, each in enumerate(_answer.kept):
        dimensions[place], shapes[place] = len(each), each


@_called(_Int, _Ints, _Number)
def _infer_type(count: int, types: Any, number: int) -> None:
    prop = _of(number)
    given = [_types[each] for each in types[: len(prop.list_arguments())]]
    _fill(types, count, prop.infer_type(given), _type_numbers)


@_called(_Int, _Ints, _Number)
def _infer_storage(count: int, storage: Any, number: int) -> None:
    prop = _of(number)
    given = [_storage_names[each] for each in storage[: len(prop.list_arguments())]]
    _fill(storage, count, prop.infer_storage_type(given), _storage_numbers)


@_called(_Int, _Ints, _Ints, _Number)
def _infer_backward_storage(count: int, storage: Any, tags: Any, number: int) -> None:
    given: list[list[str]] = [[] for _ in range(5)]
    for tag, each in zip(tags[:count], storage[:count]):
        given[tag].append(_storage_names[each])
    order = (_OUTPUT_GRADIENT, _INPUT, _OUTPUT, _INPUT_GRADIENT, _STATE)
    parts = _of(number).infer_storage_type_backward(*(given[tag] for tag in order))
    _fill(storage, count, parts, _storage_numbers)


@_called(_Ints, _Ints, _Ints, _Ints, ctypes.POINTER(_Ints), _Number)
def _need_backward(
    gradients: Any, inputs: Any, outputs: Any, count: Any, needed: Any, number: int
) -> None:
    prop = _of(number)
    of_outputs, of_inputs = len(prop.list_outputs()), len(prop.list_arguments())
    found = prop.declare_backward_dependency(
        gradients[:of_outputs], inputs[:of_inputs], outputs[:of_outputs]
    )
    _answer.kept = (ctypes.c_int * len(found))(*found)
    count[0], needed[0] = len(found), _answer.kept


@_called(
    *(ctypes.c_char_p, _Int, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint)), _Ints, _Ints),
    *(ctypes.POINTER(_Callbacks), _Number),
)
def _create_operator(
    context: bytes, count: int, shapes: Any, dimensions: Any, types: Any, made: Any, number: int
) -> None:
    device, _, index = context.decode().rstrip(")").partition("(")
    sizes = [shapes[n][: dimensions[n]] for n in range(count)]
    found = _of(number).create_operator(mx.Context(device, int(index)), sizes, types[:count])
    _give(made, found, _OPERATOR)


_RUN = (_Int, _Arrays, _Ints, _Ints, _Int, _Number)


def _arrays(count: int, handles: Any, tags: Any, written: Sequence[int]) -> list[list[Any]]:
    """Return the arrays, which the caller must free, by their role in the operator."""
    found: list[list[Any]] = [[] for _ in range(5)]
    for handle, tag in zip(handles[:count], tags[:count]):
        found[tag].append(mx.nd.NDArray(mx.base.NDArrayHandle(handle), writable=tag in written))
    return found


@_called(*_RUN)
def _forward(
    count: int, handles: Any, tags: Any, requests: Any, is_train: int, number: int
) -> None:
    inputs, outputs, _, _, states = _arrays(count, handles, tags, (_OUTPUT, _STATE))
    requested = [_REQUESTS[each] for each in requests[: len(outputs)]]
    _of(number).forward(is_train, requested, inputs, outputs, states)


@_called(*_RUN)
def _backward(count: int, handles: Any, tags: Any, requests: Any, _: int, number: int) -> None:
    inputs, outputs, wanted, gradients, states = _arrays(
        count, handles, tags, (_INPUT_GRADIENT, _STATE)
    )
    requested = [_REQUESTS[each] for each in requests[: len(wanted)]]
    _of(number).backward(requested, gradients, inputs, outputs, wanted, states)


def _addresses(*functions: Any) -> ctypes.Array[ctypes.c_void_p]:
    found = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
    return _lasting((ctypes.c_void_p * len(functions))(*found))


# In the order of MXNet's `CustomOpPropCallbacks`, then of its `CustomOpCallbacks`.
_FUNCTIONS = _addresses(
    *(_delete, _list_arguments, _list_outputs, _list_states, _infer_shape, _need_backward),
    *(_create_operator, _infer_type, _infer_storage, _infer_backward_storage),
    *(_delete, _forward, _backward),
)
_DESCRIPTION = (ctypes.c_void_p * 10).from_buffer(_FUNCTIONS)
_OPERATOR = (ctypes.c_void_p * 3).from_buffer(_FUNCTIONS, ctypes.sizeof(_DESCRIPTION))
