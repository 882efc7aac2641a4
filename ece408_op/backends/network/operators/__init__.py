"""The operators of MXNet that are computed on the GPU: how each becomes steps."""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import Ece408Error, UnsupportedProblem
from .. import gather, pointwise
from ..attributes import Attributes
from ..builder import Builder, Operand
from ..graph import Node
from . import convolutions, elementwise, pooling, rows, shapes
from .operator import Operator

_FAMILIES = (convolutions, elementwise, pooling, rows, shapes)
OPERATORS: dict[str, Operator] = {
    name: operator for family in _FAMILIES for name, operator in family.OPERATORS.items()
}
# What computes them besides convolutions' kernels.
CODES = (
    *(pointwise.KERNEL, gather.KERNEL, shapes.RESIZE),
    *(pooling.WINDOWS, pooling.ROWS, rows.SOFTMAX, rows.LRN),
)
# How operators written in Python appear in graphs, and what they do not tell the operator.
_CUSTOM = "Custom"


def why_not(op: str, attributes: Mapping[str, str]) -> str | None:
    """Why a node of MXNet's operator `op` is not computed here, or `None` if it is."""
    name = _name(op, attributes)
    if name not in OPERATORS:
        return f"operator {name} is not computed on the GPU"
    try:
        return OPERATORS[name].why_not(Attributes(name, attributes))
    except Ece408Error as error:
        return str(error)


def lower(builder: Builder, node: Node, operands: list[Operand]) -> list[Operand]:
    """The results of a node. Raises `UnsupportedProblem` and `InvalidProblem`."""
    reason = why_not(node.op, node.attributes)
    if reason is not None:
        raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")
    name = _name(node.op, node.attributes)
    found = OPERATORS[name].lower(builder, Attributes(name, node.attributes), operands)
    return found if isinstance(found, list) else [found]


def _name(op: str, attributes: Mapping[str, str]) -> str:
    return str(attributes.get("op_type", op)) if op == _CUSTOM else op
