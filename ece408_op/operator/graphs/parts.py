"""Extraction of parts of a graph into single nodes, and their reinsertion.

MXNet's own partitioning is insufficient: it identifies arrays by name, and a block that is called
twice gives the same name to two of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import networks
from ..networks import DATA, FOR_ALL_IMAGES, PARAMETER
from ..parts_at_work import Parts
from . import graph_json, groups
from .graph_json import PART, Entry, Graph, Node, is_part

if TYPE_CHECKING:
    from ...network import Typed

# Attributes of such a node: the kinds of its inputs, and its unused outputs (see `networks`).
PARAMETERS = "parameters"
UNREAD = "unread"
# Operators that read only the shapes of these inputs.
_ONLY_SHAPES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("zeros_like", "ones_like", "shape_array", "size_array"), (0,)),
    **dict.fromkeys(("_contrib_MultiBoxPrior", "_contrib_arange_like"), (0,)),
    **dict.fromkeys(("slice_like", "broadcast_like", "reshape_like"), (1,)),
}


def read(symbol: Any) -> Graph | None:
    """Return the graph of a Symbol that has such nodes, else `None`."""
    text = graph_json.text(symbol)
    if f'"{PART}"' not in text:
        return None
    graph: Graph = json.loads(text)
    return graph if any(map(is_part, graph["nodes"])) else None


def put_back_symbol(symbol: Any) -> Any:
    """Return the Symbol without such nodes."""
    graph = read(symbol)
    return symbol if graph is None else graph_json.write(put_back(graph), symbol)


def moved_into_parts(
    graph: Graph, of_nodes: Sequence[Sequence[int]], parameters: Collection[tuple[int, int]]
) -> Graph:
    """Return the graph with one node per group of its nodes; numbers in a group are ascending.

    No path between two nodes of a group may contain a node outside the group. `parameters` are the
    arrays, by node and output, that are the same for all images.
    """
    count = itertools.count()
    read = _read_outside(graph, of_nodes)

    def made(group: Sequence[int], outputs: Sequence[Entry]) -> Node:
        node = _part(graph, group, outputs, parameters, _name(graph, outputs, next(count)))
        return {**node, "attrs": {**node["attrs"], UNREAD: _unread(outputs, read)}}

    return groups.replaced(graph, of_nodes, made)


def _read_outside(graph: Graph, of_nodes: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Return the arrays whose elements are read outside their node's own group."""
    place_of = {number: place for place, group in enumerate(of_nodes) for number in group}
    return {
        (entry[0], entry[1])
        for entry, user, place in groups.uses(graph)
        if place_of.get(entry[0]) != place_of.get(user)
        and place not in _ONLY_SHAPES.get(graph["nodes"][user]["op"] if user >= 0 else "", ())
    }


def _unread(outputs: Sequence[Entry], read: Collection[tuple[int, int]]) -> str:
    """Return the marks of a part's outputs."""
    return "".join("0" if (e[0], e[1]) in read else networks.UNREAD for e in outputs)


def of_images(graph: Graph, data: Collection[str]) -> list[bool]:
    """Return for each node whether its outputs depend on the variables of these names."""
    found: list[bool] = []
    for node in graph["nodes"]:
        is_data = node["op"] == "null" and node["name"] in data
        found.append(is_data or any(found[entry[0]] for entry in node["inputs"]))
    return found


def put_back(graph: Graph) -> Graph:
    """Return the graph with the contents of such nodes in their place."""
    every: dict[int, Node] = {}
    # The places of the outputs of replaced nodes.
    moved: dict[int, list[Entry]] = {}
    free = len(graph["nodes"])
    for number, node in enumerate(graph["nodes"]):
        inputs = [_follow(entry, moved) for entry in node["inputs"]]
        if not is_part(node):
            every[number] = {**node, "inputs": inputs}
            continue
        inner = node["subgraphs"][0]
        sources = iter(inputs)
        places: list[Entry] = []
        for each in inner["nodes"]:
            if each["op"] == "null":
                places.append(next(sources))
                continue
            entries = [_inside(entry, inner, places) for entry in each["inputs"]]
            every[free] = {**each, "inputs": entries}
            places.append([free, 0, 0])
            free += 1
        moved[number] = [_inside(head, inner, places) for head in inner["heads"]]
    heads = [_follow(head, moved) for head in graph["heads"]]
    return groups.in_order({**graph, "heads": heads}, every)


def _follow(entry: Entry, moved: Mapping[int, list[Entry]]) -> Entry:
    return moved[entry[0]][entry[1]] if entry[0] in moved else entry


