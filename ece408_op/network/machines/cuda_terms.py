"""Elementwise expressions in CUDA."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..terms import Term

# {0}, {1} ...: the arguments; {p} and {q}: the constants, as literals of floats; {wide}: the first
# constant as a literal of a double. In MXNet's relu -0 becomes 0 and NaN stays; above 20 its
# softrelu is its argument; the bounds of its clip may be swapped.
_FORMS = {
    "relu": "({0}<=0.f?0.f:{0})",
    "sigmoid": "(1.f/(1.f+expf(-{0})))",
    "tanh": "tanhf({0})",
    "softsign": "({0}/(1.f+fabsf({0})))",
    "softrelu": "({0}>20.f?{0}:log1pf(expf({0})))",
    "exp": "expf({0})",
    "log": "logf({0})",
    "sqrt": "sqrtf({0})",
    "square": "({0}*{0})",
    "abs": "fabsf({0})",
    "negative": "(-{0})",
    "erf": "erff({0})",
    "elu": "({0}>0.f?{0}:{p}*expm1f({0}))",
    "selu": "({p}*({0}>0.f?{0}:{q}*expm1f({0})))",
    "gelu": "(0.5f*{0}*(1.f+erff({0}*{p})))",
    "leaky": "({0}>0.f?{0}:{0}*{p})",
    "prelu": "({0}>0.f?{0}:{0}*{1})",
    "clip": "({0}>{q}?{q}:{0}<{p}?{p}:{0})",
    "affine": "({p}*{0}+{q})",
    "constant": "{p}",
    "round_half": "__half2float(__float2half_rn({0}))",
    "add": "({0}+{1})",
    "subtract": "({0}-{1})",
    "multiply": "({0}*{1})",
    "divide": "({0}/{1})",
    "plus": "({0}+{p})",
    "minus": "({0}-{p})",
    "minus_from": "({p}-{0})",
    "times": "({0}*{p})",
    "over": "({0}/{p})",
    "over_from": "({p}/{0})",
    "maximum": "({0}<={p}?{p}:{0})",
    "minimum": "({0}>={p}?{p}:{0})",
    "power": "powf({0},{p})",
    "inverse_deviation": "float(1./sqrt(double({0})+{wide}))",
    "scaled_deviation": "float(double({1})/sqrt(double({0})+{wide}))",
    "multiply_add": "fmaf({0},{1},{2})",
    "subtract_product": "({0}-{1}*{2})",
    "shifted": "({0}+({3}-{1})*{2})",
    "where": "({0}>0.f?{1}:{2})",
}


def literal(value: float) -> str:
    """Return a float's literal. Negative ones are in parentheses, as C reads `--` as one
    operator."""
    if math.isnan(value):
        return "NAN"
    if math.copysign(1, value) < 0:
        return f"(-{literal(-value)})"
    if math.isinf(value):
        return "INFINITY"
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.f"


def statements(term: Term, start: Mapping[int, str], result: str) -> str:
    """Return statements that compute the term into `result`; `start` names known terms, by id."""
    names, lines = dict(start), []
    for number, each in enumerate(term.all()):
        if id(each) in names:
            continue
        names[id(each)] = f"t{number}"
        given = dict(zip("pq", map(literal, each.constants)))
        if each.constants:
            given["wide"] = repr(each.constants[0])
        text = _FORMS[each.op].format(*(names[id(a)] for a in each.arguments), **given)
        lines.append(f"const float t{number}={text};")
    return "{" + "".join(lines) + f"{result}={names[id(term)]};" + "}"
