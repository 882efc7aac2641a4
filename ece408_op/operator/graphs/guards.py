"""Guards against MXNet passing our operator memory that it has already freed.

On the CPU, oneDNN's operators leave their results, and weights they have used, in blocked layouts.
MXNet 1.9 gives a custom operator a temporary plain copy of such an array and frees the copy before
the operator, on a thread of its own, reads it: silent wrong results, in the forward pass through
data and weight, in the backward pass through the gradient of the output. Imperative code and a
CachedOp do it, even a static one; an executor does not.

Guards are MXNet operators that return their input and compute on plain arrays, so they convert what
they read. Users' graphs have none: they are inserted around our operator when a CachedOp is created
(see `cached_ops`), and in calls on NDArrays (see `convolution`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import variables
from . import graph_json
from .graph_json import Entry, Graph, Node, Place

# Suffix of guards' names in a graph.
_SUFFIX = "__ece408_plain"
# Guards in a graph, with attributes that make each the identity.
_OPERATORS = {
    # Converts, unlike identity and multiplication by 1, which preserve the blocked layout. Does not
    # copy an array that is already plain.
    "reshape": {"shape": "(-2,)"},
    # Never works in place. Its gradient is always plain; a CachedOp leaves the gradient of
    # operators that may work in place (reshape, identity, cast) in blocked layout.
    "clip": {"a_min": "-inf", "a_max": "inf"},
    # Copies several times faster than clip. It may work in place and then preserves the layout of
    # another operator's result, but NDArrays and a graph's variables are never overwritten.
    "_contrib_gradientmultiplier": {"scalar": "1.0"},
    # Always copies, backward as well.
    "tile": {"reps": "()"},
}


def plain_data(nd: Any, array: Any) -> Any:
    """Return the NDArray's values in plain layout; `nd` is `mx.nd`."""
    return nd.reshape(array, shape=(-2,))


def plain_parameter(nd: Any, array: Any) -> Any:
    """Return the NDArray's values in plain layout, always copied."""
    return nd.contrib.gradientmultiplier(array, scalar=1.0)


def is_guard(name: Any) -> bool:
    """Return whether a node, or an output of a node, of this name is a guard's."""
    return _SUFFIX in str(name)


def unheard(callback: Callable[..., None]) -> Callable[..., None]:
    """Wrap a monitor's callback, whose first argument is a name, so that it ignores guards."""

    def heard(name: Any, *others: Any) -> None:
        if not is_guard(name):
            callback(name, *others)

    return heard


def guarded_symbol(graph: Graph, like: Any, of_data: str = "reshape") -> Any:
    """Return the Symbol with guards, for a CachedOp."""
    if graph_json.has_control_flow(graph):
        variables.plan_memory_apart()
    return graph_json.write(guarded(graph, of_data=of_data), like)


def guarded(graph: Graph, of_data: str = "reshape") -> Graph:
    """Return the graph with guards around our operator, at any depth, as a CachedOp needs them.

    `of_data` is the guard of data: "reshape", or "clip" if shapes may become known late: reshape
    treats an unknown shape as that of a scalar.

    An executor needs none: it keeps the plain copy of a blocked array as long as it lives. Nor does
    `ece408_convolution`, which receives arrays like MXNet's own operators. A CachedOp needs them
    even with static memory and static shapes: a convolution of ours before a transposed one was
    wrong in 11 of 60 nets.
    """
    nodes: list[Node] = []
    moved: list[Place] = []
    names = {node["name"] for node in graph["nodes"]}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def guard(operator: str, entry: Entry, name: str, of_mxnet: dict[str, str]) -> Entry:
        attributes = {**_OPERATORS[operator], **of_mxnet}
        node = {"op": operator, "name": f"{name}{_SUFFIX}", "attrs": attributes, "inputs": [entry]}
        return [add(node), 0, 0]

    def add_ours(node: Node) -> int:
        name = node["name"]
        # Already guarded. (The output of another operator of ours is a guard, too.)
        if nodes[node["inputs"][0][0]]["name"] == f"{name}_data{_SUFFIX}":
            return add(node)
        # Such as the context group, or MXNet's marks of a loop's body.
        of_mxnet = {k: v for k, v in node["attrs"].items() if k.startswith("__")}
        data, *parameters = node["inputs"]
        inputs = [guard(of_data, data, f"{name}_data", of_mxnet)]
        for role, entry in zip(("weight", "bias"), parameters):
            is_variable = nodes[entry[0]]["op"] == "null"
            operator = "_contrib_gradientmultiplier" if is_variable else "clip"
            inputs.append(guard(operator, entry, f"{name}_{role}", of_mxnet))
        return guard("clip", [add({**node, "inputs": inputs}), 0, 0], name, of_mxnet)[0]

    def add_control_flow(node: Node) -> Place:
        """MXNet runs it immediately, and takes slices of arrays before they are computed; so these
        must be plain from the beginning. Variables and nodes without inputs are."""
        name = node["name"]
        if f"{name}_out0{_SUFFIX}" in names:
            return add(node)
        inputs = [
            guard("tile", entry, f"{name}_in{k}", {}) if nodes[entry[0]]["inputs"] else entry
            for k, entry in enumerate(node["inputs"])
        ]
        number = add({**node, "inputs": inputs})
        outputs = range(int(node["attrs"]["num_outputs"]))
        return [guard("clip", [number, k, 0], f"{name}_out{k}", {}) for k in outputs]

    for node in graph["nodes"]:
        node = graph_json.inside(
            graph_json.inputs_moved(node, moved), lambda graph: guarded(graph, of_data)
        )
        if graph_json.is_ours(node):
            moved.append(add_ours(node))
        elif graph_json.is_control_flow(node):
            moved.append(add_control_flow(node))
        else:
            moved.append(add(node))
    return graph_json.rebuilt(graph, nodes, moved)
