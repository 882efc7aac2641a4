"""Graphs on the CPU with the compiled operator `ece408_convolution` in place of ours."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import Ece408Error
from .. import compiled_operator, parts_at_work
from ..conv_attributes import ConvAttributes
from . import graph_json
from .graph_json import Graph, Node

# MXNet's memory is corrupted if threads bind one Symbol, or copies of it, or infer its shapes, at
# the same time.
ONE_AT_A_TIME = threading.RLock()
# A forked child has no other threads, so nobody would release it.
os.register_at_fork(
    before=ONE_AT_A_TIME.acquire,
    after_in_parent=ONE_AT_A_TIME.release,
    after_in_child=ONE_AT_A_TIME.release,
)


def failures() -> tuple[type[Exception], ...]:
    """Return the error types of a graph that cannot be compiled, or whose shapes cannot be
    inferred.

    After such an error, the Python operator computes, or raises this package's error.
    """
    from mxnet import MXNetError

    return (Ece408Error, MXNetError, RuntimeError, LookupError, TypeError, ValueError)


def compiled(
    symbol: Any,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    gradients: Mapping[int, str] | None = None,
) -> Any:
    """Return the graph of `symbol` as a Symbol with `ece408_convolution` for our operator, or
    `None`.

    `gradients` maps our nodes' numbers to the gradients that
    they compute (default: all). With nodes of parts, arguments may come in another order, and
    moving averages are arguments.

    `shapes` are those of the symbol's arguments: MXNet does not pass unknown shapes to a library's
    operator, so they are written to the weights' nodes. Also returns `None` if a shape is missing,
    if two inputs have the same name, without nodes of ours, and for control flow, which runs its
    inner graphs by CachedOps.
    """
    inputs = symbol.list_inputs()
    has_loops = graph_json.has_control_flow(graph)
    if has_loops or compiled_operator.missing() is not None or len(set(inputs)) < len(inputs):
        return None
    nodes = list(graph["nodes"])
    ours = [node for node in nodes if graph_json.is_ours(node)]
    if not ours and not any(node["op"] == parts_at_work.NAME for node in nodes):
        return None
    for number in {entry[0] for node in ours for entry in node["inputs"][1:]}:
        if nodes[number]["op"] != "null":
            continue
        shape = tuple(shapes.get(nodes[number]["name"], ()))
        if not shape or not all(size > 0 for size in shape):
            return None
        known = {"__shape__": str(shape)}
        nodes[number] = graph_json.with_attributes(nodes[number], known)
    nodes = [
        _compiled_node(node, (gradients or {}).get(number))
        if graph_json.is_ours(node)
        else dict(node)
        for number, node in enumerate(nodes)
    ]
    found = graph_json.write({**graph, "nodes": nodes}, symbol)
    return found if Counter(found.list_inputs()) == Counter(inputs) else None


def weights(graph: Graph) -> set[str]:
    """Return the variables that are parameters of our convolutions, of dense layers, of
    normalisations, and of marked nodes."""
    nodes = graph["nodes"]
    sources = {entry[0] for node in nodes if _takes(node) for entry in node["inputs"][1:]}
    return {nodes[number]["name"] for number in sources if nodes[number]["op"] == "null"}


def _takes(node: Node) -> bool:
    is_marked = graph_json.MARK in node.get("attrs", {})
    return is_marked or graph_json.is_ours(node) or node["op"] in ("FullyConnected", "BatchNorm")


def _compiled_node(node: Node, gradients: str | None) -> Node:
    layer = ConvAttributes.parse(graph_json.own_attributes(node))
    attributes = compiled_operator.node_attributes(layer)
    if gradients is not None:
        attributes["gradients"] = gradients
    return {**node, "op": compiled_operator.NAME, "attrs": attributes}
