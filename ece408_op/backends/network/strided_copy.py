"""Transposed, repeated, cut and bordered arrays, by strided_copy.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import UnsupportedProblem
from ..cuda.kernel_plan import ARCHITECTURES, Code, Defines, Launch, Plan, divide_up
from .values import Value

KERNEL = Code("strided_copy", "network/strided_copy.cu", ARCHITECTURES, "float32", True)
_MOST_AXES = 6
_THREADS = 256


def transposed(x: Value, axes: Sequence[int]) -> Plan:
    """y, whose axes are these of x."""
    strides = _strides(x.shape)
    return _plan([(x.shape[axis], 0, x.shape[axis], strides[axis]) for axis in axes])


def spread(x: Value, shape: Sequence[int]) -> Plan:
    """y of a shape with as many axes, repeating x along those of which it has one element."""
    found = zip(shape, x.shape, _strides(x.shape))
    return _plan([(size, 0, size, stride if mine > 1 else 0) for size, mine, stride in found])


def windowed(x: Value, shape: Sequence[int], first: Sequence[int], border: Defines = ()) -> Plan:
    """y of a shape, of which the first element of x is at `first`, which may lie before it."""
    found = zip(shape, first, x.shape, _strides(x.shape))
    return _plan(list(found), border)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _plan(axes: Sequence[tuple[int, int, int, int]], border: Defines = ()) -> Plan:
    if len(axes) > _MOST_AXES:
        raise UnsupportedProblem(f"an array of {len(axes)} axes is more than {_MOST_AXES}")
    elements = math.prod(axis[0] for axis in axes)
    padded = [*reversed(axes), *[(1, 0, 1, 0)] * (_MOST_AXES - len(axes))]
    numbers = [number for axis in padded for number in axis]
    blocks = divide_up(elements, _THREADS)
    arguments: tuple[str | int, ...] = ("y", "x", elements, *numbers)
    launch = Launch("strided_copy", (blocks, 1, 1), (_THREADS, 1, 1), arguments)
    return Plan(KERNEL, border, (launch,))
