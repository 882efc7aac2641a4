"""Fusion of pointwise operators into convolutions, and of other chains into single nodes.

MXNet's BatchNorm, elemwise_add, Activation and clip each read and write a whole array, and on
arrays in plain layout BatchNorm, Concat and Pooling take 2 to 30 times as long as on oneDNN's
blocked ones. In inference, with moving averages, BatchNorm is a factor and an addend per channel.
So a chain of

    convolution [-> BatchNorm] [-> elemwise_add] [-> relu, Activation relu, or clip]

whose intermediate results have no other use becomes one `ece408_convolution` node, and a following
chain of

    [Concat of channels] [-> BatchNorm] [-> relu, Activation relu, or clip]

becomes one `ece408_concat` node, as does BatchNorm of a graph's input. Max and average pooling
after any of these becomes `ece408_pool`, and FullyConnected with its bounds `ece408_dense`. Flatten
after one of our nodes becomes another output shape. Pointwise operators may come in between; tanh
and sigmoid move behind max pooling, and Dropout, which does nothing in inference, is removed.
"""

from __future__ import annotations

import struct

from .. import compiled_operator
from ..conv_attributes import literal
from . import graph_json
from .graph_json import Entry, Graph, Node

# Operators that start a chain; operators with results in plain layout; and operators that preserve
# a plain layout.
_CHAINED = (compiled_operator.NAME, compiled_operator.CONCAT)
OURS = (*_CHAINED, compiled_operator.POOL, compiled_operator.DENSE)
_ELEMENTWISE = (
    *("Activation", "LeakyReLU", "Dropout", "clip"),
    *("relu", "tanh", "sigmoid", "softsign", "hard_sigmoid"),
)
# Monotonic functions of MXNet's Activation.
_INCREASING = ("relu", "sigmoid", "tanh")


def fuse(graph: Graph) -> Graph:
    """Return the graph with one node per chain; its nodes are changed in place.

    A node stays if an output other than the first is used.
    """
    return graph_json.without(graph, _chained(graph["nodes"], graph["heads"]))


def _chained(nodes: list[Node], heads: list[Entry]) -> list[int]:
    """Return for each node the number of the node that now computes its output."""
    entries = [*(entry for node in nodes for entry in node["inputs"]), *heads]
    named = {head[0] for head in heads}
    used = [0] * len(nodes)
    for number, *_ in entries:
        used[number] += 1
    with_several = {number for number, output, *_ in entries if output > 0}
    stands_for = list(range(len(nodes)))
    plain = [False] * len(nodes)  # whether outputs have a plain layout
    for number, node in enumerate(nodes):
        if number in with_several:
            continue
        sources = [stands_for[entry[0]] for entry in node["inputs"]]
        if _does_nothing(node) and number not in named:
            stands_for[number], plain[number] = sources[0], plain[sources[0]]
            used[number] += used[node["inputs"][0][0]] - 1
            continue
        # If two convolutions are added, the later one performs the addition.
        for entry in sorted(node["inputs"][:2], reverse=True):
            source = stands_for[entry[0]]
            chained = nodes[source]["op"] in OURS and used[entry[0]] == 1
            if chained and _takes(nodes[source], node, entry, nodes):
                # In place of the last node and under its name, after all inputs of the chain.
                nodes[number] = {**nodes[source], "name": node["name"]}
                stands_for = [number if place == source else place for place in stands_for]
                break
        else:
            _replace(node, [plain[source] or _begins(nodes[source], node) for source in sources])
            if sources and used[node["inputs"][0][0]] == 1:
                pool_first(nodes, sources[0], number)
        op = nodes[number]["op"]
        plain[number] = op in OURS or (op in _ELEMENTWISE and plain[sources[0]])
    return stands_for


