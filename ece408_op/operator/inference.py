"""Inference of shapes and types of a convolution's arrays from those known."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InvalidProblem, UnsupportedProblem
from ..problem import ITEM_BYTES, ConvProblem
from .conv_attributes import ConvAttributes

UNKNOWN = -1
# MXNet's wheels are built with 32-bit sizes.
_MOST_ELEMENTS = 2**31 - 1
Shape = list[int]


def infer_shapes(
    attributes: ConvAttributes, given: Sequence[Sequence[int]]
) -> tuple[list[Shape], Shape]:
    """Return the shapes of data, weight[, bias] and the output, as far as `given` determines them.

    `given` has one shape per input, empty if unknown; in it, and in the result, an unknown size is
    -1 (0 has the same meaning). The weight's shape follows from the attributes and data's channels,
    and data's channels from the weight's.

    Raises `InvalidProblem` when the shapes contradict each other or the attributes, and
    `UnsupportedProblem` for an output that exceeds MXNet's array sizes.
    """
    x_shape = _sizes("data", given[0], attributes)
    w_shape = _sizes("weight", given[1], attributes)
    if x_shape[1] == UNKNOWN and w_shape[1] != UNKNOWN:
        x_shape[1] = w_shape[1] * attributes.num_group
    problem = _smallest_problem(attributes, x_shape)
    known = [size != UNKNOWN for size in x_shape]
    # The height of 1 of a one-dimensional problem is missing in its arrays' shapes.
    drop = slice(2, 4 - attributes.spatial)
    needed = [
        x_shape,
        _hide(_without(problem.w_shape, drop), [True, known[1], *[True] * attributes.spatial]),
        list(problem.bias_shape),
    ][: len(given)]
    for name, shape, need in zip(("weight", "bias"), given[1:], needed[1:]):
        _check(name, shape, need, x_shape)
    output = _hide(_without(problem.y_shape, drop), [known[0], True, *known[2:]])
    _check_size("output", output)
    return needed, output


def infer_types(names: Sequence[str], given: Sequence[str | None]) -> str | None:
    """Return the common dtype of all arrays, or `None` if no input's is known yet.

    Raises `InvalidProblem` for inputs of different dtypes, or of an unsupported one.
    """
    known = {dtype for dtype in given if dtype is not None}
    if len(known) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, given) if dtype)
        raise InvalidProblem(f"the inputs are of different types ({listed}); cast them to one")
    for dtype in known - ITEM_BYTES.keys():
        raise InvalidProblem(f"dtype {dtype} is not supported; use one of {', '.join(ITEM_BYTES)}")
    return known.pop() if known else None


def infer_storage(names: Sequence[str], given: Sequence[str]) -> None:
    """Raise `UnsupportedProblem` unless all arrays are dense, which MXNet calls `default`."""
    for name, storage in zip(names, given):
        if storage not in ("default", "undefined"):
            raise UnsupportedProblem(
                f"{name} has storage type {storage}; only dense arrays are supported, so convert "
                "it with tostype('default')"
            )


def _sizes(name: str, shape: Sequence[int], attributes: ConvAttributes) -> Shape:
    rank = 2 + attributes.spatial
    if not shape:
        return [UNKNOWN] * rank
    if len(shape) != rank:
        raise InvalidProblem(
            f"{name} has shape {tuple(shape)}; a {attributes.spatial}-D convolution needs {rank} "
            f"dimensions, data being {attributes.layout}"
        )
    return [UNKNOWN if size in (UNKNOWN, 0) else int(size) for size in shape]


def _without(shape: Sequence[int], drop: slice) -> list[int]:
    kept = list(shape)
    del kept[drop]
    return kept


def _check_size(name: str, shape: Shape) -> None:
    if UNKNOWN not in shape and math.prod(shape) > _MOST_ELEMENTS:
        raise UnsupportedProblem(
            f"{name} of shape {tuple(shape)} has {math.prod(shape)} elements, and MXNet's arrays "
            f"end at {_MOST_ELEMENTS}; use a smaller batch"
        )


def _smallest_problem(attributes: ConvAttributes, x_shape: Shape) -> ConvProblem:
    """Return the problem on x, with the smallest possible values for unknown sizes."""
    extents = [d * (k - 1) + 1 for d, k in zip(attributes.dilate, attributes.kernel)]
    stand_ins = (1, attributes.num_group, *extents[2 - attributes.spatial :])
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
