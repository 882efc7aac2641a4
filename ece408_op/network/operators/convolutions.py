"""Convolutions, fully connected layers, and batch normalisation, which is folded into them."""

from __future__ import annotations

import math
from typing import Any

from ...errors import UnsupportedProblem
from ...problem import ConvProblem
from ..builder import Builder, Convolution, Operand
from ..node_attributes import Attributes
from ..terms import leaf
from ..values import Value
from .operator import Operator, axis_of, channels_of, check_planes, without

_LAYOUTS = {1: "NCW", 2: "NCHW"}


def _convolution_why_not(attributes: Attributes) -> str | None:
    kernel = attributes.integers("kernel")
    if len(kernel) not in _LAYOUTS:
        return f"a kernel of {len(kernel)} dimensions is not computed; only 1-D and 2-D ones are"
    layout = attributes.text("layout", _LAYOUTS[len(kernel)])
    if layout != _LAYOUTS[len(kernel)]:
        return f"layout {layout} is not computed; only {_LAYOUTS[len(kernel)]} is"
    return None


def _convolution(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, w = operands[0], builder.single(operands[1])
    if isinstance(x, Convolution):
        x = builder.value(x)
    problem = problem_of(builder.node, attributes, x.shape)
    bias = builder.single(operands[2]) if problem.bias else None
    shape = problem.y_shape if len(x.shape) == 4 else problem.y_shape[:2] + problem.y_shape[3:]
    return _checked(builder, Convolution(builder.node, True, shape, problem, x, w, bias))


def problem_of(node: str, attributes: Attributes, shape: tuple[int, ...]) -> ConvProblem:
    """Return the problem of a convolution of data of this shape."""
    spatial, numbers = attributes.once(_numbers)
    if len(shape) != 2 + spatial:
        kernel = attributes.integers("kernel")
        raise UnsupportedProblem(f"{node}: data of shape {shape} does not fit a kernel of {kernel}")
    height = shape[2] if spatial == 2 else 1
    return ConvProblem(shape[0], shape[1], height, shape[-1], *numbers)


def _numbers(attributes: Attributes) -> tuple[int, tuple[Any, ...]]:
    """Return the axes of a convolution's kernel, and the fields of its problem that the size of its
    images leaves."""
    kernel = attributes.integers("kernel")
    spatial = len(kernel)
    return spatial, (
        attributes.integer("num_filter"),
        _pair(kernel, 1),
        _pair(attributes.integers("stride", (1,) * spatial), 1),
        _pair(attributes.integers("pad", (0,) * spatial), 0),
        _pair(attributes.integers("dilate", (1,) * spatial), 1),
        attributes.integer("num_group", 1),
        not attributes.flag("no_bias"),
    )


def _pair(values: tuple[int, ...], height: int) -> tuple[int, int]:
    """Return (height, width); a one-dimensional image has the given height."""
    return (values[0], values[1]) if len(values) == 2 else (height, values[0])


def _checked(builder: Builder, made: Convolution) -> Convolution:
    sizes = (made.w.elements, made.bias.elements if made.bias else made.problem.filters)
    if sizes != (math.prod(made.problem.w_shape), made.problem.filters):
        raise UnsupportedProblem(
            f"{builder.node}: weights of shape {made.w.shape} do not fit {made.problem}"
        )
    return made


def _deconvolution_why_not(attributes: Attributes) -> str | None:
    kernel = attributes.integers("kernel")
    if any(attributes.integers("target_shape", ())):
        return "target_shape is not computed"
    return _convolution_why_not(attributes) if len(kernel) == 2 else "only 2-D ones are computed"


def transposed_problem_of(attributes: Attributes, shape: tuple[int, ...]) -> ConvProblem:
    """Return the problem of the convolution whose gradient for x a transposed convolution of data
    of this shape is."""
    kernel = attributes.integers("kernel")
    stride, dilate = (attributes.integers(name, ()) or (1, 1) for name in ("stride", "dilate"))
    pad, adjusted = (attributes.integers(name, ()) or (0, 0) for name in ("pad", "adj"))
    height, width = (
        s * (size - 1) + d * (k - 1) + 1 - 2 * p + more
        for size, s, d, k, p, more in zip(shape[2:], stride, dilate, kernel, pad, adjusted)
    )
    return ConvProblem(
        *(shape[0], attributes.integer("num_filter"), height, width, shape[1]),
        *(_pair(kernel, 1), _pair(stride, 1), _pair(pad, 0), _pair(dilate, 1)),
        attributes.integer("num_group", 1),
    )


def _deconvolution(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Compute the transposed convolution as the gradient of a convolution for x; its input is the
    gradient for y."""
    check_planes(builder.node, operands[0])
    x, w = builder.single(operands[0]), builder.single(operands[1])
    problem = transposed_problem_of(attributes, x.shape)
    if problem.y_shape != x.shape or w.elements != math.prod(problem.w_shape):
        raise UnsupportedProblem(f"{builder.node}: data of shape {x.shape} does not fit {problem}")
    y = builder.empty(problem.x_shape, x.constant and w.constant, "float32")
    made = builder.emit(builder.lowering.data_gradient(problem), y, {"x": x, "w": w})
    if attributes.flag("no_bias", True):
        return made
    bias = builder.value(operands[2])
    terms = leaf(made), leaf(bias, channels_of(bias, 4))
    return builder.pointwise(made.shape, "add", *terms)


def dense_problem_of(attributes: Attributes, shape: tuple[int, ...]) -> ConvProblem:
    """Return the problem of a fully connected layer: a 1x1 convolution on images of one pixel."""
    rows = math.prod(shape[:1] if attributes.flag("flatten", True) else shape[:-1])
    sizes = rows, math.prod(shape) // max(1, rows), 1, 1, attributes.integer("num_hidden")
    return ConvProblem(*sizes, (1, 1), bias=not attributes.flag("no_bias"))


def _fully_connected(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, w = builder.dense(operands[0]), builder.single(operands[1])
    problem = dense_problem_of(attributes, x.shape)
    bias = builder.single(operands[2]) if problem.bias else None
    rows = x.shape[:1] if attributes.flag("flatten", True) else x.shape[:-1]
    shape = (*rows, problem.filters)
    return _checked(builder, Convolution(builder.node, False, shape, problem, x, w, bias))


def _of_normalisation(attributes: Attributes) -> tuple[int, bool, float]:
    """Return the axis, whether gamma is 1, and epsilon."""
    fixed = attributes.flag("fix_gamma", True)
    return attributes.integer("axis", 1), fixed, attributes.number("eps", 1e-3)


def _normalisation(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Apply a factor and an addend per channel, from moving averages; a convolution folds the
    factor into its weights."""
    x, gamma, beta, mean, variance = operands
    given, fixed, eps = attributes.once(_of_normalisation)
    axis = axis_of(given, len(x.shape))
    channels = (x.shape[axis],)
    if gamma.shape != channels:
        raise UnsupportedProblem(
            f"{builder.node}: data of shape {x.shape} does not have {gamma.shape[0]} channels"
        )
    if axis == 0:
        builder.mixes_images()
    read = [builder.constant(each) for each in ([variance] if fixed else [variance, gamma])]

    def factor() -> Value:
        if fixed:
            builder.drop(gamma)
            op, terms = "inverse_deviation", [builder.chain(variance)]
        else:
            op, terms = "scaled_deviation", [builder.chain(variance), builder.chain(gamma)]
        return builder.value(builder.pointwise(channels, op, *terms, constants=(eps,)))

    if isinstance(x, Convolution) and _foldable(x, axis) and all(read):
        arrays = [x.w, x.bias, *operands[1:]]
        w, bias = builder.once(
            ("folded", builder.number), arrays, lambda: _folded(builder, x, factor(), mean, beta)
        )
        return x.changed(problem=x.problem.with_bias(), w=w, bias=bias)

    def factor_and_addend() -> tuple[Value, Value]:
        scale = factor()
        terms = builder.chain(beta), builder.chain(mean), leaf(builder.claimed(scale))
        return scale, builder.value(builder.pointwise(channels, "subtract_product", *terms))

    scale, shift = builder.once(("factors", builder.number), operands[1:], factor_and_addend)
    shape = channels_of(scale, len(x.shape), axis)
    terms = [builder.chain(x), leaf(scale, shape), leaf(shift, shape)]
    return builder.pointwise(x.shape, "multiply_add", *terms)


def _foldable(x: Operand, axis: int) -> bool:
    """Return whether the operand is a convolution without an epilogue, viewed in a shape in which
    `axis` is its output channels."""
    if not isinstance(x, Convolution) or x.after is not None or x.onto is not None:
        return False
    seen = (x.shape[axis], math.prod(x.shape[axis + 1 :]))
    own = (x.problem.filters, math.prod(x.problem.y_shape[2:]))
    return seen == own and x.w.constant


def _folded(
    builder: Builder, x: Convolution, scale: Value, mean: Operand, beta: Operand
) -> tuple[Value, Value]:
    """Return the convolution's weights multiplied by `scale`, and its biases."""
    shape = x.problem.w_shape
    factor = leaf(builder.claimed(scale), channels_of(scale, 4, 0))
    w = builder.value(builder.pointwise(shape, "multiply", leaf(x.w, shape), factor))
    terms = [builder.chain(beta), builder.chain(mean), leaf(scale)]
    op = "subtract_product"
    if x.bias is not None:
        terms.append(leaf(x.bias))
        op = "shifted"
    return w, builder.value(builder.pointwise(scale.shape, op, *terms))


OPERATORS = {
    **dict.fromkeys(("Convolution", "ece408_conv"), Operator(_convolution, _convolution_why_not)),
    "Deconvolution": Operator(_deconvolution, _deconvolution_why_not),
    "FullyConnected": Operator(_fully_connected),
    "BatchNorm": Operator(_normalisation, without("output_mean_var")),
}
