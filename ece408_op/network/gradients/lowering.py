"""Lowering of the operators of gradients. An input that gives only its shape is named `like`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ...errors import UnsupportedProblem
from ...problem import ConvProblem
from ..builder import Batch, Builder, Chain, Convolution, Operand
from ..graph import Node
from ..node_attributes import Attributes
from ..operators import lower as lower_forward
from ..operators.convolutions import dense_problem_of, problem_of, transposed_problem_of
from ..operators.elementwise import combined
from ..operators.operator import axis_of, channels_of
from ..operators.pooling import as_planes, axes_of, reduced, windows_of
from ..operators.rows import of_labels
from ..terms import Term, leaf
from ..values import Value


def lower(builder: Builder, node: Node, operands: list[Operand]) -> list[Operand]:
    """Lower a node of a graph with gradients, as `operators.lower` does."""
    if node.op in ("SoftmaxOutput", "Softmax"):
        _check_axes(builder, node.read, operands[0].shape)
    if node.op not in OPERATORS:
        return lower_forward(builder, node, operands)
    found = OPERATORS[node.op](builder, node.read, operands)
    return found if isinstance(found, list) else [found]


def _term(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    axes = max(len(each.shape) for each in operands)
    axis = axis_of(attributes.integer("axis", 1), axes) if axes > 1 else 0
    terms, shapes = [], []
    for each in operands:
        is_vector = len(each.shape) < axes
        shapes.append(channels_of(each, axes, axis) if is_vector else each.shape)
        terms.append(leaf(builder.value(each), shapes[-1]) if is_vector else builder.chain(each))
    constants = tuple(attributes.number(name) for name in "pq" if attributes.is_set(name))
    shape = tuple(map(max, zip(*shapes)))
    return builder.pointwise(shape, attributes.text("term", ""), *terms, constants=constants)


def _problem(builder: Builder, attributes: Attributes, x: Operand) -> ConvProblem:
    """Return the convolution whose gradients are computed. For a fully connected layer these are
    products of matrices, which are faster as those of other arrays: w is an image with a pixel for
    each input, and dy are the weights of a 1x1 convolution of it whose result is dx."""
    of = attributes.text("of", "")
    if of == "FullyConnected":
        problem = dense_problem_of(attributes, x.shape)
        return ConvProblem(1, problem.filters, 1, problem.channels, problem.batch, (1, 1))
    if of == "Deconvolution":
        return transposed_problem_of(attributes, x.shape)
    return problem_of(builder.node, attributes, x.shape)


def _data_gradient(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """From w, dy, like x, and what to add it to, if given."""
    w, dy, x, *onto = operands
    problem, shape, of = _problem(builder, attributes, x), x.shape, attributes.text("of", "")
    builder.drop(x)
    if of in ("Deconvolution", "FullyConnected"):
        image, weights = (dy, w) if of == "Deconvolution" else (w, dy)
        read = builder.dense(image), builder.dense(weights)
        made = Convolution(builder.node, False, shape, problem, *read, None)
        return combined(builder, "add", [onto[0], made]) if onto else made
    arrays = {"w": builder.dense(w), "x": builder.dense(dy)}
    return _accumulated(builder, attributes, "backward_data", problem, shape, arrays, onto)


def _weight_gradient(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """From x, dy, like w, and what to add it to, if given."""
    x, dy, w, *onto = operands
    problem, of = _problem(builder, attributes, x), attributes.text("of", "")
    builder.drop(w)
    if of == "Deconvolution":
        x, dy = dy, x
    direction, names = "backward_weight", ("x", "dy")
    if of == "FullyConnected":
        direction, names = "backward_data", ("x", "w")
    arrays = dict(zip(names, (builder.dense(x), builder.dense(dy))))
    return _accumulated(builder, attributes, direction, problem, w.shape, arrays, onto)


def _accumulated(
    builder: Builder,
    attributes: Attributes,
    direction: str,
    problem: ConvProblem,
    shape: tuple[int, ...],
    arrays: dict[str, Value],
    onto: list[Operand],
) -> Operand:
    """Emit a gradient of a convolution, added to an array if one is given."""
    lowering = builder.lowering
    of_data = direction == "backward_data"
    plan = lowering.data_gradient if of_data else lowering.weight_gradient
    logged = problem if attributes.text("of", "") in ("ece408_conv", "Convolution") else None
    emit = partial(builder.emit, problem=logged, direction=direction)
    total = [builder.value(each) for each in onto]
    if total and builder.is_free(total[0]):
        return emit(plan(problem, True), total[0], {**arrays, "onto": total[0]})
    made = emit(plan(problem, False), builder.empty(shape, False), arrays)
    return combined(builder, "add", [total[0], made]) if total else made


def _batch(
    builder: Builder, attributes: Attributes, operands: list[Operand]
) -> tuple[Batch, dict[str, Value], dict[str, Value]]:
    """Return a normalisation, the arrays `read`, by their names, and empty ones to be `made`."""
    names, made = (attributes.text(each, "").split() for each in ("read", "made"))
    shape = operands[0].shape
    axis = axis_of(attributes.integer("axis", 1), len(shape))
    # Without a sum, kernels of a GPU read parts of more channels.
    apart = axis == 1 and "factor" in (*names, *made) and not {"added", "positive"} & {*names}
    read = {
        name: builder.dense(each, apart and name in ("x", "dy"))
        for name, each in zip(names, operands)
    }
    if attributes.flag("fix_gamma", True):
        builder.drop(read.pop("gamma"))
    bounds = [attributes.number(each) for each in ("a_min", "a_max") if attributes.is_set(each)]
    batch = Batch(
        *(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])),
        *(attributes.number("eps", 1e-3), attributes.flag("is_relu"), tuple(bounds)),
        *(attributes.number("momentum", 0.9), read["x"].image),
        y_image=read["dy"].image if "dy" in read else 0,
    )
    of = {name: shape if name == "dadded" else (shape[axis],) for name in made}
    return batch, read, {name: builder.empty(each, False) for name, each in of.items()}


def _norm(builder: Builder, attributes: Attributes, operands: list[Operand]) -> list[Operand]:
    """From x, gamma, beta, and what to add before relu, if given: y, and what is `made`."""
    batch, read, also = _batch(builder, attributes, operands)
    y = builder.empty(operands[0].shape, False)
    return [builder.emit(builder.lowering.norm(batch, read), y, read, also=also), *also.values()]


def _norm_gradient(
    builder: Builder, attributes: Attributes, operands: list[Operand]
) -> list[Operand]:
    """From the arrays `read`, and what to add dx to, if given: dx, and what is `made`."""
    batch, read, also = _batch(builder, attributes, operands)
    dx = builder.empty(operands[0].shape, False)
    total = [builder.value(operands[-1])] if attributes.flag("accumulates") else []
    if total and builder.is_free(total[0], part=True) and total[0].image == read["x"].image:
        read["onto"] = dx = total.pop()
    else:
        read["x"], batch = builder.dense(read["x"]), batch._replace(x_image=0)
    plan = builder.lowering.norm_gradient(batch, {*read, *also})
    made: Operand = builder.emit(plan, dx, read, also=also)
    return [combined(builder, "add", [*total, made]) if total else made, *also.values()]


def _dropout(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """From x and the seed; or from dy, whose gradient is drawn again."""
    x, seed = map(builder.dense, operands)
    kept, layer = 1 - attributes.number("p", 0.5), attributes.integer("layer")
    plan = builder.lowering.dropout(x.elements, kept, layer)
    return builder.emit(plan, builder.empty(x.shape, False), {"x": x, "seed": seed})


def _pool_gradient(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """From dy, like x; or from dy, x and y for a maximum."""
    dy, shape = builder.dense(operands[0]), operands[1].shape
    windows, _ = windows_of(builder.node, attributes, shape)
    read = {"dy": dy}
    if windows.kind == "max":
        read |= {"x": builder.dense(operands[1]), "pooled": builder.dense(operands[2])}
    else:
        builder.drop(operands[1])
    dx = builder.empty(shape, False)
    plan = builder.lowering.pool_gradient(as_planes(dx), as_planes(dy), windows)
    return builder.emit(plan, dx, read)


def _spread(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Spread an array to the shape of x, of which axes were reduced; divide by their size for a
    mean."""
    a, x = operands
    shape = x.shape
    builder.drop(x)
    pixels = tuple(range(2, len(shape)))
    axes = pixels if attributes.flag("pixels") else axes_of(attributes, len(shape))
    factor = 1 / math.prod(shape[axis] for axis in axes) if attributes.flag("mean") else 1.0
    seen = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    term = leaf(builder.dense(a), seen)
    return builder.pointwise(shape, "times", term, constants=(factor,))


