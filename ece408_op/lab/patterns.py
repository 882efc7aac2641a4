"""Description of a wrong output: which elements are wrong, and which common mistake explains
them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..bench import oracle
from ..problem import ConvProblem

_AXES = ("image", "filter", "row", "column")


def describe(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    found: np.ndarray,
    expected: np.ndarray,
    wrong: np.ndarray,
    before: np.ndarray | None,
) -> str:
    """Describe the elements of `found`, of shape (B, M, OH, OW) and initially NaN, at which the
    mask `wrong` is set; `before` is the kernel's previous output, if it was for the same
    problem."""
    for text, explains in _explanations(problem, x, w, found, expected, before):
        if explains:
            return text
    return _where(wrong)


def _explanations(
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    found: np.ndarray,
    expected: np.ndarray,
    before: np.ndarray | None,
) -> Iterator[tuple[str, bool]]:
    """Yield descriptions of mistakes, and whether each explains the output."""
    missing = np.isnan(found) & ~np.isnan(expected)
    yield "nothing is written", bool(missing.all())
    if missing.any():
        yield (
            f"not written: {_where(missing)}",
            bool(np.array_equal(found[~missing], expected[~missing])),
        )
    yield "everything is 0", not found.any()
    if before is not None:
        yield (
            "the result of the call before, not of this one's numbers",
            np.array_equal(found, before),
        )
    known = np.where(missing, expected, found)
    for text, mistaken in _mistakes(problem, x, w):
        yield text, bool(np.allclose(known, mistaken, rtol=1e-5, atol=1e-3, equal_nan=True))


def _mistakes(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield descriptions and outputs of kernels with a common mistake."""
    flipped = np.ascontiguousarray(w[:, :, ::-1, ::-1])
    yield (
        "the kernel is turned round: w[K-1-p][K-1-q] in the place of w[p][q]",
        oracle.forward(problem, x, flipped),
    )
    if problem.kernel[0] == problem.kernel[1]:
        turned = np.ascontiguousarray(w.swapaxes(2, 3))
        yield "rows and columns of w are exchanged", oracle.forward(problem, x, turned)
    if problem.channels > 1:
        for text, channel in (("last", -1), ("first", 0)):
            less = w.copy()
            less[:, channel] = 0
            yield f"the {text} channel is left out", oracle.forward(problem, x, less)
        only = np.zeros_like(w)
        only[:, 0] = w[:, 0]
        yield "only the first channel is added up", oracle.forward(problem, x, only)
    if problem.kernel[0] > 1:
        less = w.copy()
        less[:, :, -1] = 0
        yield "the kernel's last row is left out", oracle.forward(problem, x, less)
        less = w.copy()
        less[..., -1] = 0
        yield "the kernel's last column is left out", oracle.forward(problem, x, less)


def _where(wrong: np.ndarray) -> str:
    """Describe the positions of the elements along the axes that they do not fill."""
    if wrong.all():
        return "everywhere"
    parts = []
    for axis, name in enumerate(_AXES):
        others = tuple(each for each in range(4) if each != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        if len(indices) < wrong.shape[axis]:
            parts.append(_along(name, indices, wrong.shape[axis]))
    whole = np.ix_(*(np.flatnonzero(wrong.any(axis=tuple(set(range(4)) - {a}))) for a in range(4)))
    scattered = not wrong[whole].all()
    if not parts:
        return f"scattered over {np.count_nonzero(wrong) / wrong.size:.1%} of the output"
    return f"{'some' if scattered else 'all'} in {', '.join(parts)}"


def _along(name: str, indices: np.ndarray, size: int) -> str:
    """Describe indices, such as "columns 24 to 27, the last 4 of 28"."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 != len(indices):
        step = np.diff(indices)
        if len(indices) > 2 and (step == step[0]).all():
            return f"every {step[0]}th {name} from {first} on"
        return f"{len(indices)} of {size} {name}s"
    place = ""
    if last == size - 1:
        place = f", the last {len(indices)} of {size}" if len(indices) > 1 else ", the last"
    elif first == 0:
        place = f", the first {len(indices)} of {size}" if len(indices) > 1 else ", the first"
    return (f"{name} {first}" if first == last else f"{name}s {first} to {last}") + place
