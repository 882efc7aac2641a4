"""Operator `ece408_conv` in MXNet's interface: attributes, inference, forward, backward."""

from __future__ import annotations

import contextlib
from typing import Any

import mxnet as mx
import numpy as np

from .. import dispatch
from ..errors import Ece408Error, InvalidProblem
from ..problem import ConvProblem
from . import fork_safety, python_nodes
from .array_memory import pointer
from .conv_attributes import ConvAttributes, problem_of
from .graphs.graph_json import OP_TYPE
from .inference import infer_shapes, infer_storage, infer_types


class ConvolutionOp(mx.operator.CustomOp):
    """One convolution layer."""

    def __init__(self, attributes: ConvAttributes, layer: dispatch.Layer) -> None:
        super().__init__()
        self._attributes = attributes
        self._layer = layer

    def forward(self, is_train, req, in_data, out_data, aux):  # type: ignore[no-untyped-def]
        if req[0] == "null":
            return
        fork_safety.note_use()
        x, w, *bias = (pointer(array) for array in in_data)
        dispatch.forward(
            self._problem(in_data[0]),
            self._layer,
            x,
            w,
            bias[0] if bias else None,
            pointer(out_data[0]),
            accumulate=req[0] == "add",
        )

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):  # type: ignore[no-untyped-def]
        fork_safety.note_use()
        problem, dy = self._problem(in_data[0]), pointer(out_grad[0])
        x, w = (pointer(array) for array in in_data[:2])
        dx, dw, *dbias = (
            None if kind == "null" else pointer(array) for kind, array in zip(req, in_grad)
        )
        if dx is not None:
            dispatch.backward_data(problem, self._layer, w, dy, dx, accumulate=req[0] == "add")
        if dw is not None or any(dbias):
            dispatch.backward_weight(
                problem,
                self._layer,
                x,
                dy,
                dw,
                dbias[0] if dbias else None,
                accumulate_w=req[1] == "add",
                accumulate_bias=bool(dbias) and req[2] == "add",
            )

    def _problem(self, x: Any) -> ConvProblem:
        return problem_of(self._attributes, x.shape, np.dtype(x.dtype).name)


class ConvolutionProp(mx.operator.CustomOpProp):
    """Properties of `ece408_conv` that MXNet queries before it runs. `python_nodes` keeps errors
    for the caller of MXNet.

    Inputs: data (B, C, H, W), weight (M, C / num_group, KH, KW) and, unless `no_bias`, bias (M,).
    """

    def __init__(self, **attributes: str) -> None:
        super().__init__(need_top_grad=True)
        # An exception here would kill the process; the first query raises it instead.
        self._error: Ece408Error | None = None
        self._attributes = ConvAttributes((1, 1), 1)
        try:
            self._attributes = ConvAttributes.parse(attributes)
            dispatch.check_names(self._attributes.backend, self._attributes.cuda_kernel)
        except Ece408Error as error:
            self._error = error
        except Exception as error:
            self._error = InvalidProblem(f"the attributes cannot be read: {error!r}")

    def list_arguments(self) -> list[str]:
        inputs = ["data", "weight", "bias"]
        return inputs[:2] if self._attributes.no_bias else inputs

    def infer_shape(self, in_shape):  # type: ignore[no-untyped-def]
        if self._error is not None:
            raise self._error
        inputs, output = infer_shapes(self._attributes, in_shape)
        return inputs, [output], []

    def infer_type(self, in_type):  # type: ignore[no-untyped-def]
        names = self.list_arguments()
        given = [None if t is None else np.dtype(t).name for t in in_type]
        common = infer_types(names, given)
        dtype = None if common is None else np.dtype(common).type
        return [dtype] * len(in_type), [dtype], []

    def infer_storage_type(self, in_stype):  # type: ignore[no-untyped-def]
        infer_storage(self.list_arguments(), in_stype)
        return super().infer_storage_type(in_stype)

    def declare_backward_dependency(self, out_grad, in_data, out_data):  # type: ignore[no-untyped-def]
        return [out_grad[0], in_data[0], in_data[1]]

    def create_operator(self, ctx, in_shapes, in_dtypes):  # type: ignore[no-untyped-def]
        fork_safety.note_use()
        device, index = ("gpu", ctx.device_id) if ctx.device_type == "gpu" else ("cpu", 0)
        layer = self._attributes.layer_on(device, index)
        # MXNet drops errors raised here; forward() raises them again.
        with contextlib.suppress(Ece408Error):
            dtype = _type_name(in_dtypes[0])
            dispatch.prepare(problem_of(self._attributes, tuple(in_shapes[0]), dtype), layer)
        return ConvolutionOp(self._attributes, layer)


def _type_name(dtype: Any) -> str:
    """Return the name of a type, or of MXNet's number of one."""
    return np.dtype(mx.ndarray.ndarray._DTYPE_MX_TO_NP.get(dtype, dtype)).name


python_nodes.register(OP_TYPE, ConvolutionProp)
