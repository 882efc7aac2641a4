"""Graphs without the guards of `layout_guard`, for MXNet's executors, which need none.

An executor keeps the plain copy of a blocked array as long as it lives. There a guard only costs
a pass over its array, so symbols are relieved of them on the way into one; what users hold, save
and export keeps them. (A CachedOp needs them even with static memory and static shapes: without,
a convolution of ours before a transposed one came out wrong in 11 of 60 nets.)
"""

from __future__ import annotations

import functools
import json
from typing import Any

_OURS = "ece408_conv"
# Attributes that make these operators the identity, as layout_guard uses them.
_GUARDS = {
    "reshape": {"shape": "(-2,)"},
    "clip": {"a_min": "-inf", "a_max": "inf"},
    "_contrib_gradientmultiplier": {"scalar": "1.0"},
}


def install(mxnet: Any) -> None:
    """Have MXNet's executors work on bare graphs."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name in ("bind", "simple_bind"):
        setattr(symbol_class, name, _on_bare_symbol(getattr(symbol_class, name)))


def _on_bare_symbol(method: Any) -> Any:
    @functools.wraps(method)
    def on_bare_symbol(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return method(bare(self), *arguments, **keywords)

    return on_bare_symbol


def bare(symbol: Any) -> Any:
    """The symbol without guards around our operator; itself if there are none to remove.

    Arguments, outputs and their names and order stay. A graph with others inside it, of MXNet's
    control flow, is left as it is: those run in other ways.
    """
    text = symbol.tojson()
    if _OURS not in text or '"subgraphs"' in text:
        return symbol
    from mxnet.symbol import Symbol, load_json

    graph = json.loads(text)
    if type(symbol) is not Symbol or not _remove_guards(graph):
        return symbol
    result = load_json(json.dumps(graph))
    same = result.list_inputs() == symbol.list_inputs()
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
