"""What a table of operators has for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

from ....errors import UnsupportedProblem
from ..builder import Builder, Operand
from ..node_attributes import Attributes
from ..values import Value

Lowering = Callable[[Builder, Attributes, list[Operand]], Union[Operand, list[Operand]]]
WhyNot = Callable[[Attributes], Optional[str]]


@dataclass(frozen=True)
class Operator:
    """An operator of MXNet: `lower` gives the first output of a node, or a list of several, and
    `why_not` why nodes with some attributes are not computed, or `None` where they are."""

    lower: Lowering
    why_not: WhyNot = lambda attributes: None


def axis_of(number: int, axes: int) -> int:
    """An axis that may be counted from the end. Raises `UnsupportedProblem` if there is none."""
    if not -axes <= number < axes:
        raise UnsupportedProblem(f"an array of {axes} axes has no axis {number}")
    return number % axes


def channels_of(parameter: Operand, axes: int, axis: int = 1) -> tuple[int, ...]:
    """The shape of a vector as an array of so many axes, along one of them."""
    shape = [1] * axes
    shape[axis] = parameter.shape[0]
    return tuple(shape)


def arrays(builder: Builder, operands: Sequence[Operand]) -> list[Value]:
    return [builder.value(each) for each in operands]
