"""Gradients of layers, and of operators that move or reduce elements."""

from __future__ import annotations

from functools import partial

from ...errors import UnsupportedProblem
from ..graph import Entry
from .tape import Gradient, Of, Rule, Term


def _convolution(of: Of) -> list[Gradient]:
    """Of convolutions, transposed ones and fully connected layers."""
    x, w, *bias = of.inputs
    attributes = {**of.node.attributes, "of": of.node.op}
    axis = 1 if of.node.op != "FullyConnected" or of.read.flag("flatten", True) else -1
    return [
        lambda: w.node("_data_gradient", of.dy, x, **attributes),
        lambda: of.tape.again(x).node("_weight_gradient", of.dy, w, **attributes),
        *[partial(_bias_gradient, of, each, axis) for each in bias],
    ]


def _bias_gradient(of: Of, bias: Term, axis: int) -> Term:
    """Return the sums of dy over each channel. They are 0 if only a normalisation by the batch's
    averages reads y, as that subtracts the mean."""
    (number, output), made = of.dy.entry, of.tape.nodes[of.dy.entry.node]
    is_norms = made.op == "_norm_gradient" and output == 0 and not made.read.flag("accumulates")
    if not is_norms or made.read.integer("axis", 1) != axis:
        return of.dy.node("_sum_to", bias, axis=axis)
    zeros = Term(of.tape, Entry(number, len(made.read.text("made", "").split())))
    return zeros if of.tape.on_gpu else bias.node("zeros_like")


def _trained_norm(of: Of) -> list[Gradient]:
    x, gamma, _, *added = of.inputs
    tape, moving = of.tape, of.tape.moving[of.number]
    read = {"dy": of.dy, "mean": of.output(1), "inverse": of.output(2), "gamma": gamma}
    made = ["dgamma", "dbeta", *["dadded" for _ in added]]
    if tape.on_gpu:
        newest = [Term(tape, tape.newest.get(each, each)) for each in moving]
        read |= {"factor": of.output(3), "addend": of.output(4)}
        read |= zip(("moving_mean", "moving_variance"), newest)
        made += ["new_mean", "new_variance", "zeros"]
    if of.read.flag("is_relu") and (added or not tape.on_gpu):
        read["positive"] = of.y
    names = {"read": " ".join(("x", *read)), "made": " ".join(made)}

    def gradient(number: int) -> Term:
        if number == 1 and of.read.flag("fix_gamma", True):
            return gamma.node("zeros_like")
        attributes = {**of.node.attributes, **names}
        node = x.node("_norm_gradient", *read.values(), **attributes).entry.node
        if tape.on_gpu and tape.moving.pop(of.number, []):
            tape.newest |= {each: Entry(node, 3 + len(added) + k) for k, each in enumerate(moving)}
        return Term(tape, Entry(node, number))

    return [partial(gradient, k) for k in range(len(of.inputs))]


def _norm(of: Of) -> list[Gradient]:
    """Of normalisation by moving averages."""
    x, gamma, beta, mean, variance = of.inputs
    axis, fixed = of.read.integer("axis", 1), of.read.flag("fix_gamma", True)
    inverse = partial(variance.term, "inverse_deviation", p=of.read.number("eps", 1e-3))

    def of_x() -> Term:
        scale = inverse() if fixed else inverse() * gamma
        return of.dy.term("multiply", scale, axis=axis)

    def of_gamma() -> Term:
        if fixed:
            return gamma.node("zeros_like")
        products = of.dy * x.term("subtract", mean, axis=axis)
        return products.term("multiply", inverse(), axis=axis).node("_sum_to", gamma, axis=axis)

    return [of_x, of_gamma, lambda: of.dy.node("_sum_to", beta, axis=axis)]


def _pooling(of: Of) -> list[Gradient]:
    kind = of.read.text("pool_type", "max")
    if kind != "max" and of.read.flag("global_pool"):
        return [lambda: of.dy.node("_spread", of.x, pixels=True, mean=kind == "avg")]
    last = [of.y] if kind == "max" else []
    x = of.tape.again(of.x) if last else of.x
    return [lambda: of.dy.node("_pool_gradient", x, *last, **of.node.attributes)]


