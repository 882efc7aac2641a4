"""Elementwise expressions on arrays, and how arrays are broadcast in them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..errors import UnsupportedProblem
from .values import Value

# Limits of one step on any machine; longer chains compile slowly without being faster.
MOST_INPUTS, MOST_TERMS = 6, 24


@dataclass(eq=False)
class Term:
    """An elementwise expression: an operator by name, its arguments and its constants. The machines
    have the operators' code. A leaf has a `value` instead, an array viewed as `shape`, with as many
    axes as the result. Terms share arguments: nobody may change one."""

    op: str
    arguments: tuple[Term, ...] = ()
    constants: tuple[float, ...] = ()
    value: Value | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Without the term itself: no cycles for the garbage collector.
        self._below: tuple[Term, ...] = ()
        if self.arguments:
            found = {id(each): each for argument in self.arguments for each in argument.all()}
            self._below = tuple(found.values())

    def all(self) -> tuple[Term, ...]:
        """Return the subterms and this term, arguments first, each once."""
        return (*self._below, self)

    def leaves(self) -> list[tuple[Term, Value]]:
        """Return the leaves with their arrays."""
        return [(term, term.value) for term in self.all() if term.value is not None]

    def values(self) -> list[Value]:
        """Return the arrays that the term reads, with repetitions."""
        return [term.value for term in self.all() if term.value is not None]

    def fits(self) -> bool:
        """Return whether one step can compute the term."""
        return len(self._below) < MOST_TERMS and len(self.values()) <= MOST_INPUTS


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


_ALIKE = Reading("ALIKE")


def reading(value: Value, shape: tuple[int, ...], of: tuple[int, ...]) -> Reading | None:
    """Return how to read an array, viewed as `shape`, for a result of shape `of`; `None` if there
    is no such indexing. Raises `UnsupportedProblem` for a shape that does not spread, such as, in a
    chunk, that of a parameter with an element for each image."""
    if value.dense:
        return _ALIKE if shape == of else _of_shapes(shape, of)
    if _of_shapes(shape, of) is _ALIKE:
        return Reading("IMAGES", value.per_image, 1, value.image)
    return None


@functools.lru_cache(maxsize=1024)
def _of_shapes(shape: tuple[int, ...], of: tuple[int, ...]) -> Reading | None:
    """Return `reading` for an array whose images are contiguous."""
    if len(shape) != len(of) or any(a not in (1, b) for a, b in zip(shape, of)):
        raise UnsupportedProblem(f"an array of shape {shape} does not spread to {of}")
    if math.prod(shape) == math.prod(of):
        return _ALIKE
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
