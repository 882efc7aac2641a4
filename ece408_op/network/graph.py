"""MXNet graph as plain data, parsed from its JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    def read(self) -> Attributes:
        """Return the attributes with typed accessors."""
        return Attributes(self.op, self.attributes)


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, and the output arrays."""

    nodes: tuple[Node, ...]
    heads: tuple[Entry, ...]

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

    def variables(self) -> Iterator[tuple[int, str]]:
        """Yield the number and name of each variable."""
        return ((i, node.name) for i, node in enumerate(self.nodes) if node.op == "null")

    def computed(self) -> Iterator[tuple[int, Node]]:
        """Yield the number and node of each operator."""
        return ((i, node) for i, node in enumerate(self.nodes) if node.op != "null")

    def uses(self) -> Counter[Entry]:
        """Return how often each array is read; being an output counts as a read."""
        found: Counter[Entry] = Counter(self.heads)
        for node in self.nodes:
            found.update(node.inputs)
        return found

    def check_inputs(self, names: Sequence[str]) -> None:
        """Raise `UnsupportedProblem` unless these are the names of all variables."""
        missing = sorted({name for _, name in self.variables()} - set(names))
        if missing:
            raise UnsupportedProblem(f"the network also takes {', '.join(missing)}")
