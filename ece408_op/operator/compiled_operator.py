"""`ece408_convolution`: what `ece408_conv` computes on the CPU, without Python in its way.

A custom operator written in Python costs MXNet a tenth of a millisecond and more for each call,
needs guards (see graphs.guards), and holds Python's lock. This one is compiled, in
kernels/mxnet/convolution_operator.cpp, and MXNet runs it as one of its own. It stands in the graphs
that MXNet runs (see graphs.binding); what users hold has `ece408_conv`.

Python is asked once for each layer, direction, shape and type which kernel is to run with how many
threads.
Until a setting changes the answer holds; where another backend computes, the answer is that Python
itself does, and it is handed the arrays. While op times are being collected the operator runs as
ever, and tells Python after each call of a kernel how long that took.
"""

from __future__ import annotations

import ctypes
import functools
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from .. import dispatch, errors, op_log, settings
from ..backends import DIRECTIONS
from ..backends.cpu import native
from ..backends.cpu.backend import chosen_isa
from ..problem import ConvProblem
from . import recorded
from .attributes import OWN, ConvAttributes, problem_of

NAME = "ece408_convolution"
CONCAT = "ece408_concat"
POOL = "ece408_pool"
BATCH_NORM = "ece408_batch_norm"
LIBRARY = Path(__file__).resolve().with_name("libece408_mxnet.so")
# MXNet's numbers for types.
_TYPES = ("float32", "float64", "float16")


class _Plan(ctypes.Structure):
    """The header's `ece408_plan`."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("threads", "isa", "kernel")],
        ("bias_gradient", ctypes.c_void_p),
    ]


_OTHERS = ("share", "batch_norm_forward", "batch_norm_backward")


class _Others(ctypes.Structure):
    """The header's `ece408_others`."""

    _fields_ = [(name, ctypes.c_void_p) for name in _OTHERS]


_CALL = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
_Ask = ctypes.CFUNCTYPE(None, *_CALL, ctypes.POINTER(_Plan))
_Compute = ctypes.CFUNCTYPE(ctypes.c_int, *_CALL, ctypes.POINTER(ctypes.c_void_p))
_Report = ctypes.CFUNCTYPE(ctypes.c_int, *_CALL, ctypes.POINTER(_Plan), ctypes.c_double)

# Nodes of these operators have it as an attribute, and a graph with another key is refused: what
# a file says of memory is not to be trusted.
KEY = secrets.token_hex(16)
_missing: str | None = "MXNet is not imported yet"
# Backend, kernel and precision, as op times name them, by a plan's function, instruction set and
# kernel.
_names: dict[tuple[int, int, int], tuple[str, str, str]] = {}


def install(mxnet: Any) -> None:
    """Have MXNet load the operator. Where that fails `missing` says why, and nothing uses it."""
    global _missing
    _missing = _load(mxnet.base)


def missing() -> str | None:
    """Why there is no such operator, in one line, or `None` if there is."""
    return _missing


def _load(base: Any) -> str | None:
    if not LIBRARY.is_file():
        return f"{LIBRARY} is not there; run `pip install .` in the checkout"
    try:
        base.check_call(base._LIB.MXLoadLib(str(LIBRARY).encode(), 0))
        library = ctypes.CDLL(str(LIBRARY))
        kernels = native.library()
        functions = (getattr(kernels, f"ece408_{name}") for name in _OTHERS)
        others = _Others(*(ctypes.cast(each, ctypes.c_void_p) for each in functions))
        library.ece408_forward_use(_ask, _compute, _report, ctypes.byref(others), KEY.encode())
    except (base.MXNetError, OSError, AttributeError, errors.KernelsMissing) as error:
        return f"{LIBRARY} does not load ({str(error).splitlines()[0]})"
    settings.watch(library.ece408_forward_forget)
    op_log.watch(library.ece408_forward_log)
    return None


def call(mxnet: Any, layer: ConvAttributes, arrays: list[Any], out: Any = None) -> Any:
    """The convolution of NDArrays on the CPU, now or as soon as they are there: y, or `out`."""
    from mxnet.ndarray._internal import _imperative_invoke

    given = node_attributes(layer)
    if mxnet.autograd.is_recording():
        wanted = [recorded.has_gradient(array) for array in arrays]
        given["gradients"] = gradients(wanted)
        if recorded.may_add():
            # To what its array holds, which MXNet does not tell this operator.
            arrays = [mxnet.nd.identity(a) if has else a for a, has in zip(arrays, wanted)]
    return _imperative_invoke(
        _handle(mxnet.base), arrays, list(given), list(given.values()), out, False, False
    )


