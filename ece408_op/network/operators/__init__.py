"""MXNet operators computed on the GPU, and their lowering to steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Optional

from ...errors import Ece408Error, UnsupportedProblem
from ..builder import Builder, Operand
from ..graph import Node
from ..host_arrays import ITEM_BYTES, RESULTS
from ..machines.gpu_steps import GpuSteps
from ..node_attributes import Attributes
from ..values import INPUT, Buffer, Value
from . import convolutions, elementwise, pooling, reshaping, rows
from .operator import Operator

_FAMILIES = (convolutions, elementwise, pooling, rows, reshaping)
OPERATORS: dict[str, Operator] = {
    name: operator for family in _FAMILIES for name, operator in family.OPERATORS.items()
}
# An array's shape, and its type if known.
Typed = tuple[tuple[int, ...], Optional[str]]


class _AnyGpu:
    """The least capable GPU; operators require no more of one."""

    name = "any GPU"
    capability = (7, 5)
    driver = 13000


_ANY_GPU = GpuSteps(_AnyGpu(), "float32")


def why_not(op: str, attributes: Mapping[str, str]) -> str | None:
    """Return why MXNet's operator `op` is unsupported with these attributes, or `None` if not."""
    return _why_not(Node(op, op, attributes, ()).read)


def _why_not(attributes: Attributes) -> str | None:
    if attributes.op not in OPERATORS:
        return f"operator {attributes.op} is not computed"
    try:
        return OPERATORS[attributes.op].why_not(attributes)
    except Ece408Error as error:
        return str(error)


@functools.lru_cache(maxsize=4096)
def refused(node: Node, given: tuple[Typed, ...], results: tuple[Typed, ...]) -> str | None:
    """Return why a node cannot be computed on arrays of these shapes and types, or would return
    others than MXNet states in `results`; `None` if it can."""
    converts = node.op in ("Cast", "cast")
    for number, (_, dtype) in enumerate((*given, *results)):
        taken = converts and number < len(given)
        if dtype is not None and dtype not in (ITEM_BYTES if taken else RESULTS):
            return f"arrays of {dtype} are not computed"
    builder = Builder(_ANY_GPU, 0)
    operands: list[Operand] = []
    for number, (shape, dtype) in enumerate(given):
        nbytes = ITEM_BYTES[dtype or "float32"] * math.prod(shape)
        value = Value(Buffer(INPUT, nbytes, number), shape, dtype=dtype or "float32")
        operands.append(builder.given(value))
    try:
        found = [builder.value(each) for each in lower(builder, node, operands)]
    except Ece408Error as error:
        return str(error)
    for number, (shape, _) in enumerate(results):
        if number >= len(found):
            return f"output {number} is not computed"
        if shape and found[number].shape != shape:
            return f"output {number} would have shape {found[number].shape}, not {shape}"
    return None


def lower(builder: Builder, node: Node, operands: list[Operand]) -> list[Operand]:
    """Lower a node and return its results. Raises `UnsupportedProblem` and `InvalidProblem`."""
    attributes = node.read
    reason = attributes.once(_why_not)
    if reason is not None:
        raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")
    found = OPERATORS[attributes.op].lower(builder, attributes, operands)
    return found if isinstance(found, list) else [found]
