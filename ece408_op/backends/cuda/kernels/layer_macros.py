"""Macros of a layer, for the sources in kernels/cuda."""

from __future__ import annotations

from ....problem import ConvProblem
from ..kernel_plan import Defines


def sizes(problem: ConvProblem, *names: str) -> Defines:
    """Return the macros for these of the problem's numbers, such as CHANNELS."""
    return tuple((name.upper(), getattr(problem, name)) for name in names)


def output(bias: bool, accumulate: bool) -> Defines:
    """Return the macros of output.cuh that differ from their defaults."""
    return tuple((name, 1) for name, on in (("BIAS", bias), ("ACCUMULATE", accumulate)) if on)


def window(problem: ConvProblem) -> Defines:
    """Return the macros for kernel, strides, padding and dilation, such as KERNEL_H and
    KERNEL_W."""
    return tuple(
        (f"{name.upper()}_{axis}", value)
        for name in ("kernel", "stride", "pad", "dilate")
        for axis, value in zip("HW", getattr(problem, name))
    )
