"""Shapes and types of a convolution's arrays, inferred from what is known of the others."""

from __future__ import annotations

from collections.abc import Sequence

from .attributes import ConvAttributes
from .errors import InvalidProblem
from .problem import ConvProblem

UNKNOWN = -1
Shape = list[int]


def infer_shapes(
    attributes: ConvAttributes, given: Sequence[Sequence[int]]
) -> tuple[list[Shape], Shape]:
    """Shapes of data, weight[, bias], and of the output, as far as they follow from `given`.

    `given` has one shape for each input, empty if nothing is known; in it, and in what is
    returned, a size that is not known is -1 (0 is read as the same). The weight's shape follows
    from the attributes and data's channels, and data's channels from the weight's.

    Raises `InvalidProblem` when the shapes contradict each other or the attributes.
    """
    x_shape = _rank4("data", given[0])
    w_shape = _rank4("weight", given[1])
    if x_shape[1] == UNKNOWN and w_shape[1] != UNKNOWN:
        x_shape[1] = w_shape[1] * attributes.num_group
    problem = _smallest_problem(attributes, x_shape)
    batch, channels, height, width = (size != UNKNOWN for size in x_shape)
    needed = [
        x_shape,
        _hide(problem.w_shape, (True, channels, True, True)),
        list(problem.bias_shape),
    ][: len(given)]
    for name, shape, need in zip(("weight", "bias"), given[1:], needed[1:]):
        _check(name, shape, need, x_shape)
    output = _hide(problem.y_shape, (batch, True, height, width))
    if not given[0] and not channels:
        needed[0] = []
    return needed, output


def infer_types(names: Sequence[str], given: Sequence[str | None]) -> str | None:
    """The one dtype that all arrays share, or `None` if no input's is known yet.

    Raises `InvalidProblem` when inputs of different dtypes are given.
    """
    known = {dtype for dtype in given if dtype is not None}
    if len(known) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, given) if dtype)
        raise InvalidProblem(f"the inputs are of different types ({listed}); cast them to one")
    return known.pop() if known else None


def _rank4(name: str, shape: Sequence[int]) -> Shape:
    if not shape:
        return [UNKNOWN] * 4
    if len(shape) != 4:
        raise InvalidProblem(
            f"{name} has shape {tuple(shape)}; a 2-D convolution needs 4 dimensions, NCHW"
        )
    return [UNKNOWN if size in (UNKNOWN, 0) else int(size) for size in shape]


def _smallest_problem(attributes: ConvAttributes, x_shape: Shape) -> ConvProblem:
    """The problem on x, the smallest sizes that fit standing in for those that are unknown."""
    extents = [d * (k - 1) + 1 for d, k in zip(attributes.dilate, attributes.kernel)]
    stand_ins = (1, attributes.num_group, *extents)
    return attributes.problem(
        [smallest if size == UNKNOWN else size for size, smallest in zip(x_shape, stand_ins)],
        "float32",
    )


def _hide(shape: Sequence[int], known: Sequence[bool]) -> Shape:
    return [size if is_known else UNKNOWN for size, is_known in zip(shape, known)]


def _check(name: str, shape: Sequence[int], need: Shape, x_shape: Shape) -> None:
    fits = len(shape) == len(need) and all(
        UNKNOWN in (size, wanted) or size in (0, wanted) for size, wanted in zip(shape, need)
    )
    if shape and not fits:
        raise InvalidProblem(
            f"{name} has shape {tuple(shape)}, but data of shape {tuple(x_shape)} and these "
            f"attributes need {tuple(need)}"
        )
