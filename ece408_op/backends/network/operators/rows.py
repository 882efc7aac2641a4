"""Operators along an axis or over adjacent channels."""

from __future__ import annotations

import math
from typing import Callable

from ....errors import UnsupportedProblem
from ...cuda.kernel_plan import ARCHITECTURES, Code, Launch, Plan, divide_up
from ..builder import Builder, Operand
from ..node_attributes import Attributes
from ..pointwise import number
from .operator import Operator, axis_of

SOFTMAX = Code("softmax", "network/softmax.cu", ARCHITECTURES, "float32", True)
LRN = Code("lrn", "network/lrn.cu", ARCHITECTURES, "float32", True)
_THREADS, _WARPS = 256, 8
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
        y = x if builder.is_free(x) else builder.empty(x.shape, x.constant)
        defines = (("LOGARITHM", int(logarithm)), ("SCALE", number(1 / temperature)))
        length, inner = math.prod(x.shape[first:end]), math.prod(x.shape[end:])
        rows = x.elements // length
        grid = (divide_up(rows, _WARPS), 1, 1)
        arguments = ("y", "x", rows, length, inner)
        launch = Launch("softmax", grid, (32 * _WARPS, 1, 1), arguments)
        return builder.emit(Plan(SOFTMAX, defines, (launch,)), y, {"x": x})

    return Operator(lower, _softmax_why_not)


def _softmax_why_not(attributes: Attributes) -> str | None:
    return "use_length is not computed" if attributes.flag("use_length") else None


def _one_axis(attributes: Attributes, axes: int) -> tuple[int, int]:
    axis = axis_of(attributes.integer("axis", -1), axes)
    return axis, axis + 1


def _of_labels(attributes: Attributes, axes: int) -> tuple[int, int]:
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
    defaults = {"alpha": 1e-4, "beta": 0.75, "knorm": 2.0}
    defines = [
        (name.upper(), number(attributes.number(name, value))) for name, value in defaults.items()
    ]
    y = builder.empty(x.shape, x.constant)
    arguments = ("y", "x", x.elements, x.shape[1], math.prod(x.shape[2:]))
    grid = (divide_up(x.elements, _THREADS), 1, 1)
    launch = Launch("normalise", grid, (_THREADS, 1, 1), arguments)
    size = ("SIZE", attributes.integer("nsize"))
    return builder.emit(Plan(LRN, (size, *defines), (launch,)), y, {"x": x})


OPERATORS = {
    "softmax": _softmax(_one_axis),
    "log_softmax": _softmax(_one_axis, logarithm=True),
    "SoftmaxOutput": _softmax(_of_labels),
    "Softmax": _softmax(_of_labels),
    "SoftmaxActivation": _softmax(_of_mode),
    "LRN": Operator(_lrn),
}
