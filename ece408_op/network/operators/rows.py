"""Operators along an axis or over adjacent channels."""

from __future__ import annotations

import math
from typing import Callable

from ...errors import UnsupportedProblem
from ..builder import Builder, Operand
from ..node_attributes import Attributes
from .operator import Operator, axis_of, without

# Returns the first axis that is normalised, and the one after the last.
_Part = Callable[[Attributes, int], "tuple[int, int]"]


def _softmax(part: _Part, logarithm: bool = False) -> Operator:
    def lower(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
        for other in operands[1:]:
            builder.drop(other)
        x = builder.dense(operands[0])
        first, end = part(attributes, len(x.shape))
        if first == 0:
            builder.mixes_images()
        temperature = attributes.number("temperature", 1.0)
        in_place = x.dtype == "float32" and builder.is_free(x)
        y = x if in_place else builder.empty(x.shape, x.constant, "float32")
        length, inner = math.prod(x.shape[first:end]), math.prod(x.shape[end:])
        sizes = (x.elements // length, length, inner)
        plan = builder.lowering.softmax(x, *sizes, logarithm, 1 / temperature)
        return builder.emit(plan, y, {"x": x})

    return Operator(lower, without("use_length"))


def _one_axis(attributes: Attributes, axes: int) -> tuple[int, int]:
    axis = axis_of(attributes.integer("axis", -1), axes)
    return axis, axis + 1


def of_labels(attributes: Attributes, axes: int) -> tuple[int, int]:
    """Return SoftmaxOutput's axes: channels, the last axis, or the whole image. With four axes
    MXNet uses oneDNN, which takes the last one."""
    if axes < 2:
        raise UnsupportedProblem(f"SoftmaxOutput of {axes} axes is not computed")
    if attributes.flag("multi_output"):
        return 1, 2
    is_last = attributes.flag("preserve_shape") or axes == 4
    return (axes - 1, axes) if is_last else (1, axes)


def _of_mode(attributes: Attributes, axes: int) -> tuple[int, int]:
    return (1, 2) if attributes.text("mode", "instance") == "channel" else (axes - 1, axes)


def _lrn(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = builder.dense(operands[0])
    defaults = (("alpha", 1e-4), ("beta", 0.75), ("knorm", 2.0))
    constants = (attributes.number(*each) for each in defaults)
    y = builder.empty(x.shape, x.constant)
    plan = builder.lowering.lrn(x, y, attributes.integer("nsize"), *constants)
    return builder.emit(plan, y, {"x": x})


OPERATORS = {
    "softmax": _softmax(_one_axis),
    "log_softmax": _softmax(_one_axis, logarithm=True),
    **dict.fromkeys(("SoftmaxOutput", "Softmax"), _softmax(of_labels)),
    "SoftmaxActivation": _softmax(_of_mode),
    "LRN": Operator(_lrn),
}