def _takes(ours: Node, node: Node, entry: Entry, nodes: list[Node]) -> bool:
    """Fuse `node`, which reads our node's output `entry`, into our node; return whether that
    worked."""
    attributes = ours["attrs"]
    place = node["inputs"].index(entry)
    others = [each for number, each in enumerate(node["inputs"]) if number != place]
    if "flat" in attributes:
        return False
    if node["op"] == "Flatten":
        attributes["flat"] = "1"
        return True
    if "bounds" in attributes or ours["op"] == compiled_operator.POOL:
        return False
    bounds = bounds_of(node)
    if bounds is not None:
        attributes["bounds"] = " ".join(str(bits("f", bound)) for bound in bounds)
    elif "adds" in attributes or ours["op"] not in _CHAINED:
        return False
    elif node["op"] == "elemwise_add" and ours["op"] == compiled_operator.NAME:
        attributes["adds"] = "1"
    elif is_normalisation(node) and place == 0 and "normalize" not in attributes:
        attributes["normalize"] = normalisation(node)
        if all(nodes[other[0]]["op"] == "null" for other in others):
            attributes["of_variables"] = "1"
    else:
        return False
    ours["inputs"] = [*ours["inputs"], *others]
    return True


def _begins(source: Node, node: Node) -> bool:
    """Return whether it normalises a graph's input, which is usually in plain layout."""
    return source["op"] == "null" and is_normalisation(node)


def _does_nothing(node: Node) -> bool:
    """Return whether it is a Dropout that returns its first input in inference."""
    is_dropout = node["op"] == "Dropout" and node.get("attrs", {}).get("mode") != "always"
    return is_dropout and node["inputs"][0][1] == 0


def _replace(node: Node, plain: list[bool]) -> None:
    """Replace an unfused node whose inputs are in plain layout by one of our operators; `plain`
    says which inputs are."""
    if not any(plain):
        return
    pooling = window(node)
    if pooling is not None:
        node.update(op=compiled_operator.POOL, attrs=made({"window": pooling}))
    elif node["op"] == "Concat" and node.get("attrs", {}).get("dim", "1") == "1":
        node.update(op=compiled_operator.CONCAT, attrs=made({"count": str(len(plain))}))
    elif is_normalisation(node) and plain[0]:
        attributes = {"count": "1", "normalize": normalisation(node)}
        node.update(op=compiled_operator.CONCAT, attrs=made(attributes))
    elif is_dense(node) and plain[0]:
        has_bias = int(len(node["inputs"]) > 2)
        layer = f"{literal(node['attrs']['num_hidden'])} {has_bias}"
        node.update(op=compiled_operator.DENSE, attrs=made({"layer": layer}))


def pool_first(nodes: list[Node], before: int, number: int) -> None:
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


def made(attributes: dict[str, str]) -> dict[str, str]:
    return {"key": compiled_operator.KEY, **attributes}


def bits(kind: str, value: float) -> int:
    """Return the bits of a number of `struct`'s kind "f" or "d", as the compiled operators read
    them."""
    return int.from_bytes(struct.pack(f"<{kind}", value), "little")


def window(node: Node) -> str | None:
    """Return the attributes of `ece408_pool` for a Pooling node, or `None` if it is unsupported."""
    given = node.get("attrs", {})
    kind, border = given.get("pool_type", "max"), given.get("pooling_convention", "valid")
    is_global = flag(given, "global_pool", False)
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
        flag(given, "count_include_pad", True),
    )
    return " ".join(str(int(number)) for number in (*flags, *kernel, *stride, *pad))


def _pair(text: str, default: int) -> tuple[int, int] | None:
    """Return two numbers, or the default if none is given; `None` for any other count."""
    numbers = literal(text) or (default, default)
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def is_dense(node: Node) -> bool:
    """Return whether it is a FullyConnected that treats each image as one row."""
    return node["op"] == "FullyConnected" and flag(node["attrs"], "flatten", True)


def is_normalisation(node: Node) -> bool:
    given = node.get("attrs", {})
    plain = given.get("axis", "1") == "1" and not flag(given, "output_mean_var", False)
    return node["op"] == "BatchNorm" and plain


def normalisation(node: Node) -> str:
    """Return whether gamma is used, and epsilon."""
    given = node.get("attrs", {})
    epsilon = bits("d", float(given.get("eps", 1e-3)))
    return f"{int(not flag(given, 'fix_gamma', True))} {epsilon}"


def flag(attributes: dict[str, str], name: str, default: bool) -> bool:
    text = attributes.get(name, "None")
    return default if text == "None" else bool(literal(text))


def bounds_of(node: Node) -> tuple[float, float] | None:
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
