"""A graph of MXNet's as plain data, from its JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import UnsupportedProblem
from .node_attributes import Attributes


class Entry(NamedTuple):
    """An array of a graph: a node's number, and which of its outputs."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Node:
    """A node: its operator, by MXNet's name ("null" for a variable), its own name, its attributes
    and the arrays that it takes."""

    op: str
    name: str
    attributes: Mapping[str, str] = field(hash=False)
    inputs: tuple[Entry, ...]

    @property
    def read(self) -> Attributes:
        """The attributes, to be read."""
        return Attributes(self.op, self.attributes)


@dataclass(frozen=True)
class Graph:
    """Nodes, each after those that it takes arrays of, and the arrays that are asked for."""

    nodes: tuple[Node, ...]
    heads: tuple[Entry, ...]

    @classmethod
    def parse(cls, text: str) -> Graph:
        """From nnvm's JSON. Raises `UnsupportedProblem` for other text."""
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

    def variables(self) -> Iterator[tuple[int, str]]:
        """Number and name of each variable."""
        return ((i, node.name) for i, node in enumerate(self.nodes) if node.op == "null")

    def computed(self) -> Iterator[tuple[int, Node]]:
        """Number and node of each operator."""
        return ((i, node) for i, node in enumerate(self.nodes) if node.op != "null")

    def uses(self) -> Counter[Entry]:
        """How often each array is read, being asked for included."""
        found: Counter[Entry] = Counter(self.heads)
        for node in self.nodes:
            found.update(node.inputs)
        return found

    def check_inputs(self, names: Sequence[str]) -> None:
        """Raise `UnsupportedProblem` unless these are the names of all variables."""
        missing = sorted({name for _, name in self.variables()} - set(names))
        if missing:
            raise UnsupportedProblem(f"the network also takes {', '.join(missing)}")
