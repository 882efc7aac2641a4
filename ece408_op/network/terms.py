"""Elementwise expressions on arrays, and how arrays are broadcast in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UnsupportedProblem
from .values import Value

# Limits of one step on any machine; longer chains compile slowly without being faster.
MOST_INPUTS, MOST_TERMS = 6, 24


@dataclass(frozen=True, eq=False)
class Term:
    """An elementwise expression: an operator by name, its arguments and its constants. The machines
    have the operators' code. A leaf has a `value` instead, an array viewed as `shape`, with as many
    axes as the result."""

    op: str
    arguments: tuple[Term, ...] = ()
    constants: tuple[float, ...] = ()
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

    def leaves(self) -> list[tuple[Term, Value]]:
        """Return the leaves with their arrays."""
        return [(term, term.value) for term in self.all() if term.value is not None]

    def values(self) -> list[Value]:
        """Return the arrays that the term reads, with repetitions."""
        return [value for _, value in self.leaves()]

    def fits(self) -> bool:
        """Return whether one step can compute the term."""
        terms = list(self.all())
        return len(terms) <= MOST_TERMS and len(self.values()) <= MOST_INPUTS


def leaf(value: Value, shape: tuple[int, ...] | None = None) -> Term:
    """Return an array as a term, viewed as another shape if one is given."""
    return Term("", value=value, shape=value.shape if shape is None else shape)


def substituted(term: Term, old: Term, new: Term) -> Term:
    """Return a single-argument term with `old`, where it starts, replaced by `new`."""
    if term is old:
        return new
    arguments = tuple(substituted(each, old, new) for each in term.arguments)
    return Term(term.op, arguments, term.constants)


@dataclass(frozen=True)
class Reading:
    """How a step indexes an input for element i of y. ALIKE: element i. IMAGES: images of `outer`
    elements are `inner` apart. SHARED: element i / outer * count + i / inner % count."""

    kind: str
    outer: int = 1
    count: int = 1
    inner: int = 1


def reading(value: Value, shape: tuple[int, ...], of: tuple[int, ...]) -> Reading | None:
    """Return how to read an array, viewed as `shape`, for a result of shape `of`; `None` if there
    is no such indexing. Raises `UnsupportedProblem` for a shape that does not spread, such as, in a
    chunk, that of a parameter with an element for each image."""
    if len(shape) != len(of) or any(a not in (1, b) for a, b in zip(shape, of)):
        raise UnsupportedProblem(f"an array of shape {shape} does not spread to {of}")
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
