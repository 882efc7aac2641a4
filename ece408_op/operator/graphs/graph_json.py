"""Reader and writer of MXNet's JSON graphs; recognition of our operator.

An edge is an entry (node, output, version): an earlier node's number, and the number of its output.
Nodes of control flow (`foreach`, `while_loop`, `cond`) contain graphs.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

from ..conv_attributes import mxnet_attributes

OP_TYPE = "ece408_conv"
# Attribute of the nodes of a part for our GPU backend, with its number. MXNet ignores it.
MARK = "__ece408_part__"
Node = dict[str, Any]
Entry = list[int]
Graph = dict[str, Any]
# The node with another node's outputs, or an entry per output if several nodes have them.
Place = Union[int, list[Entry]]


def read(symbol: Any) -> Graph | None:
    """Return a Symbol's graph if it has our operator, at any depth, or parts for our GPU backend;
    else `None`, as if MXNet has partitioned it: it writes such nodes but cannot read them again."""
    found = text(symbol)
    if f'"{OP_TYPE}"' not in found and f'"{MARK}"' not in found:
        return None
    graph: Graph = json.loads(found)
    if any(node["op"] == "_CachedOp" for node in graph["nodes"]):
        return None
    return graph if _has_ours(graph) or is_marked(graph) else None


def text(symbol: Any) -> str:
    """Return what `symbol.tojson()` returns, without its memory leak."""
    from mxnet.base import _LIB, SymbolHandle, check_call
    from mxnet.symbol import Symbol

    handle = SymbolHandle()
    check_call(_LIB.MXSymbolRemoveAmpCast(symbol.handle, ctypes.byref(handle)))
    return str(Symbol(handle).tojson(remove_amp_cast=False))


def _has_ours(graph: Graph) -> bool:
    return any(
        is_ours(node) or any(map(_has_ours, node.get("subgraphs", ()))) for node in graph["nodes"]
    )


def is_marked(graph: Graph) -> bool:
    """Return whether the graph has parts for our GPU backend."""
    return any(MARK in node.get("attrs", {}) for node in graph["nodes"])


def with_marks(symbol: Any, parts: Iterable[Iterable[int]]) -> Any:
    """Return the Symbol with marks of these parts, by their nodes' numbers, and no others."""
    part_of = {number: str(part) for part, numbers in enumerate(parts) for number in numbers}
    graph: Graph = json.loads(text(symbol))
    nodes = enumerate(graph["nodes"])
    made = [with_attributes(node, {MARK: part_of.get(number)}) for number, node in nodes]
    return write({**graph, "nodes": made}, symbol)


def unmarked(symbol: Any) -> Any:
    """Return the Symbol without such marks."""
    return with_marks(symbol, ()) if f'"{MARK}"' in text(symbol) else symbol


def with_attributes(node: Node, attributes: Mapping[str, str | None]) -> Node:
    """Return the node with other attributes; those of `None` are omitted."""
    every = {**node.get("attrs", {}), **attributes}
    return {**node, "attrs": {key: text for key, text in every.items() if text is not None}}


def write(graph: Graph, like: Any) -> Any:
    """Return the graph as a Symbol, of MXNet's NumPy interface if `like` is."""
    from mxnet.symbol import load_json
    from mxnet.symbol.numpy import _Symbol

    symbol = load_json(as_text(graph))
    return symbol.as_np_ndarray() if isinstance(like, _Symbol) else symbol


def as_text(graph: Graph) -> str:
    """Return the graph as JSON for MXNet, whose parser does not support the escape `\\u`."""
    return json.dumps(graph, ensure_ascii=False)


def is_ours(node: Node) -> bool:
    return node["op"] == "Custom" and node.get("attrs", {}).get("op_type") == OP_TYPE


def as_ours(node: Node, attributes: Mapping[str, str], **own: str | None) -> Node:
    """Return the node as one of ours, named as the layer; attributes of `None` are omitted."""
    given = {**attributes, "op_type": OP_TYPE, "layer": node["name"], **own}
    attrs = {key: text for key, text in given.items() if text is not None}
    return {**node, "op": "Custom", "attrs": attrs}


def own_attributes(node: Node) -> dict[str, str]:
    """Return the attributes of a node of ours except the operator's name."""
    return {key: text for key, text in node["attrs"].items() if key != "op_type"}


def follow(entry: Entry, moved: Sequence[Place]) -> Entry:
    """Return the entry's new place; `moved[n]` is the place of the outputs of node n."""
    place = moved[entry[0]]
    return [place, *entry[1:]] if isinstance(place, int) else place[entry[1]]


def inputs_moved(node: Node, moved: Sequence[Place]) -> Node:
    """Return the node with its inputs at their new places."""
    node = {**node, "inputs": [follow(entry, moved) for entry in node["inputs"]]}
    if "control_deps" in node:
        node["control_deps"] = [follow([dep, 0], moved)[0] for dep in node["control_deps"]]
    return node


def rebuilt(graph: Graph, nodes: list[Node], moved: Sequence[Place]) -> Graph:
    """Return the graph with other nodes, whose inputs are already updated."""
    result = {
        **graph,
        "nodes": nodes,
        "arg_nodes": [number for number, node in enumerate(nodes) if node["op"] == "null"],
        "heads": [follow(head, moved) for head in graph["heads"]],
    }
    result.pop("node_row_ptr", None)
    return result


def inside(node: Node, change: Callable[[Graph], Graph]) -> Node:
    """Return the node with its inner graphs changed."""
    if "subgraphs" not in node:
        return node
    return {**node, "subgraphs": [change(graph) for graph in node["subgraphs"]]}


def is_control_flow(node: Node) -> bool:
    """Return whether the node is a loop or a choice; other nodes with inner graphs are
    partitions."""
    return node["op"] in ("_foreach", "_while_loop", "_cond")


def has_control_flow(graph: Graph) -> bool:
    return any(is_control_flow(node) for node in graph["nodes"])


def with_native(graph: Graph) -> Graph:
    """Return the graph with MXNet's Convolution for our operator, at any depth; names stay."""

    def native(node: Node) -> Node:
        node = inside(node, with_native)
        if not is_ours(node):
            return node
        return {**node, "op": "Convolution", "attrs": mxnet_attributes(own_attributes(node))}

    return {**graph, "nodes": [native(node) for node in graph["nodes"]]}
