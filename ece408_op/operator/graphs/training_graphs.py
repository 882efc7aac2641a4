"""Graphs for training: the compiled operators with their gradients.

MXNet's BatchNorm takes four times as long on arrays in plain layout, as our convolutions return
them, as on oneDNN's blocked ones. So a chain after one of our nodes of

    BatchNorm [-> elemwise_add] [-> relu, or Activation relu]

whose intermediate results have no other use becomes one node of `ece408_batch_norm`, in float32.
Pooling of arrays in plain layout becomes a node of `ece408_pool`; a monotonic function before max
pooling moves behind it.

MXNet does not tell a library's operator that a gradient is to be added to an array's contents
(grad_req "add", or a long sum that MXNet accumulates in place); our operators would overwrite them.
So a copy by MXNet's own operator, which does accumulate, is inserted between a variable whose
gradient may be added and our node; a graph with sums of gradients of sufficient length keeps the
Python operator.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import compiled_operator
from ..conv_attributes import literal
from . import compiled_graphs, graph_json
from .graph_json import Entry, Graph, Node

# Operators that pass on the gradient of their result, the same array, as that of their inputs.
_SUMS = ("elemwise_add", "add_n")
# MXNet operators whose results may have a blocked layout for any input layout.
_BLOCKED = ("Convolution", "Deconvolution")
# Monotonic functions of MXNet's Activation.
_INCREASING = ("relu", "sigmoid", "tanh")
# Suffix of the copies' names.
_SUFFIX = "__ece408_copy"


def compiled(
    symbol: Any,
    graph: Graph,
    shapes: Mapping[str, Sequence[int]],
    wanted: Collection[str],
    added: Collection[str],
    only_float32: bool,
) -> Any:
    """Return the graph of `symbol` as a Symbol for training, or `None`, as
    `compiled_graphs.compiled`.

    `wanted` are the inputs whose gradients are computed, `added` those whose gradients may be
    added. Only for training, with the batch's averages.
    """
    if _has_long_sums(graph["nodes"]):
        return None
    graph = _with_copies(graph, added)
    gradients = _gradients(graph["nodes"], wanted)
    fuse = _fuse if only_float32 else None
    return compiled_graphs.compiled(symbol, graph, shapes, fuse, gradients)


def _has_long_sums(nodes: list[Node]) -> bool:
    """Return whether a gradient of our nodes may be a term of a sum that MXNet accumulates in
    place."""
    shortest = int(os.environ.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "8"))
    uses = Counter((entry[0], entry[1]) for node in nodes for entry in node["inputs"])
    return max(uses.values()) >= shortest


def _with_copies(graph: Graph, added: Collection[str]) -> Graph:
    """Return the graph with copies of the `added` variables for our nodes, for nodes that may
    become ours, and for sums whose gradients our nodes may compute."""
    nodes: list[Node] = []
    moved: list[int] = []
    copies: dict[int, int] = {}
    for node in graph["nodes"]:
        node = graph_json.inputs_moved(node, moved)
        if graph_json.is_ours(node) or node["op"] in ("BatchNorm", *_SUMS):
            inputs = [[copies.get(entry[0], entry[0]), *entry[1:]] for entry in node["inputs"]]
            if _fixes_gamma(node):
                # MXNet's own operator overwrites this gradient with zeros, even if it is to be
                # added.
                inputs[1] = node["inputs"][1]
            node = {**node, "inputs": inputs}
        nodes.append(node)
        moved.append(len(nodes) - 1)
        if node["op"] == "null" and node["name"] in added:
            copies[moved[-1]] = len(nodes)
            name = f"{node['name']}{_SUFFIX}"
            nodes.append({"op": "_copy", "name": name, "inputs": [[moved[-1], 0, 0]]})
    return graph_json.rebuilt(graph, nodes, moved)


def _fixes_gamma(node: Node) -> bool:
    return node["op"] == "BatchNorm" and _flag(node.get("attrs", {}), "fix_gamma", True)


def _gradients(nodes: list[Node], wanted: Collection[str]) -> dict[int, str]:
    """Return which gradients our nodes compute, by number: those on the way to wanted ones."""
    leads: list[bool] = []
    found: dict[int, str] = {}
    for number, node in enumerate(nodes):
        each = [leads[entry[0]] for entry in node["inputs"]]
        leads.append(node["name"] in wanted if node["op"] == "null" else any(each))
        if graph_json.is_ours(node):
            found[number] = compiled_operator.gradients(each)
    return found


def _fuse(graph: Graph) -> Graph:
    """Return the graph with one node per chain; its nodes are changed in place."""
    return graph_json.without(graph, _chained(graph["nodes"], graph["heads"]))


def _chained(nodes: list[Node], heads: list[Entry]) -> list[int]:
    """Return for each node the number of the node that now computes its output."""
    entries = [*(entry for node in nodes for entry in node["inputs"]), *heads]
    used = Counter(entry[0] for entry in entries)
    # Our node also outputs its averages, so a graph output would get another name.
    kept = {entry[0] for entry in heads} | {entry[0] for entry in entries if entry[1] > 0}
    stands_for = list(range(len(nodes)))
    is_plain: list[bool] = []
    for number, node in enumerate(nodes):
        sources = [stands_for[entry[0]] for entry in node["inputs"]]
        is_ours = node["op"] == compiled_operator.NAME
        plain = is_ours or any(is_plain[entry[0]] for entry in node["inputs"])
        is_plain.append(plain and node["op"] not in _BLOCKED)
        if number in kept:
            continue
        # If two are added, the later one performs the addition.
        for entry in sorted(node["inputs"][:2], reverse=True):
            source = stands_for[entry[0]]
            if used[entry[0]] == 1 and _takes(nodes[source], node, entry):
                nodes[number] = {**nodes[source], "name": node["name"]}
                stands_for = [number if place == source else place for place in stands_for]
                break
        else:
            if sources and is_plain[node["inputs"][0][0]]:
                nodes[number] = _replaced(node)
                if used[node["inputs"][0][0]] == 1:
                    _pool_first(nodes, sources[0], number)
    return stands_for


def _takes(ours: Node, node: Node, entry: Entry) -> bool:
    """Fuse `node`, which reads our node's output `entry`, into our node; return whether that
    worked."""
    attributes = ours.get("attrs", {})
    if ours["op"] != compiled_operator.BATCH_NORM or "relu" in attributes:
        return False
    if node["op"] != "clip" and _bounds_of(node) is not None:
        attributes["relu"] = "1"
        return True
    if node["op"] != "elemwise_add" or "adds" in attributes:
        return False
    attributes["adds"] = "1"
    place = node["inputs"].index(entry)
    ours["inputs"] = [*ours["inputs"], node["inputs"][1 - place]]
    return True


def _replaced(node: Node) -> Node:
    """Return a node whose input is in plain layout, or our replacement for it."""
    window = _window_of(node)
    if window is not None and not _may_be_cut(node):
        return {**node, "op": compiled_operator.POOL, "attrs": _made({"window": window})}
    if _by_batch(node):
        return {**node, "op": compiled_operator.BATCH_NORM, "attrs": _batch(node)}
    return node


def _may_be_cut(node: Node) -> bool:
    """Return whether it averages windows that the array's edge may clip: for these, MXNet's
    gradient is inconsistent with its average, and users get that gradient."""
    given = node.get("attrs", {})
    return given.get("pool_type") == "avg" and given.get("pooling_convention") == "full"


def _by_batch(node: Node) -> bool:
    """Return whether it normalises by the batch's averages, which are no output of the graph."""
    given = node.get("attrs", {})
    return _is_normalisation(node) and not _flag(given, "use_global_stats", False)


