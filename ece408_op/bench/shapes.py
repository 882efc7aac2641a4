"""The convolutions that the benchmarks measure, by name.

A name is the course's term and the layer; k7_1 and k7_2 are the default term's layers with a kernel
of 7. All have stride 1, no padding and no bias. `LATER` are the course's since 2020, used only by
kernel files.
"""

from __future__ import annotations

import dataclasses
import re

from ..errors import InvalidProblem, UnknownModel
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
_LATER_SIZES = {"fa20_1": (1, 86, 4, 7), "fa20_2": (4, 40, 16, 7)}


def _problems(sizes: dict[str, tuple[int, int, int, int]]) -> dict[str, ConvProblem]:
    return {
        name: ConvProblem.parse(f"b{BATCH},c{c},h{side},w{side},m{m},k{k}x{k}")
        for name, (c, side, m, k) in sizes.items()
    }


SHAPES, LATER = _problems(_SIZES), _problems(_LATER_SIZES)
# The layers of term 2019fa are called fa19_1 and so on; k7_1 belongs to no term.
TERMS: dict[str, dict[str, ConvProblem]] = {}
for _name, _problem in {**SHAPES, **LATER}.items():
    if _name[:2] in ("fa", "sp"):
        TERMS.setdefault(f"20{_name[2:4]}{_name[:2]}", {})[_name] = _problem
# The first of the later terms; all have the same layers.
LAST = "2020fa"


def of_term(term: str) -> dict[str, ConvProblem]:
    """Return a term's layers by name. Raises `UnknownModel`."""
    is_later = re.fullmatch(r"20[2-9]\d(fa|sp)", term) and (term[:4], term[4:]) > ("2020", "sp")
    found = TERMS.get(LAST if is_later else term)
    if found is None:
        raise UnknownModel(
            f"unknown term {term!r}; there are: {', '.join(TERMS)} and those after it"
        )
    return found


def called(problem: ConvProblem) -> str:
    """Return the name of a shape, whatever its batch, or another problem's one-line form."""
    at_batch = dataclasses.replace(problem, batch=BATCH)
    named = (name for name, each in {**SHAPES, **LATER}.items() if each == at_batch)
    return next(named, str(problem))


def find(text: str, batch: int | None = None) -> ConvProblem:
    """Return the shape of a name in `SHAPES` or `LATER`, or of a problem in one-line form, with
    this batch.

    Raises `InvalidProblem` for any other text.
    """
    try:
        problem = SHAPES.get(text) or LATER.get(text) or ConvProblem.parse(text)
    except InvalidProblem as error:
        names = ", ".join([*SHAPES, *LATER])
        raise InvalidProblem(
            f"{text!r} is neither a shape's name ({names}) nor a problem: {error}"
        ) from None
    return problem if batch is None else dataclasses.replace(problem, batch=batch)
