"""The convolutions this package is made for, by name: what the benchmarks measure.

A name is the course's term and the layer; k7_1 and k7_2 are the default term's layers with a
kernel of 7. Every one has stride 1, no padding and no bias.
"""

from __future__ import annotations

import dataclasses
import math

from ..errors import InvalidProblem
from ..problem import ConvProblem

BATCH = 10000

# channels, height and width, filters, kernel
_SIZES = {
    "fa17_1": (1, 28, 50, 5),
    "sp18_1": (1, 64, 6, 5),
    "sp18_2": (6, 30, 16, 5),
    "sp19_1": (1, 48, 6, 5),
    "sp19_2": (6, 22, 16, 5),
    "fa19_1": (1, 70, 12, 5),
    "fa19_2": (12, 33, 24, 5),
    "k7_1": (1, 72, 12, 7),
    "k7_2": (12, 33, 24, 7),
}
SHAPES: dict[str, ConvProblem] = {
    name: ConvProblem.parse(f"b{BATCH},c{c},h{side},w{side},m{m},k{k}x{k}")
    for name, (c, side, m, k) in _SIZES.items()
}


def find(text: str, batch: int | None = None) -> ConvProblem:
    """The shape of a name in `SHAPES`, or the problem in its one-line form, at another batch.

    Raises `InvalidProblem` for what is neither.
    """
    try:
        problem = SHAPES.get(text) or ConvProblem.parse(text)
    except InvalidProblem as error:
        names = ", ".join(SHAPES)
        raise InvalidProblem(
            f"{text!r} is neither a shape's name ({names}) nor a problem: {error}"
        ) from None
    return problem if batch is None else dataclasses.replace(problem, batch=batch)


def nearest(problem: ConvProblem) -> str:
    """The shape in `SHAPES` that is most like a problem: its name.

    Likeness is in what a kernel's speed depends on: products of a sum, filters, and output pixels
    of an image. The distance is Euclidean in their logarithms.
    """
    return min(SHAPES, key=lambda name: math.dist(_features(SHAPES[name]), _features(problem)))


def _features(problem: ConvProblem) -> list[float]:
    products = problem.channels // problem.groups * problem.kernel[0] * problem.kernel[1]
    pixels = problem.out_height * problem.out_width
    return [math.log(number) for number in (products, problem.filters, pixels)]
