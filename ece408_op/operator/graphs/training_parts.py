"""Graphs for training: parts with gradients, one node each, and single convolutions with theirs.

MXNet's own operators take several times as long on arrays in plain layout, as our convolutions
return them, as on oneDNN's blocked ones. So whatever belongs to our convolutions, and has gradients
here, is in parts.

MXNet does not tell a library's operator that a gradient is to be added to an array's contents
(grad_req "add", or a long sum that MXNet accumulates in place); our operators would overwrite them.
So a copy by MXNet's own operator, which does accumulate, is inserted between a variable whose
gradient may be added and our node; a graph with sums of gradients of sufficient length keeps the
Python operator.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import Ece408Error
from .. import compiled_operator, networks, parts_at_work
from ..parts_at_work import Parts
from . import compiled_graphs, graph_json, groups, partition, parts
from .graph_json import Entry, Graph, Node
from .partition import Choice

# Operators that pass on the gradient of their result, the same array, as that of their inputs.
_SUMS = ("elemwise_add", "add_n")
# Suffix of the copies' names.
_SUFFIX = "__ece408_copy"


def compiled(
    symbol: Any,
    graph: Graph,
    arrays: Mapping[str, Any],
    wanted: Collection[str],
    added: Collection[str],
    data: Collection[str] | None = None,
) -> tuple[Any, Parts | None]:
    """Return the graph of `symbol` for training on these arrays by name, as
    `partition.in_parts`, and its parts, if any: on the GPU if the graph has marks.

    `wanted` are the inputs whose gradients are computed, `added` those whose gradients may be
    added. Only for training, with the batch's averages.
    """
    opened, device = None, next(iter(arrays.values())).context.device_id
    if graph_json.is_marked(graph) and networks.may_use_gpu():
        choice = partition.choose_for(symbol, arrays, data, on="gpu", trains=True)
        cut, opened = _cut(choice, wanted, device)
        graph = cut if opened.numbers else graph
    if not (opened and opened.numbers) and partition.can_have_parts(arrays.values()):
        choice = partition.choose_for(symbol, arrays, data, on="cpu", only_ours=True, trains=True)
        graph, opened = _cut(choice, wanted, device)
    if _has_long_sums(graph["nodes"]):
        return None, None
    graph = _with_copies(graph, added, opened)
    shapes = {name: array.shape for name, array in arrays.items()}
    gradients = _gradients(graph["nodes"], wanted)
    return compiled_graphs.compiled(symbol, graph, shapes, gradients), opened


def _cut(choice: Choice, wanted: Collection[str], device: int) -> tuple[Graph, Parts]:
    """Return the graph of a choice with its parts, as far as their gradients can be computed."""
    graph, opened, made = choice.graph, Parts(), dict[int, Node]()
    leads = _leads(graph["nodes"], wanted)
    for group, outputs in zip(choice.groups, groups.outputs(graph, choice.groups)):
        # Otherwise its convolutions have nodes of their own.
        with contextlib.suppress(Ece408Error):
            made[group[0]] = _part(choice, group, outputs, leads, opened, device)
    found = [group for group in choice.groups if group[0] in made]
    return groups.replaced(graph, found, lambda group, _: made[group[0]]), opened


def _part(
    choice: Choice,
    group: Sequence[int],
    outputs: Sequence[Entry],
    leads: Sequence[bool],
    opened: Parts,
    device: int,
) -> Node:
    """Return a node for a group. Raises what `Training` does."""
    inner, taken = parts.inside_of(choice.graph, group, outputs)
    wanted = [name for name, entry in taken.items() if leads[entry[0]]]
    shapes = [choice.known[entry[0], entry[1]][0] for entry in taken.values()]
    name = choice.graph["nodes"][outputs[0][0]]["name"]
    node = opened.training_node(inner, wanted, shapes, name, choice.on, device)
    return {**node, "inputs": [[*entry[:2], 0] for entry in taken.values()]}


def _leads(nodes: Sequence[Node], wanted: Collection[str]) -> list[bool]:
    """Return for each node whether a wanted input changes its results."""
    found: list[bool] = []
    for node in nodes:
        of_inputs = any(found[entry[0]] for entry in node["inputs"])
        found.append(node["name"] in wanted if node["op"] == "null" else of_inputs)
    return found


def _has_long_sums(nodes: Sequence[Node]) -> bool:
    """Return whether a gradient of our nodes may be a term of a sum that MXNet accumulates in
    place."""
    shortest = int(os.environ.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8"))
    uses = Counter((entry[0], entry[1]) for node in nodes for entry in node["inputs"])
    return max(uses.values()) >= shortest


def _with_copies(graph: Graph, added: Collection[str], opened: Parts | None) -> Graph:
    """Return the graph with copies of the `added` variables for our nodes, and for sums whose
    gradients our nodes may compute."""
    nodes: list[Node] = []
    moved: list[int] = []
    copies: dict[int, int] = {}
    for node in graph["nodes"]:
        node = graph_json.inputs_moved(node, moved)
        is_part = node["op"] == parts_at_work.NAME
        if graph_json.is_ours(node) or is_part or node["op"] in _SUMS:
            inputs = [[copies.get(entry[0], entry[0]), *entry[1:]] for entry in node["inputs"]]
            # MXNet's own operator overwrites the gradient of a fixed gamma with zeros, even if it
            # is to be added.
            for place in opened.fixed[node["attrs"]["part"]] if opened and is_part else ():
                inputs[place] = node["inputs"][place]
            node = {**node, "inputs": inputs}
        nodes.append(node)
        moved.append(len(nodes) - 1)
        if node["op"] == "null" and node["name"] in added:
            copies[moved[-1]] = len(nodes)
            name = f"{node['name']}{_SUFFIX}"
            nodes.append({"op": "_copy", "name": name, "inputs": [[moved[-1], 0, 0]]})
    return graph_json.rebuilt(graph, nodes, moved)


def _gradients(nodes: Sequence[Node], wanted: Collection[str]) -> dict[int, str]:
    """Return which gradients our convolutions compute, by number: those on the way to wanted
    ones."""
    leads = _leads(nodes, wanted)
    return {
        number: compiled_operator.gradients([leads[entry[0]] for entry in node["inputs"]])
        for number, node in enumerate(nodes)
        if graph_json.is_ours(node)
    }
