"""Transposes, broadcasts, slices and padding by strided_copy.cu."""

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
    """Return the plan that transposes x; axis i of y is axis `axes[i]` of x."""
    strides = _strides(x.shape)
    return _plan([(x.shape[axis], 0, x.shape[axis], strides[axis]) for axis in axes])


def spread(x: Value, shape: Sequence[int]) -> Plan:
    """Return the plan that broadcasts x to `shape`, which has as many axes."""
    found = zip(shape, x.shape, _strides(x.shape))
    return _plan([(size, 0, size, stride if mine > 1 else 0) for size, mine, stride in found])


def windowed(x: Value, shape: Sequence[int], first: Sequence[int], border: Defines = ()) -> Plan:
    """Return the plan that copies a window: x's first element is at `first` in y, which may be
    negative."""
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
