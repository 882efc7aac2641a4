"""`Convolution`: a drop-in for `mx.nd.Convolution` and `mx.sym.Convolution`."""

from __future__ import annotations

from typing import Any

import numpy

from . import layout_guard
from .attributes import ConvAttributes
from .errors import InvalidProblem
from .inference import UNKNOWN, infer_shapes, infer_types
from .mxnet_import import load_mxnet


def Convolution(
    data: Any = None,
    weight: Any = None,
    bias: Any = None,
    kernel: Any = None,
    stride: Any = None,
    dilate: Any = None,
    pad: Any = None,
    num_filter: int | None = None,
    num_group: int | None = None,
    workspace: int | None = None,
    no_bias: bool | None = None,
    cudnn_tune: str | None = None,
    cudnn_off: bool | None = None,
    layout: str | None = None,
    name: str | None = None,
    attr: dict[str, str] | None = None,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """MXNet's 2-D Convolution, computed by the kernels of this package.

    Takes NDArrays and returns one, or Symbols and returns one; for Symbols, weight and bias are
    made as variables when they are not given. data is (B, C, H, W), weight (M, C / num_group,
    KH, KW), bias (M,), the result (B, M, OH, OW). Arguments are those of MXNet's Convolution
    (`workspace`, `cudnn_tune` and `cudnn_off` have no effect), and `backend`, which picks who
    computes this layer.

    Raises `InvalidProblem` and `UnsupportedProblem` before anything is computed; a failure in
    the computation itself surfaces as `errors.surfaced` describes.
    """
    given = {
        "kernel": kernel,
        "stride": stride,
        "dilate": dilate,
        "pad": pad,
        "num_filter": num_filter,
        "num_group": num_group,
        "no_bias": no_bias,
        "workspace": workspace,
        "cudnn_tune": cudnn_tune,
        "cudnn_off": cudnn_off,
        "layout": layout,
        "backend": backend,
    }
    attributes = {key: str(value) for key, value in given.items() if value is not None}
    parsed = ConvAttributes.parse(attributes)
    mx = load_mxnet()
    if isinstance(data, mx.sym.Symbol):
        return _symbol(mx, parsed, attributes, [data, weight, bias], name, attr, out)
    return _ndarray(mx, parsed, attributes, [data, weight, bias], name, out)


def _ndarray(
    mx: Any, parsed: ConvAttributes, attributes: dict[str, str], arrays: list, name: Any, out: Any
) -> Any:
    inputs = _inputs(parsed, arrays)
    for role, array in inputs:
        if not isinstance(array, mx.nd.NDArray):
            raise InvalidProblem(f"{role} is a {type(array).__name__}; expected an NDArray")
    shapes, _ = infer_shapes(parsed, [array.shape for _, array in inputs])
    types = [numpy.dtype(array.dtype).name for _, array in inputs]
    dtype = infer_types([role for role, _ in inputs], types)
    parsed.problem(shapes[0], dtype or "float32")
    guarded = [layout_guard.plain_input(mx.nd, array) for _, array in inputs]
    result = mx.nd.Custom(*guarded, op_type="ece408_conv", layer=name or "", out=out, **attributes)
    return layout_guard.plain_input(mx.nd, result) if mx.autograd.is_recording() else result


def _symbol(
    mx: Any,
    parsed: ConvAttributes,
    attributes: dict[str, str],
    symbols: list,
    name: Any,
    attr: Any,
    out: Any,
) -> Any:
    if out is not None:
        raise InvalidProblem("out is given with Symbols; it is for NDArrays only")
    name = mx.name.NameManager.current.get(name, "convolution")
    # The names below are complete: a prefix in force has been applied already.
    with mx.name.NameManager():
        inputs = _inputs(parsed, _with_variables(mx, parsed, symbols, name))
        guarded = [
            layout_guard.plain_input(
                mx.sym, symbol, 1 if role == "bias" else 4, f"{name}_{role}_plain"
            )
            for role, symbol in inputs
        ]
        result = mx.sym.Custom(
            *guarded,
            op_type="ece408_conv",
            name=f"{name}_conv",
            layer=name,
            attr=attr,
            **attributes,
        )
        return layout_guard.plain_gradient(mx.sym, result, name)


def _with_variables(mx: Any, parsed: ConvAttributes, symbols: list, name: str) -> list:
    """data, weight and bias, variables made for those of the last two that are not given."""
    data, weight, bias = symbols
    weight_shape = infer_shapes(parsed, [[], []])[0][1]
    known = tuple(0 if size == UNKNOWN else size for size in weight_shape)
    if weight is None:
        weight = mx.sym.Variable(f"{name}_weight", shape=known)
    elif weight.attr("__shape__") is None and weight.get_children() is None:
        # The guard keeps MXNet from inferring the shape of a variable behind it.
        weight._set_attr(__shape__=str(known))
    if bias is None and not parsed.no_bias:
        bias = mx.sym.Variable(f"{name}_bias", shape=(parsed.num_filter,))
    return [data, weight, bias]


def _inputs(parsed: ConvAttributes, arrays: list) -> list[tuple[str, Any]]:
    data, weight, bias = arrays
    if parsed.no_bias and bias is not None:
        raise InvalidProblem("bias is given although no_bias is True; leave one of them out")
    roles = [("data", data), ("weight", weight)]
    if not parsed.no_bias:
        roles.append(("bias", bias))
    for role, array in roles:
        if array is None:
            raise InvalidProblem(f"{role} is not given")
    return roles
