"""Pooling and reductions over axes."""

from __future__ import annotations

import math

from ...errors import UnsupportedProblem
from ..builder import Builder, Chain, Operand, Windows
from ..node_attributes import Attributes
from ..values import Value
from .operator import Operator, axis_of, check_planes, without

_KINDS = ("max", "avg", "sum")


def _why_not(attributes: Attributes) -> str | None:
    kind = attributes.text("pool_type", "max")
    if kind not in _KINDS:
        return f"pool_type {kind} is not computed"
    convention = attributes.text("pooling_convention", "valid")
    if convention not in ("valid", "full"):
        return f"pooling_convention {convention} is not computed"
    layout = attributes.text("layout", "NCHW")
    if layout not in ("NCW", "NCHW"):
        return f"layout {layout} is not computed; only NCHW is"
    kernel = attributes.integers("kernel", ())
    if len(kernel) > 2:
        return f"a kernel of {len(kernel)} dimensions is not computed"
    return None


def _pooling(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    kind = attributes.text("pool_type", "max")
    shape = operands[0].shape
    is_global = attributes.flag("global_pool")
    if not 3 <= len(shape) <= (5 if is_global else 4):
        raise UnsupportedProblem(f"{builder.node}: arrays of shape {shape} are not pooled")
    if is_global:
        axes = tuple(range(2, len(shape)))
        return reduced(builder, operands[0], axes, _REDUCED[kind], True)
    x = builder.dense(operands[0], apart=True)
    windows, outs = windows_of(builder.node, attributes, shape)
    y = builder.empty((*shape[:2], *outs), x.constant)
    plan = builder.lowering.pool(as_planes(x), as_planes(y), windows)
    return builder.emit(plan, y, {"x": x})


def as_planes(x: Value) -> Value:
    """Return one-dimensional images as images of one row, and others as they are."""
    return x.seen((*x.shape[:2], *_pair(x.shape[2:], 1)), x.image)


def windows_of(
    node: str, attributes: Attributes, shape: tuple[int, ...]
) -> tuple[Windows, list[int]]:
    """Return the windows on arrays of this shape, and how many there are along each axis."""
    spatial, sizes = len(shape) - 2, shape[2:]
    kind = attributes.text("pool_type", "max")
    if attributes.flag("global_pool"):
        return Windows(kind, True, _pair(sizes, 1), (1, 1), (0, 0)), [1] * spatial
    kernel = attributes.integers("kernel")
    stride = attributes.integers("stride", (1,) * spatial) or (1,) * spatial
    pad = attributes.integers("pad", (0,) * spatial) or (0,) * spatial
    full = attributes.text("pooling_convention", "valid") == "full"
    outs = []
    for size, k, s, p in zip(sizes, kernel, stride, pad):
        room = size + 2 * p - k
        if room < 0:
            raise UnsupportedProblem(
                f"{node}: a window of {kernel} is larger than the image of {shape}"
            )
        outs.append((-(-room // s) if full else room // s) + 1)
    windows = Windows(
        *(kind, attributes.flag("count_include_pad", True)),
        *(_pair(kernel, 1), _pair(stride, 1), _pair(pad, 0)),
    )
    return windows, outs


def _pair(values: tuple[int, ...], height: int) -> tuple[int, int]:
    return (height, values[0]) if len(values) == 1 else (values[0], values[1])


# Reductions by the name of the pooling. MXNet's pooling ignores NaN in its maximum; its `max`
# operator does not.
_REDUCED = {"sum": "sum", "max": "largest number", "avg": "mean"}


def reduced(
    builder: Builder, operand: Operand, axes: tuple[int, ...], kind: str, keepdims: bool
) -> Operand:
    """Reduce the axes, in ascending order, by "mean", "sum", "max" or "largest number" (ignores
    NaN), with one step per run of adjacent axes."""
    factor = 1 / math.prod(operand.shape[axis] for axis in axes) if kind == "mean" else 1.0
    return _reduced(builder, operand, axes, kind, keepdims, factor)


def _reduced(
    builder: Builder,
    operand: Operand,
    axes: tuple[int, ...],
    kind: str,
    keepdims: bool,
    factor: float,
) -> Operand:
    # Squares, as of a norm, may exceed float16.
    x = builder.single(operand) if isinstance(operand, Chain) else builder.dense(operand)
    first, last = axes[-1], axes[-1]
    while first - 1 in axes:
        first -= 1
    others, axes = axes[: axes.index(first)], tuple(range(first, last + 1))
    if others:
        # Multiplied once: a sum of whole numbers stays exact until then.
        x = builder.dense(_reduced(builder, x, axes, kind, keepdims, 1.0))
        return _reduced(builder, x, others, kind, keepdims, factor)
    if first == 0:
        builder.mixes_images()
    kept = [1] * len(axes) if keepdims else []
    shape = [*x.shape[:first], *kept, *x.shape[last + 1 :]] or [1]
    length = math.prod(x.shape[first : last + 1])
    y = builder.empty(shape, x.constant, "float32")
    sizes = (y.elements, length, math.prod(x.shape[last + 1 :]))
    return builder.emit(builder.lowering.reduce(kind, x, *sizes, factor), y, {"x": x})


def axes_of(attributes: Attributes, count: int) -> tuple[int, ...]:
    """Return the axes that a reduction of `count` axes reduces, in ascending order."""
    given = attributes.integers("axis", ()) or tuple(range(count))
    return tuple(sorted({axis_of(axis, count) for axis in given}))


def _reduce(kind: str) -> Operator:
    def lower(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
        axes = axes_of(attributes, len(operands[0].shape))
        return reduced(builder, operands[0], axes, kind, attributes.flag("keepdims"))

    return Operator(lower, without("exclude"))


def _adaptive_why_not(attributes: Attributes) -> str | None:
    size = attributes.integers("output_size", ())
    return None if set(size) <= {1} else f"output_size {size} is not computed; only 1 is"


def _adaptive(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    check_planes(builder.node, operands[0])
    return reduced(builder, operands[0], (2, 3), "mean", True)


OPERATORS = {
    "_contrib_AdaptiveAvgPooling2D": Operator(_adaptive, _adaptive_why_not),
    "Pooling": Operator(_pooling, _why_not),
    **{name: _reduce(name) for name in ("mean", "sum", "max")},
}