def _batch(node: Node) -> dict[str, str]:
    given = node.get("attrs", {})
    momentum = _bits("f", float(given.get("momentum", 0.9)))
    return _made({"normalize": f"{_normalisation_text(node)} {momentum}"})


def _pool_first(nodes: list[Node], before: int, number: int) -> None:
    """Swap max pooling by `ece408_pool`, if that is node `number`, and the function before it,
    whose result has no other use.

    A monotonic function commutes with max pooling, which leaves it fewer elements. MXNet's tanh
    decreases at 3196 of all floats, by its last bit.
    """
    function, pool = nodes[before], nodes[number]
    is_pool = pool["op"] == compiled_operator.POOL and pool["attrs"]["window"].startswith("1")
    if is_pool and function["op"] == "Activation" and function["attrs"]["act_type"] in _INCREASING:
        nodes[before] = {**pool, "name": function["name"], "inputs": function["inputs"]}
        nodes[number] = {**function, "name": pool["name"], "inputs": [[before, 0, 0]]}


def _made(attributes: dict[str, str]) -> dict[str, str]:
    return {"key": compiled_operator.KEY, **attributes}


def _bits(kind: str, value: float) -> int:
    """Return the bits of a number of `struct`'s kind "f" or "d", as the compiled operators read
    them."""
    return int.from_bytes(struct.pack(f"<{kind}", value), "little")


def _window_of(node: Node) -> str | None:
    """Return the attributes of `ece408_pool` for a Pooling node, or `None` if it is unsupported."""
    given = node.get("attrs", {})
    kind, border = given.get("pool_type", "max"), given.get("pooling_convention", "valid")
    is_global = _flag(given, "global_pool", False)
    kernel = _pair(given.get("kernel", "()"), 1 if is_global else 0)
    if node["op"] != "Pooling" or kind not in ("max", "avg") or border not in ("valid", "full"):
        return None
    if kernel is None or given.get("layout", "None") not in ("None", "NCHW"):
        return None
    stride, pad = _pair(given.get("stride", "()"), 1), _pair(given.get("pad", "()"), 0)
    if stride is None or pad is None:
        return None
    flags = (
        kind == "max",
        border == "full",
        is_global,
        _flag(given, "count_include_pad", True),
    )
    return " ".join(str(int(number)) for number in (*flags, *kernel, *stride, *pad))


def _pair(text: str, default: int) -> tuple[int, int] | None:
    """Return two numbers, or the default if none is given; `None` for any other count."""
    numbers = literal(text) or (default, default)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _is_normalisation(node: Node) -> bool:
    given = node.get("attrs", {})
    plain = given.get("axis", "1") == "1" and not _flag(given, "output_mean_var", False)
    return node["op"] == "BatchNorm" and plain


def _normalisation_text(node: Node) -> str:
    """Return whether gamma is used, and epsilon."""
    given = node.get("attrs", {})
    epsilon = _bits("d", float(given.get("eps", 1e-3)))
    return f"{int(not _flag(given, 'fix_gamma', True))} {epsilon}"


def _flag(attributes: dict[str, str], name: str, default: bool) -> bool:
    text = attributes.get(name, "None")
    return default if text == "None" else bool(literal(text))


def _bounds_of(node: Node) -> tuple[float, float] | None:
    """Return the bounds of relu or clip. A clip whose bounds are out of order or NaN is not
    fused."""
    given = node.get("attrs", {})
    activation = node["op"] == "Activation" and given.get("act_type") == "relu"
    if activation or node["op"] == "relu":
        return (0.0, float("inf"))
    if node["op"] == "clip":
        lowest, highest = float(given["a_min"]), float(given["a_max"])
        return (lowest, highest) if lowest <= highest else None
    return None
