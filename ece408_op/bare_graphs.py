"""Graphs as MXNet runs them: without the guards of `layout_guard` where none are needed.

What users hold, save and export keeps the guards. An executor needs none: it keeps the plain copy
of a blocked array as long as it lives. Nor does `ece408_forward`, which MXNet hands arrays as it
does to operators of its own. (With the custom operator a CachedOp needs them even with static
memory and static shapes: a convolution of ours before a transposed one was wrong in 11 of 60
nets.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import forward_operator, fusion
from .attributes import ConvAttributes

_OURS = "ece408_conv"
# Attributes that make these operators the identity, as layout_guard uses them.
_GUARDS = {
    "reshape": {"shape": "(-2,)"},
    "clip": {"a_min": "-inf", "a_max": "inf"},
    "_contrib_gradientmultiplier": {"scalar": "1.0"},
}


def has_ours(symbol: Any) -> bool:
    """Whether a symbol has our operator, in a graph that can be rewritten."""
    return bool(_text(symbol))


def bare(symbol: Any) -> Any:
    """The symbol without guards around our operator; itself if there are none to remove.

    Arguments, outputs and their names and order stay. A graph with others inside it, of MXNet's
    control flow, is left as it is: those run in other ways.
    """
    graph = _graph(symbol)
    return symbol if graph is None or not _remove_guards(graph) else _like(symbol, graph)


def compiled(symbol: Any, shapes: Mapping[str, Sequence[int]], fuse: bool = False) -> Any:
    """`bare` with `ece408_forward` for our operator, to be run on the CPU and never back.

    With `fuse` it also does what follows a convolution, see `fusion`; then the order of the
    arguments may be another, and averages that are moved otherwise are arguments.

    `shapes` are those of the symbol's arguments: MXNet does not hand a library's operator what
    it does not know, so they are noted at the weights. `None` where it cannot be: no operator of
    ours, control flow, or an argument without a shape.
    """
    graph = _graph(symbol)
    if graph is None or forward_operator.missing() is not None:
        return None
    _remove_guards(graph)
    for node in filter(_is_ours, graph["nodes"]):
        for entry in node["inputs"][1:]:
            source = graph["nodes"][entry[0]]
            if source["op"] == "null" and not _note_shape(source, shapes):
                return None
        own = {k: v for k, v in node["attrs"].items() if k != "op_type"}
        node["op"] = forward_operator.NAME
        node["attrs"] = forward_operator.node_attributes(ConvAttributes.parse(own))
    if fuse:
        _replace_nodes(graph, fusion.fuse(graph["nodes"], graph["heads"]))
    result = _like(symbol, graph, any_order=fuse)
    return None if result is symbol else result


def weights(symbol: Any) -> set[str]:
    """Names of the variables that a compiled graph's convolutions take besides their data."""
    nodes = json.loads(symbol.tojson())["nodes"]
    ours = [node for node in nodes if node["op"] == forward_operator.NAME]
    sources = {entry[0] for node in ours for entry in node["inputs"][1:]}
    return {nodes[number]["name"] for number in sources if nodes[number]["op"] == "null"}


def _note_shape(variable: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> bool:
    shape = shapes.get(variable["name"], ())
    variable["attrs"] = {**variable.get("attrs", {}), "__shape__": str(tuple(shape))}
    return bool(shape) and all(size > 0 for size in shape)


def _text(symbol: Any) -> str:
    """The JSON of a symbol that has our operator and can be rewritten, of others nothing."""
    from mxnet.symbol import Symbol

    text = symbol.tojson() if type(symbol) is Symbol else ""
    return text if _OURS in text and '"subgraphs"' not in text else ""


def _graph(symbol: Any) -> dict[str, Any] | None:
    text = _text(symbol)
    return json.loads(text) if text else None


def _like(symbol: Any, graph: dict[str, Any], any_order: bool = False) -> Any:
    """The graph as a Symbol, if it takes and gives what `symbol` does; else that."""
    from mxnet.symbol import load_json

    result = load_json(json.dumps(graph))
    taken, expected = result.list_inputs(), symbol.list_inputs()
    same = sorted(taken) == sorted(expected) if any_order else taken == expected
    return result if same and result.list_outputs() == symbol.list_outputs() else symbol


def _remove_guards(graph: dict[str, Any]) -> bool:
    """Take the guards out of a graph's JSON, in place; whether there were any."""
    nodes = graph["nodes"]
    before = {e[0] for node in nodes if _is_ours(node) for e in node["inputs"]}
    stands_for: list[int] = []
    for number, node in enumerate(nodes):
        source = node["inputs"][0][0] if _is_guard(node) else number
        after_ours = source != number and _is_ours(nodes[source])
        if after_ours and nodes[source]["name"] == f"{node['name']}_conv":
            nodes[source]["name"] = node["name"]
        guards = source != number and (number in before or after_ours)
        stands_for.append(stands_for[source] if guards else number)
    return _replace_nodes(graph, stands_for)


def _replace_nodes(graph: dict[str, Any], stands_for: Sequence[int]) -> bool:
    """Put another node's first output in the place of each, in place; whether any went.

    `stands_for[number]` is the node that stays in the place of that one, often the same, and
    comes before everything that uses it.
    """
    nodes = graph["nodes"]
    kept = [number for number, place in enumerate(stands_for) if place == number]
    moved = {number: place for place, number in enumerate(kept)}

    def follow(entry: list[int]) -> list[int]:
        return [moved[stands_for[entry[0]]], *entry[1:]]

    for number in kept:
        nodes[number]["inputs"] = [follow(entry) for entry in nodes[number]["inputs"]]
        if "control_deps" in nodes[number]:
            deps = nodes[number]["control_deps"]
            nodes[number]["control_deps"] = [moved[stands_for[dep]] for dep in deps]
    graph["nodes"] = [nodes[number] for number in kept]
    graph["arg_nodes"] = [i for i, node in enumerate(graph["nodes"]) if node["op"] == "null"]
    graph["heads"] = [follow(head) for head in graph["heads"]]
    graph.pop("node_row_ptr", None)
    return len(kept) < len(nodes)


def _is_ours(node: dict[str, Any]) -> bool:
    return node["op"] == "Custom" and node.get("attrs", {}).get("op_type") == _OURS


def _is_guard(node: dict[str, Any]) -> bool:
    wanted = _GUARDS.get(node["op"].lower())
    attributes = node.get("attrs", {})
    return wanted is not None and all(attributes.get(k) == v for k, v in wanted.items())
