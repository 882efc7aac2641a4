"""Inference of shapes and types of graphs with our operator, as complete as with MXNet's own.

MXNet does not pass a custom operator its output's shape. Its own Convolution also infers inputs
from the output: for example, the batch of a recurrent cell's first state follows from the array
that is added to its convolution. So shapes that our operator leaves unknown are inferred in the
same graph with MXNet's Convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from ..conv_attributes import literal
from . import compiled_graphs, graph_json
from .graph_json import Graph, Node

Shapes = Mapping[str, tuple[int, ...]]


def install(mxnet: Any) -> None:
    """Make `infer_shape` and `infer_type` of Symbols complete what our operator leaves unknown."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name in ("_infer_shape_impl", "_infer_type_impl"):
        setattr(symbol_class, name, _completing(getattr(symbol_class, name)))


def _completing(method: Any) -> Any:
    """Wrap `method`, which returns lists for arguments, outputs and auxiliary states, or `None`
    thrice."""

    @functools.wraps(method)
    def infer(self: Any, partial: bool, *arguments: Any, **keywords: Any) -> Any:
        # MXNet has a single buffer for the shapes that a Python operator returns.
        with compiled_graphs.ONE_AT_A_TIME:
            found = method(self, partial, *arguments, **keywords)
            if all(each is not None and all(map(_is_known, each)) for each in found):
                return found
            graph = graph_json.read(self)
            if graph is None:
                return found
            native = graph_json.write(graph_json.with_native(graph), self)
            other = method(native, partial, *arguments, **keywords)
        if None in (found[0], other[0]):
            return other
        return tuple(list(map(_merged, ours, its)) for ours, its in zip(found, other))

    return infer


def _is_known(found: Any) -> bool:
    """Return whether a type, or a whole shape, is known."""
    return found is not None and (not isinstance(found, tuple) or all(size > 0 for size in found))


def _merged(ours: Any, its: Any) -> Any:
    """Return a type, or the sizes of a shape, as far as one of the two is known."""
    if not ours or not its or not isinstance(ours, tuple):
        return ours or its
    return tuple(a if a > 0 else b for a, b in zip(ours, its))


def argument_shapes(symbol: Any, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arguments that follow from given ones; all, given those of the inputs.

    Raises `MXNetError` or `TypeError` for shapes that contradict each other.
    """
    # Unlike `infer_shape` it prints nothing and does not warn.
    found, _, _ = symbol.infer_shape_partial(**shapes)
    named = zip(symbol.list_arguments(), found)
    return {name: shape for name, shape in named if shape and _is_known(shape)}


def has_open_sources(graph: Graph) -> bool:
    """Return whether a node without inputs, such as zeros, takes its shape from the rest of the
    graph."""
    return any(map(_is_open_source, graph["nodes"]))


def with_known_sources(symbol: Any, graph: Graph, shapes: Shapes) -> Graph:
    """Return the graph of `symbol` with the shapes of such nodes inferred from those of the inputs.

    MXNet infers them when it creates an executor or runs a CachedOp, where our operator cannot
    help.
    """
    nodes = graph["nodes"]
    numbers = [number for number, node in enumerate(nodes) if _is_open_source(node)]
    if not numbers:
        return graph
    native = graph_json.with_native(graph)
    native["heads"] = [*graph["heads"], *([number, 0, 0] for number in numbers)]
    inputs = set(symbol.list_inputs())
    given = {name: shape for name, shape in shapes.items() if name in inputs}
    _, found, _ = graph_json.write(native, symbol).infer_shape_partial(**given)
    known = dict(zip(numbers, found[len(graph["heads"]) :]))
    return {**graph, "nodes": [_of_shape(node, known.get(n)) for n, node in enumerate(nodes)]}


def _is_open_source(node: Node) -> bool:
    shape = node.get("attrs", {}).get("shape")
    if node["op"] == "null" or node["inputs"] or shape is None:
        return False
    return not _is_known(_as_tuple(literal(shape)))


def _as_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _of_shape(node: Node, shape: tuple[int, ...] | None) -> Node:
    if not shape or not _is_known(shape):
        return node
    return {**node, "attrs": {**node["attrs"], "shape": str(tuple(shape))}}
