"""Reader of MXNet's symbol files, from MXNet 0.8 to 1.9: a network as JSON.

As MXNet does when it loads a file, it brings networks of old versions up to date, in what inference
depends on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointMismatch, printable

# Versions are 10000 * major + 100 * minor + patch; the first that writes its version is 0.9.
_OLDEST, _CURRENT = 800, 10901
_LOSSES = (
    *("SoftmaxOutput", "SVMOutput", "LinearRegressionOutput", "LogisticRegressionOutput"),
    "MAERegressionOutput",
)
# Operators whose inputs are parameters, except the first.
_LAYERS = (
    *("Convolution", "Deconvolution", "FullyConnected", "ece408_conv", "Embedding", "LeakyReLU"),
    *("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm"),
)
# What BatchNorm lacks in files from before 0.9, which did not store auxiliary states.
_STATES = ("moving_mean", "moving_var")
# Operators by their former names.
_RENAMED = {
    **{"Softmax": "SoftmaxOutput", "ElementWiseSum": "add_n"},
    **{"_Plus": "elemwise_add", "_Minus": "elemwise_sub", "max_axis": "max", "sum_axis": "sum"},
    **{"_Mul": "elemwise_mul", "_Div": "elemwise_div", "identity": "_copy"},
    **{
        f"_{name}Scalar": f"_{name.lower()}_scalar"
        for name in ("Plus", "Minus", "RMinus", "Mul", "Div", "RDiv", "Maximum", "Minimum", "Power")
    },
}
# Attributes for training, which MXNet writes as __KEY__ since 0.9.2.
_HIDDEN = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")
# Of Python 2, which may write integers as 3L.
_TUPLE = re.compile(r"[(\[][\dL,\s-]*[)\]]")
# The course's operator, which has no bias.
_COURSE_OPERATOR = "New"
_OURS = "ece408_conv"
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Symbol:
    """A network: its JSON for `Graph.parse`, and the names of its variables in the order in which
    MXNet lists them; of these, those that only a loss reads, as its label, and those that a layer
    reads as parameters."""

    text: str
    variables: tuple[str, ...]
    labels: frozenset[str]
    parameters: frozenset[str]


def read(path: Path) -> Symbol:
    """Read a symbol file. Raises `CheckpointMismatch`."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refusal(path, f"byte {error.start} is not UTF-8") from None


def parse(text: str, path: Path) -> Symbol:
    """As `read`, from the file's text; errors name the path."""
    try:
        return _parsed(text)
    except _Damaged as error:
        raise _refusal(path, printable(str(error))[:300]) from None


def _refusal(path: Path, reason: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{path} is not a network of MXNet: {reason}; save it again, or copy it again"
    )


class _Damaged(Exception):
    """Why a text is not a network."""


@dataclass
class _Node:
    op: str
    name: str
    attributes: dict[str, str]
    # The numbers of a node and of one of its outputs.
    inputs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def computes(self) -> str:
        return self.attributes.get("op_type", "") if self.op == "Custom" else self.op


def _parsed(text: str) -> Symbol:
    document = _as(dict, _json(text), "it")
    nodes: list[_Node] = []
    for number, each in enumerate(_as(list, document.get("nodes"), "nodes")):
        nodes.append(_node(_as(dict, each, f"node {number}"), number))
    heads = _entries(document.get("heads"), len(nodes), "heads")
    if not heads:
        raise _Damaged("it has no outputs")
    attributes = document.get("attrs", {})
    _upgrade(nodes, _version(attributes))
    order = list(_visited(nodes, heads))
    return _symbol([nodes[number] for number in order], _moved(nodes, heads, order), attributes)


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer, parse_constant=_refuse)
    except RecursionError:
        raise _Damaged("its JSON is nested too deeply") from None
    except ValueError as error:
        raise _Damaged(f"its JSON is wrong: {error}") from None


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else _refuse(digits[:_MOST_DIGITS] + "...")


def _refuse(text: str) -> Any:
    raise _Damaged(f"its JSON has the number {text}")


def _as(kind: type, found: Any, what: str) -> Any:
    if type(found) is not kind:
        shown = "missing" if found is None else f"a {type(found).__name__}"
        raise _Damaged(f"{what} is {shown}, not a {kind.__name__}")
    return found


def _node(each: dict[str, Any], number: int) -> _Node:
    what = f"node {number}"
    op = _as(str, each.get("op"), f"{what}'s op")
    name = _as(str, each.get("name"), f"{what}'s name")
    attributes: dict[str, str] = {}
    # MXNet's versions use three keys; those before 0.9 wrote `param` and `attr`.
    for key in ("param", "attr", "attrs"):
        given = _as(dict, each.get(key, {}), f"{what}'s {key}")
        attributes.update((n, _as(str, text, f"{what}'s {n}")) for n, text in given.items())
    inputs = _entries(each.get("inputs"), number, f"{what}'s inputs")
    if op == "null" and inputs:
        raise _Damaged(f"{what} is a variable that has inputs")
    return _Node(op, name, attributes, inputs)