def _reduction(of: Of) -> list[Gradient]:
    attributes = {**of.node.attributes, "mean": of.node.op == "mean"}
    if of.node.op == "_contrib_AdaptiveAvgPooling2D":
        attributes = {"pixels": True, "mean": True}

    def gradient() -> Term:
        dy = of.dy.node("_spread", of.x, **attributes)
        if of.node.op != "max":
            return dy
        smaller = of.y.node("_spread", of.x, **attributes) - of.x
        return smaller.where(dy.constant(0), dy)

    return [gradient]


def _softmax(of: Of) -> list[Gradient]:
    channels = of.read.text("mode", "instance") == "channel"
    axis = 1 if channels else of.read.integer("axis", -1)

    def gradient() -> Term:
        dy, y = of.dy, of.y
        if of.node.op == "log_softmax":
            made = dy - y.term("exp") * dy.node("sum", axis=axis, keepdims=True)
        else:
            made = y * (dy - (dy * y).node("sum", axis=axis, keepdims=True))
        return made / of.read.number("temperature", 1.0)

    return [gradient]


def _softmax_output(of: Of) -> list[Gradient]:
    if of.read.flag("out_grad"):
        raise UnsupportedProblem(f"{of.node.op} {of.node.name}: out_grad is not computed")
    label = of.inputs[1]
    return [lambda: of.y.node("_softmax_output_gradient", label, **of.node.attributes)]


def _like(op: str) -> Rule:
    """Return the rule of a gradient that needs the input's shape alone."""
    return lambda of: [lambda: of.dy.node(op, of.x)]


def _transpose(of: Of) -> list[Gradient]:
    axes = of.read.integers("axes", ())
    places = [axis % len(axes) for axis in axes]
    inverse = tuple(places.index(axis) for axis in range(len(axes)))
    return [lambda: of.dy.node("transpose", axes=inverse)]


def _slice_axis(of: Of) -> list[Gradient]:
    place = {name: of.read.integer(name) for name in ("axis", "begin")}
    return [lambda: of.dy.node("_window", of.x, **place)]


def _concat(of: Of) -> list[Gradient]:
    axis, likes = of.read.integer("dim", 1), [entry.node for entry in of.node.inputs]
    return [
        partial(of.dy.node, "_part", likes=likes[: k + 1], axis=axis) for k in range(len(likes))
    ]


def _split(of: Of) -> list[Gradient]:
    axis, squeezed = of.read.integer("axis", 1), of.read.flag("squeeze_axis")

    def part(number: int) -> Term:
        given = of.given.get(number)
        made = Term(of.tape, given) if given else of.output(number).node("zeros_like")
        return made.node("expand_dims", axis=axis) if squeezed else made

    def gradient() -> Term:
        first, *others = map(part, range(of.read.integer("num_outputs")))
        return first.node("Concat", *others, dim=axis)

    return [gradient]


def _upsampling(of: Of) -> list[Gradient]:
    scale = (of.read.integer("scale"),) * 2
    return [lambda: of.dy.node("Pooling", kernel=scale, stride=scale, pool_type="sum")]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Convolution", "ece408_conv", "Deconvolution"), _convolution),
    "FullyConnected": _convolution,
    "_norm": _trained_norm,
    "_dropout": lambda of: [lambda: of.dy.node("_dropout", of.inputs[1], **of.node.attributes)],
    "BatchNorm": _norm,
    "Pooling": _pooling,
    **dict.fromkeys(("mean", "sum", "max", "_contrib_AdaptiveAvgPooling2D"), _reduction),
    **dict.fromkeys(("softmax", "log_softmax", "SoftmaxActivation"), _softmax),
    **dict.fromkeys(("SoftmaxOutput", "Softmax"), _softmax_output),
    **dict.fromkeys(("Flatten", "flatten", "Reshape", "reshape", "reshape_like"), _like("_view")),
    **dict.fromkeys(("expand_dims", "squeeze"), _like("_view")),
    "slice_like": _like("_window"),
    "broadcast_like": _like("_sum_to"),
    "transpose": _transpose,
    **dict.fromkeys(
        ("SwapAxis", "swapaxes"), lambda of: [lambda: of.dy.node(of.node.op, **of.node.attributes)]
    ),
    "slice_axis": _slice_axis,
    **dict.fromkeys(("Concat", "concat"), _concat),
    **dict.fromkeys(("SliceChannel", "split"), _split),
    "UpSampling": _upsampling,
}
