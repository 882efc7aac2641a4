"""`Convolution`: a drop-in for `mx.nd.Convolution` and `mx.sym.Convolution`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy

from .. import dispatch, settings
from ..backends import Backend
from ..errors import InvalidProblem
from ..problem import ConvProblem
from . import compiled_operator, pinned_arrays
from .conv_attributes import ConvAttributes, is_of_mxnet
from .graphs import guards
from .graphs.graph_json import OP_TYPE
from .inference import infer_shapes, infer_storage, infer_types
from .loading import load_mxnet

_BIAS_TOO_MANY = "bias is given although no_bias is True; leave one of them out"


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
    cuda_kernel: str | None = None,
    precision: str | float | None = None,
    gradient_precision: str | float | None = None,
    **of_mxnet: Any,
) -> Any:
    """MXNet's Convolution in two dimensions or one, computed by the kernels of this package.

    Takes NDArrays and returns one, or takes Symbols and returns one. Missing Symbols become
    variables, as in MXNet; arrays of MXNet's NumPy interface give such an array. data is (B, C, H,
    W), weight (M, C / num_group, KH, KW), bias (M,), the result (B, M, OH, OW); with a
    one-dimensional kernel data is (B, C, W), and so on. Arguments are those of MXNet's Convolution
    (`workspace`, `cudnn_tune` and `cudnn_off` have no effect), and four of this package: `backend`
    names the backend for this layer; `cuda_kernel` names a kernel of backend `cuda` or a file with
    your own kernel; `precision`, one of "strict", "float32", "tf32" and "float16", is the minimum
    precision of the forward pass in float32 ("strict": each element within 1e-6 of the sum of its
    terms' magnitudes), or a number: the largest such error that you accept. This is a minimum;
    results may be more exact. `gradient_precision` is the same for gradients. `of_mxnet` are
    attributes that MXNet gives a Symbol's node, such as `lr_mult` or `__group__`.

    Raises `InvalidProblem`, `UnsupportedProblem`, `InvalidSetting`, and for NDArrays, before
    computing, the reason why the requested backend cannot compute; `errors.surfaced` describes how
    failures during the computation surface.
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
        "cuda_kernel": cuda_kernel,
        "precision": precision,
        "gradient_precision": gradient_precision,
    }
    for key in of_mxnet:
        if not is_of_mxnet(key):
            raise TypeError(f"Convolution() got an unexpected keyword argument {key!r}")
    attributes = {key: str(value) for key, value in given.items() if value is not None}
    parsed = ConvAttributes.parse(attributes)
    dispatch.check_names(parsed.backend, parsed.cuda_kernel)
    mx = load_mxnet()
    inputs = (data, weight, bias)
    is_symbol = any(isinstance(each, mx.sym.Symbol) for each in inputs)
    numpy_interface = isinstance(data, (mx.np.ndarray, mx.sym.numpy._Symbol))
    arrays = [_as_classic(array) for array in inputs]
    out = _as_classic(out)
    if is_symbol or all(each is None for each in inputs):
        attributes.update({key: str(value) for key, value in of_mxnet.items()})
        result = _symbol(mx, parsed, attributes, arrays, name, attr, out)
    else:
        result = _ndarray(mx, parsed, attributes, arrays, name, out)
    return result.as_np_ndarray() if numpy_interface else result


def _as_classic(array: Any) -> Any:
    """Return an array or Symbol of MXNet's NumPy interface as a classic one that shares its
    memory."""
    convert = getattr(array, "as_nd_ndarray", None)
    return array if convert is None else convert()


def _ndarray(
    mx: Any, parsed: ConvAttributes, attributes: dict[str, str], arrays: list, name: Any, out: Any
) -> Any:
    inputs = _inputs(parsed, arrays)
    for role, array in inputs:
        if not isinstance(array, mx.nd.NDArray):
            raise InvalidProblem(f"{role} is a {type(array).__name__}; expected an NDArray")
    roles = [role for role, _ in inputs]
    infer_storage(roles, [array.stype for _, array in inputs])
    shapes, shape = infer_shapes(parsed, [array.shape for _, array in inputs])
    types = [numpy.dtype(array.dtype).name for _, array in inputs]
    dtype = infer_types(roles, types)
    problem = parsed.problem(shapes[0], dtype or "float32")
    data, *parameters = (array for _, array in inputs)
    backend = _requested_backend(problem, parsed, data.context)
    # Only CPU arrays have blocked layouts; MXNet may have no GPU code for the guards.
    guarded = data.context.device_type != "gpu"
    is_compiled = guarded and compiled_operator.missing() is None
    if is_compiled or (
        compiled_operator.runs_on_gpu(data.context) and not mx.autograd.is_recording()
    ):
        layer = dataclasses.replace(parsed, layer=name or "")
        if out is None and backend is not None and not mx.autograd.is_recording():
            out = pinned_arrays.result(mx, backend, problem, shape)
        return compiled_operator.call(mx, layer, [data, *parameters], out)
    if guarded:
        data = guards.plain_data(mx.nd, data)
        parameters = [guards.plain_parameter(mx.nd, array) for array in parameters]
    result = mx.nd.Custom(
        data,
        *parameters,
        op_type=OP_TYPE,
        layer=name or "",
        out=out,
        **attributes,
    )
    if guarded and mx.autograd.is_recording():
        return guards.plain_data(mx.nd, result)
    return result


def _requested_backend(
    problem: ConvProblem, parsed: ConvAttributes, context: Any
) -> Backend | None:
    """Return the requested backend, if any. Raises why it cannot compute, because MXNet would lose
    that reason later."""
    if not (parsed.backend or settings.backend()):
        return None
    on_gpu = context.device_type == "gpu"
    device, index = ("gpu", context.device_id) if on_gpu else ("cpu", 0)
    return dispatch.prepare(problem, parsed.layer_on(device, index))


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
    given = dict(zip(("data", "weight", "bias"), symbols))
    if parsed.no_bias and given["bias"] is not None:
        raise InvalidProblem(_BIAS_TOO_MANY)
    # MXNet creates variables for missing inputs, with the attributes of the operator.
    inputs = {role: symbol for role, symbol in given.items() if symbol is not None}
    # The name is complete: a prefix in force has been applied already.
    with mx.name.NameManager():
        return mx.sym.Custom(
            **inputs, op_type=OP_TYPE, name=name, layer=name, attr=attr, **attributes
        )


def _inputs(parsed: ConvAttributes, arrays: list) -> list[tuple[str, Any]]:
    data, weight, bias = arrays
    if parsed.no_bias and bias is not None:
        raise InvalidProblem(_BIAS_TOO_MANY)
    roles = [("data", data), ("weight", weight)]
    if not parsed.no_bias:
        roles.append(("bias", bias))
    for role, array in roles:
        if array is None:
            raise InvalidProblem(f"{role} is not given")
    return roles