def _sum_to(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Sum an array to the shape that was spread, or to a vector along an axis."""
    a, like = operands
    shape, count = like.shape, len(a.shape)
    builder.drop(like)
    seen = shape
    if len(shape) < count:
        axis = axis_of(attributes.integer("axis", -1), count)
        seen = channels_of(like, count, axis)
    axes = tuple(k for k in range(count) if seen[k] != a.shape[k])
    made = reduced(builder, a, axes, "sum", True) if axes else a
    return made if made.shape == shape else builder.view(made, shape)


def _view(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    builder.drop(operands[1])
    return builder.view(operands[0], operands[1].shape)


def _window(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Copy an array to one of the shape of `like`, as far as it fits, from the first element on, or
    from `begin` on along an axis; the rest is 0."""
    a, shape = builder.dense(operands[0]), operands[1].shape
    builder.drop(operands[1])
    first = [0] * len(shape)
    if attributes.is_set("axis"):
        axis = axis_of(attributes.integer("axis"), len(shape))
        begin = attributes.integer("begin")
        first[axis] = begin + shape[axis] if begin < 0 else begin
    return builder.windowed(a, shape, first)


def _part(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Return the part of a concatenation that has the shape of the last of the nodes `likes`."""
    likes = [builder.shapes[number] for number in attributes.integers("likes")]
    axis = axis_of(attributes.integer("axis"), len(likes[0]))
    sizes = [each[axis] for each in likes]
    x = builder.dense(operands[0], apart=True)
    part = builder.part(x, axis, sum(sizes[:-1]), sizes[-1])
    # One copy for several readers.
    return builder.dense(part) if builder.readers > 1 else part


def _check_axes(builder: Builder, attributes: Attributes, shape: tuple[int, ...]) -> None:
    """Refuse arrays for which MXNet's result is another one in training than in inference."""
    if len(shape) > 2 and not any(map(attributes.flag, ("multi_output", "preserve_shape"))):
        raise UnsupportedProblem(
            f"{builder.node}: an array of shape {shape} is computed in training with multi_output "
            "or preserve_shape only"
        )


def _softmax_output_gradient(
    builder: Builder, attributes: Attributes, operands: list[Operand]
) -> Operand:
    """From y and labels: y less 1 for the label, scaled as MXNet does."""
    y, label = operands
    shape, scale = y.shape, attributes.number("grad_scale", 1.0)
    if attributes.number("smooth_alpha", 0.0):
        raise UnsupportedProblem(f"{builder.node}: the gradient of smooth_alpha is not computed")
    if label.shape == shape:
        return builder.unary(_of_two(builder, "subtract", y, label), "times", scale)
    first, end = of_labels(attributes, len(shape))
    labels = builder.dense(label)
    rows, length, inner = (math.prod(s) for s in (shape[:first], shape[first:end], shape[end:]))
    if labels.elements != rows * inner:
        raise UnsupportedProblem(
            f"{builder.node}: labels of shape {label.shape} do not fit data of shape {shape}"
        )
    plan, read = builder.lowering.one_hot(rows, length, inner), {"x": builder.claimed(labels)}
    hot = builder.emit(plan, builder.empty(shape, False), read)
    valid = _valid(
        builder, attributes, labels, (*shape[:first], *(1,) * (end - first), *shape[end:])
    )
    how = attributes.text("normalization", "null")
    parts = {"null": inner, "batch": rows * inner}.get(how, 1)
    made: Operand = _of_two(builder, "subtract", y, hot)
    made = builder.unary(made, "times", scale / parts)
    if attributes.flag("use_ignore"):
        made = _of_two(builder, "multiply", made, builder.claimed(valid))
    if how == "valid":
        count = reduced(builder, builder.claimed(valid), tuple(range(len(shape))), "sum", True)
        made = _of_two(builder, "divide", made, builder.unary(count, "maximum", 1.0))
    builder.drop(valid)
    return made


def _valid(
    builder: Builder, attributes: Attributes, labels: Value, shape: tuple[int, ...]
) -> Value:
    """Return 1 for labels that count, and 0 for those to be ignored, in this shape."""
    ignored = attributes.number("ignore_label", -1.0)
    distance = Term("abs", (Term("minus", (leaf(labels, shape),), (ignored,)),))
    one, zero = (Term("constant", (distance,), (number,)) for number in (1.0, 0.0))
    return builder.value(builder.pointwise(shape, "where", distance, one, zero))


def _of_two(builder: Builder, op: str, a: Operand, b: Operand) -> Chain:
    return builder.pointwise(a.shape, op, builder.chain(a), builder.chain(b))


OPERATORS: dict[str, Callable[[Builder, Attributes, list[Operand]], Operand | list[Operand]]] = {
    "_term": _term,
    "_data_gradient": _data_gradient,
    "_weight_gradient": _weight_gradient,
    "_dropout": _dropout,
    "_norm": _norm,
    "_norm_gradient": _norm_gradient,
    "_pool_gradient": _pool_gradient,
    "_softmax_output_gradient": _softmax_output_gradient,
    "_spread": _spread,
    "_sum_to": _sum_to,
    "_view": _view,
    "_window": _window,
    "_part": _part,
}
