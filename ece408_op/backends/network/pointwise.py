"""Fusion of pointwise operators into one launch of pointwise.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cuda.kernel_plan import ARCHITECTURES, Code, Launch, Plan, divide_up
from .values import Value

KERNEL = Code("pointwise", "network/pointwise.cu", ARCHITECTURES, "float32", True)
# Limit of pointwise.cu.
MOST_INPUTS = 6
# Longer chains compile slowly without being faster.
_MOST_TERMS = 24
_THREADS = 256
_TYPES = {"float32": "float", "float16": "__half", "uint8": "unsigned char"}


@dataclass(frozen=True, eq=False)
class Term:
    """An elementwise expression: `form` is C, with {0}, {1} ... for the arguments. A leaf has a
    `value` instead, an array viewed as `shape`, with as many axes as the result."""

    form: str
    arguments: tuple[Term, ...] = ()
    value: Value | None = None
    shape: tuple[int, ...] = ()

    def all(self) -> Iterator[Term]:
        """Yield this term and its subterms, arguments first, each once."""
        seen: set[int] = set()

        def walk(term: Term) -> Iterator[Term]:
            if id(term) not in seen:
                seen.add(id(term))
                for argument in term.arguments:
                    yield from walk(argument)
                yield term

        return walk(self)

    def values(self) -> list[Value]:
        """Return the arrays that the term reads, with repetitions."""
        return [term.value for term in self.all() if term.value is not None]

    def fits(self) -> bool:
        """Return whether one launch can compute the term."""
        terms = list(self.all())
        return len(terms) <= _MOST_TERMS and len(self.values()) <= MOST_INPUTS


def leaf(value: Value, shape: tuple[int, ...] | None = None) -> Term:
    """Return an array as a term, viewed as another shape if one is given."""
    return Term("", (), value, value.shape if shape is None else shape)


def number(value: float) -> str:
    """Return a number as a C literal. Negative ones are in parentheses, as C reads `--` as one
    operator."""
    if math.isnan(value):
        return "NAN"
    if math.copysign(1, value) < 0:
        return f"(-{number(-value)})"
    if math.isinf(value):
        return "INFINITY"
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.f"


def statements(term: Term, start: dict[int, str], result: str) -> str:
    """Return C statements that compute the term into `result`; `start` names known terms, by id."""
    names, lines = dict(start), []
    for number_, each in enumerate(term.all()):
        if id(each) in names:
            continue
        names[id(each)] = f"t{number_}"
        text = each.form.format(*(names[id(a)] for a in each.arguments))
        lines.append(f"const float t{number_}={text};")
    return "{" + "".join(lines) + f"{result}={names[id(term)]};" + "}"


@dataclass(frozen=True)
class Reading:
    """How pointwise.cu indexes an input."""

    kind: str
    outer: int = 1
    count: int = 1
    inner: int = 1


def reading(value: Value, shape: tuple[int, ...], of: tuple[int, ...]) -> Reading | None:
    """Return how to read an array, viewed as `shape`, for a result of shape `of`; `None` if
    pointwise.cu has no such indexing."""
    if len(shape) != len(of) or any(a not in (1, b) for a, b in zip(shape, of)):
        raise ValueError(f"{shape} does not spread to {of}")
    total = math.prod(of)
    if math.prod(shape) == total:
        if value.dense:
            return Reading("ALIKE")
        return Reading("IMAGES", value.per_image, 1, value.image)
    if not value.dense:
        return None
    # Runs of adjacent axes: (whether the input has them, their size).
    runs: list[tuple[bool, int]] = []
    for mine, size in zip(shape, of):
        if size == 1:
            continue
        if runs and runs[-1][0] == (mine > 1):
            runs[-1] = (runs[-1][0], runs[-1][1] * size)
        else:
            runs.append((mine > 1, size))
    inner = runs.pop()[1] if not runs[-1][0] else 1
    count = runs.pop()[1] if runs else 1
    spread = runs.pop()[1] if runs else 1
    if len(runs) > 1:
        return None
    return Reading("SHARED", spread * count * inner, count, inner)


def plan(term: Term, shape: tuple[int, ...], out: Value) -> tuple[Plan, dict[str, Value]] | None:
    """Return the launch that computes the term into `out`, its "y", and the arrays that it reads by
    name; `None` if pointwise.cu cannot broadcast an input as needed."""
    leaves = [each for each in term.all() if each.value is not None]
    values = [each.value for each in leaves if each.value is not None]
    readings = [reading(value, each.shape, shape) for value, each in zip(values, leaves)]
    if None in readings:
        return None
    found = [each for each in readings if each is not None]
    vector = 4 if _even(shape, out, values, found) else 1
    total = math.prod(shape)
    defines: list[tuple[str, str | int]] = [("INPUTS", len(values)), ("VECTOR", vector)]
    arguments: list[str | int] = ["y", total]
    arguments += [out.per_image, out.image] if not out.dense else [1, 1]
    if not out.dense:
        defines.append(("KIND_OUT", "IMAGES"))
    for k, (value, each) in enumerate(zip(values, found)):
        kind = each.kind
        if kind == "SHARED" and each.inner % vector == 0:
            kind = "UNIFORM"
        if kind != "ALIKE":
            defines.append((f"KIND{k}", kind))
        if value.dtype != "float32":
            defines.append((f"TYPE{k}", _TYPES[value.dtype]))
        arguments += [f"in{k}", each.outer, each.count, each.inner]
    if out.dtype != "float32":
        defines.append(("TYPE_OUT", _TYPES[out.dtype]))
    names = {id(each): f"v{k}" for k, each in enumerate(leaves)}
    defines.append(("COMPUTE", statements(term, names, "r")))
    if any("__half" in str(text) for _, text in defines):
        defines.append(("HALF", 1))
    blocks = divide_up(total, _THREADS * vector)
    launch = Launch("compute", (blocks, 1, 1), (_THREADS, 1, 1), tuple(arguments))
    read = {f"in{k}": value for k, value in enumerate(values)}
    return Plan(KERNEL, tuple(defines), (launch,)), read


def _even(
    shape: tuple[int, ...], out: Value, values: Sequence[Value], readings: Sequence[Reading]
) -> bool:
    """Return whether groups of four elements are contiguous and aligned."""
    if math.prod(shape) % 4 or out.offset % 16:
        return False
    if not out.dense and (out.per_image % 4 or out.image % 4):
        return False
    for value, each in zip(values, readings):
        if each.kind == "IMAGES" and (each.outer % 4 or each.inner % 4):
            return False
        if each.kind != "SHARED" and value.offset % 16:
            return False
    return True
