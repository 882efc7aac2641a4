"""Pointwise operators: activations, arithmetic, casts."""

from __future__ import annotations

import math
from dataclasses import replace

from ....errors import UnsupportedProblem
from ..builder import Builder, Convolution, Operand
from ..host_arrays import RESULTS
from ..node_attributes import Attributes
from ..pointwise import leaf, number
from .operator import Operator, channels_of

# As in MXNet, -0 becomes 0 and NaN stays.
RELU = "({0}<=0.f?0.f:{0})"
_UNARY = {
    "relu": RELU,
    "sigmoid": "(1.f/(1.f+expf(-{0})))",
    "tanh": "tanhf({0})",
    "softsign": "({0}/(1.f+fabsf({0})))",
    "exp": "expf({0})",
    "log": "logf({0})",
    "sqrt": "sqrtf({0})",
    "square": "({0}*{0})",
    "abs": "fabsf({0})",
    "negative": "(-{0})",
    "erf": "erff({0})",
}
# As in MXNet's softrelu: for arguments above 20 it equals its argument in float32.
_ACTIVATIONS = {
    **{name: _UNARY[name] for name in ("relu", "sigmoid", "tanh", "softsign")},
    "softrelu": "({0}>20.f?{0}:log1pf(expf({0})))",
}
_BINARY = {"add": "({0}+{1})", "sub": "({0}-{1})", "mul": "({0}*{1})", "div": "({0}/{1})"}
_SCALAR = {
    "_plus_scalar": "({{0}}+{})",
    "_minus_scalar": "({{0}}-{})",
    "_rminus_scalar": "({}-{{0}})",
    "_mul_scalar": "({{0}}*{})",
    "_div_scalar": "({{0}}/{})",
    "_rdiv_scalar": "({}/{{0}})",
    "_maximum_scalar": "({{0}}<={0}?{0}:{{0}})",
    "_minimum_scalar": "({{0}}>={0}?{0}:{{0}})",
    "_power_scalar": "powf({{0}},{})",
}
# Of S. Klambauer and others, Self-Normalizing Neural Networks, 2017.
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_LEAKY = ("leaky", "elu", "selu", "gelu", "prelu", "rrelu")


def _unary(form: str) -> Operator:
    return Operator(lambda builder, attributes, operands: builder.unary(operands[0], form))


def _activation(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    return builder.unary(operands[0], _ACTIVATIONS[attributes.text("act_type", "")])


def _activation_why_not(attributes: Attributes) -> str | None:
    kind = attributes.text("act_type", "None")
    return None if kind in _ACTIVATIONS else f"act_type {kind} is not computed"


def _leaky(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, kind = operands[0], attributes.text("act_type", "leaky")
    slope = attributes.number("slope", 0.25)
    if kind == "prelu":
        gamma = operands[1]
        shape = channels_of(gamma, len(x.shape)) if gamma.shape[0] > 1 else (1,) * len(x.shape)
        terms = builder.chain(x), leaf(builder.value(gamma), shape)
        return builder.pointwise(x.shape, "({0}>0.f?{0}:{0}*{1})", *terms)
    for each in operands[1:]:
        builder.drop(each)
    if kind == "rrelu":
        lower = attributes.number("lower_bound", 0.125)
        upper = attributes.number("upper_bound", 0.334)
        slope = (lower + upper) / 2
    forms = {
        "elu": f"({{0}}>0.f?{{0}}:{number(slope)}*expm1f({{0}}))",
        "selu": f"({number(_SELU_SCALE)}*({{0}}>0.f?{{0}}:{number(_SELU_ALPHA)}*expm1f({{0}})))",
        "gelu": f"(0.5f*{{0}}*(1.f+erff({{0}}*{number(math.sqrt(0.5))})))",
    }
    return builder.unary(x, forms.get(kind, f"({{0}}>0.f?{{0}}:{{0}}*{number(slope)})"))


def _leaky_why_not(attributes: Attributes) -> str | None:
    kind = attributes.text("act_type", "leaky")
    return None if kind in _LEAKY else f"act_type {kind} is not computed"


def _clip(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    least, most = (number(attributes.number(name)) for name in ("a_min", "a_max"))
    # Evaluated in MXNet's order, as the bounds may be swapped.
    form = f"({{0}}>{most}?{most}:{{0}}<{least}?{least}:{{0}})"
    return builder.unary(operands[0], form)


def _hard_sigmoid(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    alpha, beta = (number(attributes.number(*of)) for of in (("alpha", 0.2), ("beta", 0.5)))
    x = builder.unary(operands[0], f"({alpha}*{{0}}+{beta})")
    return builder.unary(x, "({0}<0.f?0.f:{0}>1.f?1.f:{0})")


def _scalar(form: str) -> Operator:
    def lower(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
        return builder.unary(operands[0], form.format(number(attributes.number("scalar"))))

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
            if builder.is_free(second):
                return replace(first, onto=second)
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


def _dropout_why_not(attributes: Attributes) -> str | None:
    mode = attributes.text("mode", "training")
    return None if mode == "training" else f"mode {mode} is not computed"


def _cast(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = operands[0]
    if attributes.text("dtype", "") == "float32":
        return builder.dense(x)
    # Round, and compute now: convolution kernels read no float16.
    form = "__half2float(__float2half_rn({0}))"
    return builder.value(builder.pointwise(x.shape, form, builder.chain(x)))


OPERATORS = {
    **{name: _unary(form) for name, form in _UNARY.items()},
    **{name: _scalar(form) for name, form in _SCALAR.items()},
    **{f"{kind}_{name}": _binary(name) for kind in ("elemwise", "broadcast") for name in _BINARY},
    # MXNet's names for arithmetic operators on symbols.
    **{name: _binary(name[1:].lower()) for name in ("_add", "_sub", "_mul", "_div")},
    **{name: _binary(name[1:].lower()) for name in ("_Mul", "_Div")},
    **dict.fromkeys(("_plus", "_Plus", "broadcast_plus"), _binary("add")),
    **dict.fromkeys(("_minus", "_Minus", "broadcast_minus"), _binary("sub")),
    "Activation": Operator(_activation, _activation_why_not),
    "LeakyReLU": Operator(_leaky, _leaky_why_not),
    "clip": Operator(_clip),
    "zeros_like": _unary("0.f"),
    "ones_like": _unary("1.f"),
    "hard_sigmoid": Operator(_hard_sigmoid),
    "add_n": Operator(_sum_of_all),
    "ElementWiseSum": Operator(_sum_of_all),
    "Cast": Operator(_cast, _cast_why_not),
    "cast": Operator(_cast, _cast_why_not),
    **{name: Operator(_same) for name in ("identity", "_copy", "BlockGrad")},
    "Dropout": Operator(_same, _dropout_why_not),
    "stop_gradient": Operator(_same),
}