def _entries(found: Any, count: int, what: str) -> list[tuple[int, int]]:
    """Return arrays of the first `count` nodes, written as [node, output] or with a version."""
    entries = []
    for entry in _as(list, found, what):
        if len(_as(list, entry, f"one of {what}")) not in (2, 3):
            raise _Damaged(f"one of {what} has {len(entry)} numbers")
        node, output = (_as(int, number, f"a number of {what}") for number in entry[:2])
        if not 0 <= node < count or output < 0:
            raise _Damaged(f"{what} read output {output} of node {node}, which is not before them")
        entries.append((node, output))
    return entries


def _version(attributes: Any) -> int:
    given = _as(dict, attributes, "attrs").get("mxnet_version")
    if given is None:
        return _OLDEST
    if len(_as(list, given, "mxnet_version")) != 2:
        raise _Damaged("mxnet_version is not a type and a number")
    return int(_as(int, given[1], "mxnet_version"))


def _upgrade(nodes: list[_Node], version: int) -> None:
    for node in nodes[:]:
        given = node.attributes.items()
        node.attributes = {
            f"__{name}__" if name in _HIDDEN else name: _without_longs(text) for name, text in given
        }
        node.op = _RENAMED.get(node.op, node.op)
        if node.op == _COURSE_OPERATOR:
            own = {"no_bias": "True", "op_type": _OURS, "layer": node.name}
            node.op, node.attributes = "Custom", {**node.attributes, **own}
        if version < 900 and node.op == "BatchNorm" and len(node.inputs) == 3:
            for state in _STATES:
                node.inputs.append((len(nodes), 0))
                nodes.append(_Node("null", f"{node.name}_{state}", dict(node.attributes)))
        is_old_argument = version < 905 and node.op in ("argmax", "argmin")
        if is_old_argument and node.attributes.get("axis") == "-1":
            # It was the default, and meant the whole array.
            del node.attributes["axis"]


def _without_longs(text: str) -> str:
    return text.replace("L", "") if _TUPLE.fullmatch(text) else text


def _visited(nodes: list[_Node], heads: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the nodes that the heads depend on, each after its inputs, in MXNet's order."""
    seen: set[int] = set()
    for head, _ in heads:
        open_nodes = [(head, iter(nodes[head].inputs))] if head not in seen else []
        seen.add(head)
        while open_nodes:
            _, inputs = open_nodes[-1]
            following = next((node for node, _ in inputs if node not in seen), None)
            if following is None:
                yield open_nodes.pop()[0]
            else:
                seen.add(following)
                open_nodes.append((following, iter(nodes[following].inputs)))


def _moved(
    nodes: list[_Node], heads: list[tuple[int, int]], order: list[int]
) -> list[tuple[int, int]]:
    """Renumber the nodes by their place in `order`, and return the heads."""
    places = {number: place for place, number in enumerate(order)}
    for number in order:
        nodes[number].inputs = [(places[node], output) for node, output in nodes[number].inputs]
    return [(places[node], output) for node, output in heads]


def _symbol(nodes: list[_Node], heads: list[tuple[int, int]], attributes: dict[str, Any]) -> Symbol:
    variables = {number: node.name for number, node in enumerate(nodes) if node.op == "null"}
    names = tuple(variables.values())
    name, times = Counter(names).most_common(1)[0] if names else ("", 1)
    if times > 1:
        raise _Damaged(f"it has {times} variables of the name {name}")
    read_at = [
        (node.computes, place, n) for node in nodes for place, (n, _) in enumerate(node.inputs)
    ]
    of_losses = {n for op, place, n in read_at if place == 1 and op in _LOSSES}
    others = {n for op, place, n in read_at if place != 1 or op not in _LOSSES}
    of_layers = {n for op, place, n in read_at if place > 0 and op in _LAYERS}
    document = {
        "nodes": [
            {
                "op": e.op,
                "name": e.name,
                "attrs": e.attributes,
                "inputs": [[*i, 0] for i in e.inputs],
            }
            for e in nodes
        ],
        "arg_nodes": list(variables),
        "heads": [[*head, 0] for head in heads],
        "attrs": {**attributes, "mxnet_version": ["int", _CURRENT]},
    }
    return Symbol(
        json.dumps(document, ensure_ascii=False),
        names,
        frozenset(variables[n] for n in of_losses - others if n in variables),
        frozenset(variables[n] for n in of_layers if n in variables),
    )
