"""Entry of the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

from ...errors import UnsupportedProblem
from ..builder import Builder, Operand
from ..node_attributes import Attributes
from ..values import Value

Lowering = Callable[[Builder, Attributes, list[Operand]], Union[Operand, list[Operand]]]
WhyNot = Callable[[Attributes], Optional[str]]


@dataclass(frozen=True)
class Operator:
    """An MXNet operator. `lower` returns a node's first output, or a list of outputs; `why_not`
    returns why its attributes are unsupported, or `None`."""

    lower: Lowering
    why_not: WhyNot = lambda attributes: None


def without(flag: str) -> WhyNot:
    """Return the function that refuses this flag."""
    return lambda attributes: f"{flag} is not computed" if attributes.flag(flag) else None


def among(values: Sequence[str], name: str, default: str = "None") -> WhyNot:
    """Return the function that refuses other values of the attribute `name`."""

    def why_not(attributes: Attributes) -> str | None:
        value = attributes.text(name, default)
        return None if value in values else f"{name} {value} is not computed"

    return why_not


def axis_of(number: int, axes: int) -> int:
    """Return the number of an axis, counted from the end if negative. Raises `UnsupportedProblem`
    if the array has no such axis."""
    if not -axes <= number < axes:
        raise UnsupportedProblem(f"an array of {axes} axes has no axis {number}")
    return number % axes


def check_planes(node: str, operand: Operand) -> None:
    """Raise `UnsupportedProblem` unless the array has two axes of pixels: images of a chunk may
    have lost some."""
    if len(operand.shape) != 4:
        raise UnsupportedProblem(f"{node}: an array of shape {operand.shape} is not one of planes")


def channels_of(parameter: Operand, axes: int, axis: int = 1) -> tuple[int, ...]:
    """Return the shape that broadcasts a vector along one of `axes` axes."""
    shape = [1] * axes
    shape[axis_of(axis, axes)] = parameter.shape[0]
    return tuple(shape)


def arrays(builder: Builder, operands: Sequence[Operand]) -> list[Value]:
    return [builder.value(each) for each in operands]
