"""MXNet graph as plain data, parsed from its JSON."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..errors import UnsupportedProblem
from .node_attributes import Attributes


class Entry(NamedTuple):
    """An array of a graph: a node's number and the number of one of its outputs."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Node:
    """A node: its MXNet operator ("null" for a variable), name, attributes and input arrays."""

    op: str
    name: str
    attributes: Mapping[str, str] = field(hash=False)
    inputs: tuple[Entry, ...]

    @property
    def kind(self) -> str:
        """The operator's name; that of one written in Python is an attribute."""
        return str(self.attributes.get("op_type", self.op)) if self.op == "Custom" else self.op

    @functools.cached_property
    def read(self) -> Attributes:
        """Return the attributes with typed accessors."""
        return Attributes(self.kind, self.attributes)


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, and the output arrays. `room` is what the last program found of
    its concatenations, a guess for the next."""

    nodes: tuple[Node, ...]
    heads: tuple[Entry, ...]
    room: Any = None

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Parse nnvm's JSON. Raises `UnsupportedProblem` for other text."""
        try:
            document = json.loads(text)
            nodes = tuple(
                Node(
                    each["op"],
                    each["name"],
                    each.get("attrs") or each.get("param") or {},
                    tuple(Entry(*entry[:2]) for entry in each["inputs"]),
                )
                for each in document["nodes"]
            )
            heads = tuple(Entry(*head[:2]) for head in document["heads"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedProblem(
                f"the network's JSON cannot be read ({type(error).__name__}: {error})"
            ) from None
        return cls(nodes, heads)

    @functools.cached_property
    def variables(self) -> list[tuple[Entry, str]]:
        """The array and name of each variable."""
        return [(Entry(i), node.name) for i, node in enumerate(self.nodes) if node.op == "null"]

    @functools.cached_property
    def computed(self) -> list[tuple[int, Node]]:
        """The number and node of each operator."""
        return [(i, node) for i, node in enumerate(self.nodes) if node.op != "null"]

    @functools.cached_property
    def uses(self) -> Counter[Entry]:
        """How often each array is read; being an output counts as a read."""
        found: Counter[Entry] = Counter(self.heads)
        for node in self.nodes:
            found.update(node.inputs)
        return found

    @functools.cached_property
    def outputs(self) -> dict[int, int]:
        """The number of outputs of each node, up to the last one that is read."""
        found: dict[int, int] = {}
        for node, output in self.uses:
            found[node] = max(output + 1, found.get(node, 0))
        return found

    def pooled_first(self) -> Graph:
        """Return it with largest values pooled before tanh and sigmoid, which then have fewer
        elements. MXNet's tanh decreases at 3196 of all floats, by its last bit; of windows of NaN
        alone, MXNet's pooling returns the least float, and this graph that float's function."""
        nodes = list(self.nodes)
        for number, node in enumerate(nodes):
            if node.op != "Pooling" or node.read.text("pool_type", "max") != "max":
                continue
            entry = node.inputs[0]
            function = nodes[entry.node]
            kind = function.attributes.get("act_type", "")
            is_one = function.op == "Activation" and kind in ("tanh", "sigmoid")
            if is_one and self.uses[entry] == 1:
                nodes[entry.node] = replace(node, inputs=function.inputs)
                nodes[number] = replace(function, inputs=(entry,))
        return Graph(tuple(nodes), self.heads)

    def check_inputs(self, names: Sequence[str]) -> None:
        """Raise `UnsupportedProblem` unless these are the names of all variables."""
        missing = sorted({name for _, name in self.variables} - set(names))
        if missing:
            raise UnsupportedProblem(f"the network also takes {', '.join(missing)}")
