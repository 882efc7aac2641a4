"""Attributes of our training operators from those of MXNet's nodes."""

from __future__ import annotations

import struct

from .. import compiled_operator
from ..conv_attributes import literal
from .graph_json import Node

# Monotonic functions of MXNet's Activation.
_INCREASING = ("relu", "sigmoid", "tanh")


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
