"""Guards against MXNet handing our operator memory that it has already freed.

On the CPU, oneDNN's operators leave their results, and weights they have used, in blocked
layouts. MXNet 1.9 gives a custom operator a temporary plain copy of such an array and frees the
copy before the operator, on a thread of its own, reads it: silent wrong results, in the forward
pass through data and weight, in the backward pass through the gradient of the output. Imperative
code and a CachedOp do it, even a static one; an executor does not.

The guards are operators of MXNet that compute on plain arrays and so convert what they read. No
graph that users see has any: they are put around our operator as a CachedOp is made (see
`execution`).
"""

from __future__ import annotations

from typing import Any

from .graph_json import (
    Entry,
    Graph,
    Node,
    has_control_flow,
    inputs_moved,
    inside,
    is_ours,
    rebuilt,
)

_INFINITY = float("inf")
# What the names of guards in a graph end with.
SUFFIX = "__ece408_plain"
# The guards in a graph, with attributes that make each the identity.
_OPERATORS = {
    "reshape": {"shape": "(-2,)"},
    "clip": {"a_min": "-inf", "a_max": "inf"},
    "_contrib_gradientmultiplier": {"scalar": "1.0"},
    "tile": {"reps": "()"},
}


def plain_data(nd: Any, array: Any) -> Any:
    """The same NDArray's values in plain layout; `nd` is `mx.nd`.

    Reshape converts where identity and multiplication by 1 hand the blocked layout on. In a
    graph, an array that is plain already is not copied.
    """
    return nd.reshape(array, shape=(-2,))


def plain_parameter(nd: Any, array: Any) -> Any:
    """The same NDArray's values in plain layout, always copied.

    Multiplying the gradient by 1 copies several times faster than clip. Like other operators that
    may work in place it hands on the layout of another operator's result in a graph, where clip
    stands in its place; an NDArray, or a graph's variable, is never overwritten.
    """
    return nd.contrib.gradientmultiplier(array, scalar=1.0)


def plain_gradient(nd: Any, array: Any) -> Any:
    """The same NDArray's values, by an operator whose gradient is always in plain layout.

    In a CachedOp, operators that may compute their gradient in place (reshape, identity, cast)
    leave it in blocked layout. Clip's is never in place, and its forward pass always is.
    """
    return nd.clip(array, a_min=-_INFINITY, a_max=_INFINITY)


def guarded(graph: Graph, of_data: str = "reshape", static_shape: bool = False) -> Graph:
    """The graph with guards around our operator, at any depth, as a CachedOp needs them.

    `of_data` is the guard of data: "reshape", or "clip", which always copies, where shapes may
    become known late: reshape takes an unknown shape for that of a scalar.

    With `static_shape`, what is next to control flow is often wrong in MXNet, also with its own
    operators; so no guard is put there.

    An executor needs none: it keeps the plain copy of a blocked array as long as it lives. Nor does
    `ece408_forward`, which MXNet hands arrays as it does to operators of its own. A CachedOp needs
    them even with static memory and static shapes: a convolution of ours before a transposed one
    was wrong in 11 of 60 nets.
    """
    if has_control_flow(graph) and not static_shape:
        graph = _guarded_control_flow(graph)
    nodes: list[Node] = []
    moved: list[int] = []

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def guard(operator: str, entry: Entry, name: str, of_mxnet: dict[str, str]) -> Entry:
        return [add(_guard(operator, entry, name, of_mxnet)), 0, 0]

    def add_ours(node: Node) -> int:
        name = node["name"]
        # Guarded before. What comes of another operator of ours ends with a guard, too.
        if nodes[node["inputs"][0][0]]["name"] == f"{name}_data{SUFFIX}":
            return add(node)
        # Such as the context group, or MXNet's own marks of a loop's body.
        of_mxnet = {k: v for k, v in node["attrs"].items() if k.startswith("__")}
        data, *parameters = node["inputs"]
        inputs = [guard(of_data, data, f"{name}_data", of_mxnet)]
        for role, entry in zip(("weight", "bias"), parameters):
            is_variable = nodes[entry[0]]["op"] == "null"
            operator = "_contrib_gradientmultiplier" if is_variable else "clip"
            inputs.append(guard(operator, entry, f"{name}_{role}", of_mxnet))
        return guard("clip", [add({**node, "inputs": inputs}), 0, 0], name, of_mxnet)[0]

    for node in graph["nodes"]:
        node = inside(
            inputs_moved(node, moved), lambda graph: guarded(graph, of_data, static_shape)
        )
        moved.append(add_ours(node) if is_ours(node) else add(node))
    return rebuilt(graph, nodes, moved)


def _guard(operator: str, entry: Entry, name: str, of_mxnet: dict[str, str]) -> Node:
    attributes = {**_OPERATORS[operator], **of_mxnet}
    return {"op": operator, "name": f"{name}{SUFFIX}", "attrs": attributes, "inputs": [entry]}


def _guarded_control_flow(graph: Graph) -> Graph:
    """The graph with guards around control flow, whose inputs and gradients must be plain.

    MXNet runs a loop as soon as it is reached, and takes slices of arrays that are in flight.
    Tile always copies.
    """
    nodes: list[Node] = []
    entries: dict[tuple[int, int], Entry] = {}
    moved: list[int] = []

    def follow(entry: Entry) -> Entry:
        node, output, *version = entry
        return entries.get((node, output), [moved[node], output, *version])

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def plain_input(entry: Entry, name: str) -> Entry:
        is_computed = nodes[entry[0]]["inputs"] and not nodes[entry[0]]["name"].endswith(SUFFIX)
        return [add(_guard("tile", entry, name, {})), 0, 0] if is_computed else entry

    for number, node in enumerate(graph["nodes"]):
        inputs = [follow(entry) for entry in node["inputs"]]
        node = {**node, "inputs": inputs}
        if "control_deps" in node:
            node["control_deps"] = [moved[dep] for dep in node["control_deps"]]
        if "subgraphs" in node:
            name = node["name"]
            node["inputs"] = [plain_input(e, f"{name}_in{k}") for k, e in enumerate(inputs)]
        moved.append(add(node))
        if "subgraphs" in node:
            for output in range(int(node["attrs"]["num_outputs"])):
                entry = [moved[number], output, 0]
                guard = add(_guard("clip", entry, f"{node['name']}_out{output}", {}))
                entries[number, output] = [guard, 0, 0]
    result = rebuilt(graph, nodes, moved)
    return {**result, "heads": [follow(head) for head in graph["heads"]]}