@functools.lru_cache(maxsize=1)
def _handle(base: Any) -> int:
    handle = base.OpHandle()
    base.check_call(base._LIB.NNGetOpHandle(base.c_str(NAME), ctypes.byref(handle)))
    return handle.value


_PAIRS = ("kernel", "stride", "pad", "dilate")


@functools.lru_cache(maxsize=4096)
def _description(layer: ConvAttributes) -> str:
    """A layer in one word for the compiled operator, which reads the numbers, and for `_layer`."""
    sizes = [layer.spatial, int(not layer.no_bias), layer.num_filter, layer.num_group]
    numbers = [*sizes, *(number for name in _PAIRS for number in getattr(layer, name))]
    own = json.dumps({name: getattr(layer, name) for name in OWN})
    return " ".join(map(str, [*numbers, own]))


@functools.lru_cache(maxsize=4096)
def _layer(description: bytes) -> ConvAttributes:
    """The layer that `_description` wrote."""
    *texts, own = description.decode().split(" ", 12)
    spatial, has_bias, filters, groups, *rest = map(int, texts)
    given: dict[str, Any] = json.loads(own)
    given.update((name, (rest[2 * i], rest[2 * i + 1])) for i, name in enumerate(_PAIRS))
    given.update(num_filter=filters, num_group=groups, no_bias=not has_bias, spatial=spatial)
    return ConvAttributes(**given)


def gradients(wanted: Sequence[bool]) -> str:
    """The attribute of a node that computes gradients for some of data, weight and bias."""
    names = ("data" if wanted[0] else "", "weight" if any(wanted[1:]) else "")
    return " ".join(filter(None, names))


def node_attributes(layer: ConvAttributes) -> dict[str, str]:
    """The attributes of a node that computes this layer, in this process."""
    return {"key": KEY, "layer": _description(layer)}


def _call(description: bytes, mxnet_type: int, sizes: Any) -> tuple[ConvProblem, dispatch.Layer]:
    given = _layer(description)
    # One-dimensional arrays have no height.
    x_shape = (*sizes[:2], *sizes[4 - given.spatial : 4])
    return problem_of(given, x_shape, _TYPES[mxnet_type]), given.layer_on()


@_Ask
def _ask(description: bytes | None, direction: int, mxnet_type: int, sizes: Any, plan: Any) -> None:
    try:
        plan[0] = _Plan(None, settings.threads())
        if description is None:
            plan[0].isa = native.ISA_CODES[chosen_isa()]
            return
        problem, layer = _call(description, mxnet_type, sizes)
        backend = dispatch.prepare(problem, layer, DIRECTIONS[direction])
        function = backend.native_function(problem, DIRECTIONS[direction])
        if function is not None:
            *numbers, name, precision, bias_gradient = function
            of_plan = (function.address, function.isa, function.kernel)
            _names[of_plan] = backend.name, name, precision
            plan[0] = _Plan(*numbers, bias_gradient)
    except errors.Ece408Error:
        # `_compute` is called next, meets it again, and there is someone to tell.
        return


@_Compute
def _compute(description: bytes, direction: int, mxnet_type: int, sizes: Any, arrays: Any) -> int:
    def compute() -> None:
        problem, layer = _call(description, mxnet_type, sizes)
        first, second, third, last = arrays[:4]
        if DIRECTIONS[direction] == "forward":
            dispatch.forward(problem, layer, first, second, third, last, False)
        elif DIRECTIONS[direction] == "backward_data":
            dispatch.backward_data(problem, layer, first, second, third, False)
        else:
            dispatch.backward_weight(problem, layer, first, second, third, last, False, False)

    return _done(compute)


@_Report
def _report(
    description: bytes, direction: int, mxnet_type: int, sizes: Any, plan: Any, seconds: float
) -> int:
    def publish() -> None:
        problem, layer = _call(description, mxnet_type, sizes)
        backend, kernel, precision = _names[plan[0].function, plan[0].isa, plan[0].kernel]
        call = (layer.name, problem, DIRECTIONS[direction], backend, kernel, seconds)
        op_log.publish(op_log.OpTime(*call, precision=precision))

    return _done(publish)


def _done(work: Callable[[], object]) -> int:
    try:
        work()
    except Exception as error:
        errors.remember(error)
        return 0
    return 1
