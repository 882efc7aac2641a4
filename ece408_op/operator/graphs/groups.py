"""Grouping of a graph's nodes, and replacement of each group by one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter

from . import graph_json
from .graph_json import Entry, Graph, Node

# Makes a group's node from its nodes' numbers in ascending order, and the entries that it outputs.
Make = Callable[[Sequence[int], Sequence[Entry]], Node]


def by_level(graph: Graph, goes: Sequence[bool]) -> list[list[int]]:
    """Return the selected nodes' numbers in the smallest number of groups that can each be one
    node."""
    found: dict[int, list[int]] = {}
    for number, level in enumerate(_levels(graph, goes)):
        if goes[number]:
            found.setdefault(level, []).append(number)
    return list(found.values())


def _levels(graph: Graph, goes: Sequence[bool]) -> list[int]:
    """Return a level per node, so that all selected nodes of one level can be one node.

    No path between them contains an unselected node. Paths have as few levels as possible, and a
    node prefers its users' level to an earlier one. Variables have level 0 and are in no group.
    """
    nodes = graph["nodes"]

    def is_variable(number: int) -> bool:
        return bool(nodes[number]["op"] == "null")

    found = [0] * len(nodes)
    for number, node in enumerate(nodes):
        for source, *_ in node["inputs"]:
            if not is_variable(source):
                step = int(goes[source] != goes[number])
                found[number] = max(found[number], found[source] + step)
    latest: dict[int, int] = {}
    for number in reversed(range(len(nodes))):
        if goes[number]:
            found[number] = max(found[number], latest.get(number, found[number]))
        for source, *_ in nodes[number]["inputs"]:
            last = found[number] - int(goes[source] != goes[number])
            latest[source] = min(latest.get(source, last), last)
    return found


def replaced(graph: Graph, groups: Sequence[Sequence[int]], make: Make) -> Graph:
    """Return the graph with one node per group; numbers in a group are ascending.

    No path between two nodes of a group may contain a node outside the group.
    """
    nodes = graph["nodes"]
    group_of = {number: place for place, group in enumerate(groups) for number in group}
    given = outputs(graph, groups)
    made = [make(group, given_out) for group, given_out in zip(groups, given)]
    # Nodes by their old numbers, and groups by numbers from `first` on.
    first = len(nodes)

    def moved(entry: Entry) -> Entry:
        place = group_of.get(entry[0])
        return entry if place is None else [first + place, given[place].index(entry[:2]), 0]

    every = {number: node for number, node in enumerate(nodes) if number not in group_of}
    every.update((first + place, node) for place, node in enumerate(made))
    every = {
        number: {**node, "inputs": [moved(entry) for entry in node["inputs"]]}
        for number, node in every.items()
    }
    heads = [moved(head) for head in graph["heads"]]
    sources = {number: [e[0] for e in node["inputs"]] for number, node in every.items()}
    order = list(TopologicalSorter(sources).static_order())
    places = [-1] * (first + len(made))
    for place, number in enumerate(order):
        places[number] = place
    inner = [graph_json.inputs_moved(every[number], places) for number in order]
    return graph_json.rebuilt({**graph, "heads": heads}, inner, places)


def outputs(graph: Graph, groups: Sequence[Sequence[int]]) -> list[list[Entry]]:
    """Return for each group the arrays that are used outside it, once each."""
    group_of = {number: place for place, group in enumerate(groups) for number in group}
    found: list[dict[tuple[int, int], None]] = [{} for _ in groups]
    for entry, user, _ in uses(graph):
        place = group_of.get(entry[0])
        if place is not None and place != group_of.get(user):
            found[place][entry[0], entry[1]] = None
    return [[list(entry) for entry in entries] for entries in found]


def uses(graph: Graph) -> Iterator[tuple[Entry, int, int]]:
    """Yield every use of an array: the entry, the node that uses it (-1: a graph output), and its
    position among that node's inputs."""
    for number, node in enumerate(graph["nodes"]):
        yield from ((entry, number, place) for place, entry in enumerate(node["inputs"]))
    yield from ((head, -1, place) for place, head in enumerate(graph["heads"]))
