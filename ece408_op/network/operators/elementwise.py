"""Pointwise operators: activations, arithmetic, casts."""

from __future__ import annotations

import math

from ...errors import UnsupportedProblem
from ..builder import Builder, Convolution, Operand
from ..host_arrays import RESULTS
from ..node_attributes import Attributes
from ..terms import leaf
from .operator import Operator, among, channels_of

# Operators that are terms of the same name.
_UNARY = (
    *("relu", "sigmoid", "tanh", "softsign", "exp", "log", "sqrt", "square", "abs", "negative"),
    "erf",
)
_ACTIVATIONS = ("relu", "sigmoid", "tanh", "softsign", "softrelu")
_BINARY = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
_SCALAR = {
    "_plus_scalar": "plus",
    "_minus_scalar": "minus",
    "_rminus_scalar": "minus_from",
    "_mul_scalar": "times",
    "_div_scalar": "over",
    "_rdiv_scalar": "over_from",
    "_maximum_scalar": "maximum",
    "_minimum_scalar": "minimum",
    "_power_scalar": "power",
}
# Of S. Klambauer and others, Self-Normalizing Neural Networks, 2017.
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_LEAKY = ("leaky", "elu", "selu", "gelu", "prelu", "rrelu")


def _unary(op: str, *constants: float) -> Operator:
    return Operator(lambda builder, _, operands: builder.unary(operands[0], op, *constants))


def _activation(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    return builder.unary(operands[0], attributes.text("act_type", ""))


def _leaky(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, kind = operands[0], attributes.text("act_type", "leaky")
    slope = attributes.number("slope", 0.25)
    if kind == "prelu":
        gamma = operands[1]
        shape = channels_of(gamma, len(x.shape)) if gamma.shape[0] > 1 else (1,) * len(x.shape)
        terms = builder.chain(x), leaf(builder.value(gamma), shape)
        return builder.pointwise(x.shape, "prelu", *terms)
    for each in operands[1:]:
        builder.drop(each)
    if kind == "rrelu":
        lower = attributes.number("lower_bound", 0.125)
        upper = attributes.number("upper_bound", 0.334)
        slope = (lower + upper) / 2
    constants = {"selu": (SELU_SCALE, SELU_ALPHA), "gelu": (math.sqrt(0.5),)}
    op = kind if kind in ("elu", "selu", "gelu") else "leaky"
    return builder.unary(x, op, *constants.get(kind, (slope,)))


def _clip(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    return builder.unary(operands[0], "clip", *attributes.once(_bounds))


def _bounds(attributes: Attributes) -> tuple[float, float]:
    return attributes.number("a_min"), attributes.number("a_max")


def _hard_sigmoid(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    constants = (attributes.number(*of) for of in (("alpha", 0.2), ("beta", 0.5)))
    return builder.unary(builder.unary(operands[0], "affine", *constants), "clip", 0.0, 1.0)


def _scalar(op: str) -> Operator:
    def lower(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
        return builder.unary(operands[0], op, attributes.number("scalar"))

    return Operator(lower)


def _binary(name: str) -> Operator:
    def lower(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
        return combined(builder, name, operands)

    return Operator(lower)


def combined(builder: Builder, name: str, operands: list[Operand]) -> Operand:
    """Combine two operands by "add", "sub", "mul" or "div"; either may be broadcast."""
    first, second = operands
    if name == "add" and first.shape == second.shape:
        if not _can_be_added_to(first):
            first, second = second, first
        if isinstance(first, Convolution) and _can_be_added_to(first):
            second = builder.value(second)
            if builder.is_free(second) or not builder.lowering.adds_in_place:
                return first.changed(onto=second)
    shape = _spread(builder, [first, second])
    return builder.pointwise(shape, _BINARY[name], builder.chain(first), builder.chain(second))


def _can_be_added_to(operand: Operand) -> bool:
    """Return whether it is a convolution without an epilogue."""
    return isinstance(operand, Convolution) and operand.after is None and operand.onto is None


def _spread(builder: Builder, operands: list[Operand]) -> tuple[int, ...]:
    shapes = [each.shape for each in operands]
    wrong = len(set(map(len, shapes))) > 1 or any(
        len(set(sizes) - {1}) > 1 for sizes in zip(*shapes)
    )
    if wrong:
        raise UnsupportedProblem(f"{builder.node}: shapes {shapes} do not spread to one")
    return tuple(max(sizes) for sizes in zip(*shapes))


def _sum_of_all(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    made = operands[0]
    for other in operands[1:]:
        made = combined(builder, "add", [made, other])
    return made


def _cast_why_not(attributes: Attributes) -> str | None:
    dtype = attributes.text("dtype", "None")
    return None if dtype in RESULTS else f"dtype {dtype} is not computed; {', '.join(RESULTS)} are"


def _same(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    return operands[0]


def _cast(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = operands[0]
    if attributes.text("dtype", "") == "float32":
        return builder.dense(x)
    # Computed now: a kernel that converts as it loads does not round.
    return builder.value(builder.pointwise(x.shape, "round_half", builder.chain(x)))


OPERATORS = {
    **{name: _unary(name) for name in _UNARY},
    **{name: _scalar(op) for name, op in _SCALAR.items()},
    **{f"{kind}_{name}": _binary(name) for kind in ("elemwise", "broadcast") for name in _BINARY},
    # MXNet's names for arithmetic operators on symbols.
    **{name: _binary(name[1:].lower()) for name in ("_add", "_sub", "_mul", "_div")},
    **{name: _binary(name[1:].lower()) for name in ("_Mul", "_Div")},
    **dict.fromkeys(("_plus", "_Plus", "broadcast_plus"), _binary("add")),
    **dict.fromkeys(("_minus", "_Minus", "broadcast_minus"), _binary("sub")),
    "Activation": Operator(_activation, among(_ACTIVATIONS, "act_type")),
    "LeakyReLU": Operator(_leaky, among(_LEAKY, "act_type", "leaky")),
    "clip": Operator(_clip),
    "zeros_like": _unary("constant", 0.0),
    "ones_like": _unary("constant", 1.0),
    "hard_sigmoid": Operator(_hard_sigmoid),
    **dict.fromkeys(("add_n", "ElementWiseSum"), Operator(_sum_of_all)),
    **dict.fromkeys(("Cast", "cast"), Operator(_cast, _cast_why_not)),
    **dict.fromkeys(("identity", "_copy", "BlockGrad", "stop_gradient"), Operator(_same)),
    "Dropout": Operator(_same, among(("training",), "mode", "training")),
}
