"""Parts of a graph: marked in Symbols and their files, and single nodes in the graphs that run.

MXNet's own partitioning is insufficient: it identifies arrays by name, and a block that is called
twice gives the same name to two of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import networks
from ..networks import DATA, FOR_ALL_IMAGES, PARAMETER
from ..parts_at_work import Parts
from . import graph_json, groups
from .graph_json import Entry, Graph, Node

if TYPE_CHECKING:
    from ...network import Typed

# Operators that read only the shapes of these inputs.
_ONLY_SHAPES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("zeros_like", "ones_like", "shape_array", "size_array"), (0,)),
    **dict.fromkeys(("_contrib_MultiBoxPrior", "_contrib_arange_like"), (0,)),
    **dict.fromkeys(("slice_like", "broadcast_like", "reshape_like"), (1,)),
}


def read_outside(graph: Graph, of_nodes: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Return the arrays whose elements are read outside their node's own group."""
    place_of = {number: place for place, group in enumerate(of_nodes) for number in group}
    return {
        (entry[0], entry[1])
        for entry, user, place in groups.uses(graph)
        if place_of.get(entry[0]) != place_of.get(user)
        and place not in _ONLY_SHAPES.get(graph["nodes"][user]["op"] if user >= 0 else "", ())
    }


def of_images(graph: Graph, data: Collection[str]) -> list[bool]:
    """Return for each node whether its outputs depend on the variables of these names."""
    found: list[bool] = []
    for node in graph["nodes"]:
        is_data = node["op"] == "null" and node["name"] in data
        found.append(is_data or any(found[entry[0]] for entry in node["inputs"]))
    return found


def at_work(
    graph: Graph,
    of_nodes: Sequence[Sequence[int]],
    parameters: Collection[tuple[int, int]],
    types: Mapping[tuple[int, int], Typed],
    opened: Parts,
    on: str,
) -> Graph:
    """Return the graph with a node of `ece408_part` `on` a machine per group of its nodes; numbers
    in a group are ascending.

    No path between two nodes of a group may contain a node outside the group. `parameters` are the
    arrays, by node and output, that are the same for all images, and `types` has all arrays outside
    the groups. Raises what `Network` does.
    """
    read = read_outside(graph, of_nodes)

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
        unread = "".join("0" if (e[0], e[1]) in read else networks.UNREAD for e in outputs)
        node = opened.node(inner, known, named, name, on, unread)
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
    return "".join(
        DATA
        if (number, output) not in parameters
        else (PARAMETER if graph["nodes"][number]["op"] == "null" else FOR_ALL_IMAGES)
        for number, output, *_ in inputs
    )


def _new_name(source: Node, output: int, taken: Mapping[str, Any]) -> str:
    base = source["name"] if source["op"] == "null" else f"{source['name']}_output{output}"
    names = itertools.chain([base], (f"{base}_{k}" for k in itertools.count(1)))
    return next(name for name in names if name not in taken)