def _inside(entry: Entry, inner: Graph, places: Sequence[Entry]) -> Entry:
    place = places[entry[0]]
    return place if inner["nodes"][entry[0]]["op"] == "null" else [place[0], *entry[1:]]


def _name(graph: Graph, outputs: Sequence[Entry], part: int) -> str:
    """Keep the name of a single output."""
    return graph["nodes"][outputs[0][0]]["name"] if len(outputs) == 1 else f"{PART}{part}"


def _part(
    graph: Graph,
    group: Sequence[int],
    heads: Sequence[Entry],
    parameters: Collection[tuple[int, int]],
    name: str,
) -> Node:
    """Return a node that contains the nodes of a group; its inputs are entries of the graph."""
    from mxnet.symbol import load_json

    inner, taken = inside_of(graph, group, heads)
    # Its inputs are in MXNet's order of traversal.
    symbol = load_json(graph_json.as_text(inner))
    inputs = [taken[each] for each in symbol.list_inputs()]
    return {
        "op": PART,
        "name": name,
        "attrs": {PARAMETERS: kinds(graph, inputs, parameters)},
        "inputs": [[*entry[:2], 0] for entry in inputs],
        "subgraphs": [json.loads(graph_json.text(symbol))],
    }


def at_work(
    graph: Graph,
    of_nodes: Sequence[Sequence[int]],
    parameters: Collection[tuple[int, int]],
    types: Mapping[tuple[int, int], Typed],
    opened: Parts,
    on: str,
) -> Graph:
    """Return the graph with a node of `ece408_part` `on` a machine per group of its nodes, as
    `moved_into_parts`. `types` has all arrays outside the groups. Raises what `Network` does."""
    read = _read_outside(graph, of_nodes)

    def made(group: Sequence[int], outputs: Sequence[Entry]) -> Node:
        inner, taken = inside_of(graph, group, outputs)
        inputs = [[*entry[:2], 0] for entry in taken.values()]
        of_inputs = [types[entry[0], entry[1]] for entry in inputs]
        each = [dtype for _, dtype in (*of_inputs, *(types[e[0], e[1]] for e in outputs))]
        known = kinds(graph, inputs, parameters)
        if on == "gpu":
            known = networks.known_kinds(known, [shape for shape, _ in of_inputs])
        name = graph["nodes"][outputs[0][0]]["name"]
        named = [dtype or "float32" for dtype in each]
        node = opened.node(inner, known, named, name, on, _unread(outputs, read))
        return {**node, "inputs": inputs}

    return groups.replaced(graph, of_nodes, made)


def inside_of(
    graph: Graph, group: Sequence[int], heads: Sequence[Entry]
) -> tuple[Graph, dict[str, Entry]]:
    """Return a graph of the nodes of a group, and the entries that are its inputs, by name."""
    own = set(group)
    taken: dict[str, Entry] = {}
    inner: list[Node] = []
    places: dict[tuple[int, int], int] = {}

    def inside(entry: Entry) -> Entry:
        key = (entry[0], 0 if entry[0] in own else entry[1])
        if key not in places:
            source = graph["nodes"][entry[0]]
            unique = _new_name(source, entry[1], taken)
            taken[unique] = entry
            places[key] = add({"op": "null", "name": unique, "inputs": []})
        return [places[key], entry[1] if entry[0] in own else 0, 0]

    def add(node: Node) -> int:
        inner.append(node)
        return len(inner) - 1

    for number in group:
        node = graph["nodes"][number]
        entries = [inside(entry) for entry in node["inputs"]]
        places[number, 0] = add({**node, "inputs": entries})
    held = graph_json.rebuilt({**graph, "heads": []}, inner, [])
    held["heads"] = [inside(list(head)) for head in heads]
    return held, taken


def kinds(graph: Graph, inputs: Sequence[Entry], parameters: Collection[tuple[int, int]]) -> str:
    """Return the kinds of a part's inputs."""
    return "".join(_kind(graph, each, (each[0], each[1]) in parameters) for each in inputs)


def _kind(graph: Graph, entry: Entry, is_for_all: bool) -> str:
    """Return the kind of a part's input."""
    if not is_for_all:
        return DATA
    return PARAMETER if graph["nodes"][entry[0]]["op"] == "null" else FOR_ALL_IMAGES


def _new_name(source: Node, output: int, taken: Mapping[str, Any]) -> str:
    base = source["name"] if source["op"] == "null" else f"{source['name']}_output{output}"
    names = itertools.chain([base], (f"{base}_{k}" for k in itertools.count(1)))
    return next(name for name in names if name not in taken)
