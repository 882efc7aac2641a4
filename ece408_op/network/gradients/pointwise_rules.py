"""Gradients of pointwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..operators.elementwise import SELU_ALPHA, SELU_SCALE
from .tape import Gradient, Of, Rule, Term, Unary


def _bell(x: Term, exponent: float) -> Term:
    """Return exp(exponent * x**2)."""
    return (x.term("square") * exponent).term("exp")


def _gelu(dy: Term, x: Term, y: Term, s: float) -> Term:
    area = ((x * math.sqrt(0.5)).term("erf") + 1) * 0.5
    return dy * (area + x * (_bell(x, -0.5) * (2 * math.pi) ** -0.5))


def _above(dy: Term, x: Term, y: Term, s: float) -> Term:
    return (s - x).where(dy.constant(0), dy)


def _below(dy: Term, x: Term, y: Term, s: float) -> Term:
    return (x - s).where(dy.constant(0), dy)


def _largest(dy: Term, x: Term, y: Term, s: float) -> Term:
    # Unlike `clip`, it has none for NaN.
    return _above((x - s + 1).where(dy), x, y, s)


def _least(dy: Term, x: Term, y: Term, s: float) -> Term:
    return _below((s - x + 1).where(dy), x, y, s)


# The gradient for x from dy, x, y and the operator's scalar or slope.
_FUNCTIONS: dict[str, Unary] = {
    "relu": lambda dy, x, y, s: y.where(dy),
    "sigmoid": lambda dy, x, y, s: dy * y * (1 - y),
    "tanh": lambda dy, x, y, s: dy * (1 - y.term("square")),
    "softsign": lambda dy, x, y, s: dy / (x.term("abs") + 1).term("square"),
    "softrelu": lambda dy, x, y, s: dy * x.term("sigmoid"),
    "exp": lambda dy, x, y, s: dy * y,
    "log": lambda dy, x, y, s: dy / x,
    "sqrt": lambda dy, x, y, s: dy * 0.5 / y,
    "square": lambda dy, x, y, s: dy * x * 2,
    "abs": lambda dy, x, y, s: x.where(dy, (-x).where(-dy)),
    "negative": lambda dy, x, y, s: -dy,
    "erf": lambda dy, x, y, s: dy * (_bell(x, -1) * (2 / math.sqrt(math.pi))),
    "_plus_scalar": lambda dy, x, y, s: dy,
    "_minus_scalar": lambda dy, x, y, s: dy,
    "_rminus_scalar": lambda dy, x, y, s: -dy,
    "_mul_scalar": lambda dy, x, y, s: dy * s,
    "_div_scalar": lambda dy, x, y, s: dy / s,
    "_rdiv_scalar": lambda dy, x, y, s: dy * -s / x.term("square"),
    "_maximum_scalar": _largest,
    "_minimum_scalar": _least,
    "_power_scalar": lambda dy, x, y, s: dy * (x.term("power", p=s - 1) * s),
}
_LEAKY: dict[str, Unary] = {
    "leaky": lambda dy, x, y, s: x.where(dy, dy * s),
    "elu": lambda dy, x, y, s: x.where(dy, dy * (y + s)),
    "selu": lambda dy, x, y, s: x.where(dy * SELU_SCALE, dy * (y + SELU_SCALE * SELU_ALPHA)),
    "gelu": _gelu,
}
_BINARY: dict[str, Callable[[Term, Term, Term], list[Callable[[], Term]]]] = {
    "add": lambda dy, a, b: [lambda: dy, lambda: dy],
    "sub": lambda dy, a, b: [lambda: dy, lambda: -dy],
    "mul": lambda dy, a, b: [lambda: dy * b, lambda: dy * a],
    "div": lambda dy, a, b: [lambda: dy / b, lambda: -(dy * a) / b.term("square")],
}
_BINARY["plus"], _BINARY["minus"] = _BINARY["add"], _BINARY["sub"]


def _unary(function: Unary) -> Rule:
    return lambda of: [lambda: function(of.dy, of.x, of.y, of.read.number("scalar", 0.0))]


def _summed(gradient: Callable[[], Term], x: Term) -> Term:
    return gradient().node("_sum_to", x)


def _binary(name: str, spreads: bool = False) -> Rule:
    """Return the rule for two operands; with `spreads` they are broadcast."""

    def rule(of: Of) -> list[Gradient]:
        found = zip(_BINARY[name](of.dy, *of.inputs), of.inputs)
        return [partial(_summed, each, x) if spreads else each for each, x in found]

    return rule


def _leaky(of: Of) -> list[Gradient]:
    kind, slope = of.read.text("act_type", "leaky"), of.read.number("slope", 0.25)
    dy, x = of.dy, of.x
    if kind == "prelu":
        gamma = of.inputs[1]
        return [
            lambda: x.where(dy, dy * gamma),
            lambda: (-x).where(dy * x).node("_sum_to", gamma, axis=1),
        ]
    return [lambda: _LEAKY[kind](dy, x, of.y, slope)]


def _clip(of: Of) -> list[Gradient]:
    lowest, highest = of.read.number("a_min"), of.read.number("a_max")
    return [lambda: _above(_below(of.dy, of.x, of.y, highest), of.x, of.y, lowest)]


def _hard_sigmoid(of: Of) -> list[Gradient]:
    return [lambda: of.y.where((1 - of.y).where(of.dy * of.read.number("alpha", 0.2)))]


RULES: dict[str, Rule] = {
    **{op: _unary(each) for op, each in _FUNCTIONS.items()},
    **{f"elemwise_{name}": _binary(name) for name in ("add", "sub", "mul", "div")},
    **{f"broadcast_{name}": _binary(name, spreads=True) for name in _BINARY},
    **{f"_{name}": _binary(name) for name in _BINARY},
    **{f"_{name.capitalize()}": _binary(name) for name in ("plus", "minus", "mul", "div")},
    **dict.fromkeys(("add_n", "ElementWiseSum"), lambda of: [lambda: of.dy] * len(of.inputs)),
    **dict.fromkeys(("identity", "_copy", "Cast", "cast", "Dropout"), lambda of: [lambda: of.dy]),
    "Activation": lambda of: _unary(_FUNCTIONS[of.read.text("act_type", "")])(of),
    "LeakyReLU": _leaky,
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
}
