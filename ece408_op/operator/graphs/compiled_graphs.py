"""Graphs with the compiled operator `ece408_convolution` for ours, for the CPU."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ...errors import Ece408Error
from .. import compiled_operator
from ..conv_attributes import ConvAttributes
from ..native_handles import KEEPS, Owner
from . import fusion, graph_json
from .graph_json import Graph, Node

# What has fewer nodes do what the nodes of a graph do, which it may change.
Fuse = Callable[[Graph], Graph]

# Threads that bind one Symbol, or copies of it, or infer its shapes, at the same time corrupt
# MXNet's memory.
ONE_AT_A_TIME = threading.RLock()
# A child has no other threads, and so nobody who would give it back.
os.register_at_fork(
    before=ONE_AT_A_TIME.acquire,
    after_in_parent=ONE_AT_A_TIME.release,
    after_in_child=ONE_AT_A_TIME.release,
)


def failures() -> tuple[type[Exception], ...]:
    """The errors of a graph that cannot be compiled, or whose shapes cannot be inferred.

    After one, the Python operator computes, or raises this package's error.
    """
    from mxnet import MXNetError

    return (Ece408Error, MXNetError, RuntimeError, LookupError, TypeError, ValueError)


def compiled(
    symbol: Any,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    fuse: Fuse | None = None,
    gradients: Mapping[int, str] | None = None,
    owner: Owner | None = None,
) -> Any:
    """The graph of `symbol` as a Symbol with `ece408_convolution` for our operator, or `None`.

    `fuse`, such as `sequences.fused`, also has nodes of ours compute what follows a convolution;
    then arguments may come in another order, and moving averages become arguments. `gradients`
    says by the numbers of our nodes which gradients they compute; all, if it is not given. `owner`,
    from `owner_of_weights`, owns weights that are kept packed: those that are variables.

    `shapes` are those of the symbol's arguments: MXNet does not tell a library's operator unknown
    shapes, so they are written to the weights' nodes. Also `None` if a shape is missing, if two
    inputs have one name, and for control flow, which runs its inner graphs by CachedOps.
    """
    inputs = symbol.list_inputs()
    has_loops = graph_json.has_control_flow(graph)
    if has_loops or compiled_operator.missing() is not None or len(set(inputs)) < len(inputs):
        return None
    ours = [node for node in graph["nodes"] if graph_json.is_ours(node)]
    nodes = list(graph["nodes"])
    for number in {entry[0] for node in ours for entry in node["inputs"][1:]}:
        if nodes[number]["op"] != "null":
            continue
        shape = tuple(shapes.get(nodes[number]["name"], ()))
        if not shape or not all(size > 0 for size in shape):
            return None
        nodes[number] = _with_attribute(nodes[number], "__shape__", str(shape))
    nodes = [
        _compiled_node(node, (gradients or {}).get(number))
        if graph_json.is_ours(node)
        else dict(node)
        for number, node in enumerate(nodes)
    ]
    if owner is not None:
        _keep_weights(graph["nodes"], nodes, owner)
    result = {**graph, "nodes": nodes}
    if fuse is not None:
        result = fuse(result)
    found = graph_json.write(result, symbol)
    taken, outputs = Counter(found.list_inputs()), found.list_outputs()
    return found if taken == Counter(inputs) and outputs == symbol.list_outputs() else None


def owner_of_weights(graph: Graph) -> Owner | None:
    """What owns the packed weights of the graph's convolutions of ours; `None` without the compiled
    operator. Keep it as long as the compiled graph."""
    if compiled_operator.missing() is not None:
        return None
    return Owner("weights", sum(map(graph_json.is_ours, graph["nodes"])))


def _keep_weights(given: Sequence[Node], compiled: Sequence[Node], owner: Owner) -> None:
    ours = (number for number, node in enumerate(given) if graph_json.is_ours(node))
    for name, number in zip(owner.names, ours):
        sources = [entry[0] for entry in given[number]["inputs"][1:]]
        if all(given[each]["op"] == "null" for each in sources):
            compiled[number]["attrs"][KEEPS] = name


def weights(graph: Graph) -> set[str]:
    """Names of the variables that convolutions of ours and dense layers take besides their data."""
    return _parameters(graph, lambda node: graph_json.is_ours(node) or fusion.is_dense(node))


def kept(graph: Graph) -> set[str]:
    """Names of the variables of which nodes may keep something: weights, and what normalisation
    takes."""
    return weights(graph) | _parameters(graph, fusion.is_normalisation)


def _parameters(graph: Graph, takes: Callable[[Node], bool]) -> set[str]:
    nodes = graph["nodes"]
    sources = {entry[0] for node in nodes if takes(node) for entry in node["inputs"][1:]}
    return {nodes[number]["name"] for number in sources if nodes[number]["op"] == "null"}


def _with_attribute(node: Node, key: str, text: str) -> Node:
    return {**node, "attrs": {**node.get("attrs", {}), key: text}}


def _compiled_node(node: Node, gradients: str | None) -> Node:
    layer = ConvAttributes.parse(graph_json.own_attributes(node))
    attributes = compiled_operator.node_attributes(layer)
    if gradients is not None:
        attributes["gradients"] = gradients
    return {**node, "op": compiled_operator.NAME, "attrs": attributes}
