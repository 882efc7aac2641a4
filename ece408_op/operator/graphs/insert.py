"""Replacement of MXNet's Convolution by our operator in JSON graphs."""

from __future__ import annotations

from typing import Protocol

from ..conv_attributes import IGNORED
from .graph_json import Graph, Node, as_ours, inside

# Other convolution operators, and why they stay.
_OTHER_OPERATORS = {
    "Convolution_v1": "it is the operator Convolution_v1",
    "_npx_convolution": "it is of MXNet's NumPy interface; swap the Gluon net before exporting it",
}


class Choice(Protocol):
    """Selects layers, and their backend and precision."""

    backend: str | None
    precision: str | None

    def takes(self, name: str, attributes: dict[str, str]) -> bool: ...

    def leaves(self, name: str, reason: str) -> None: ...


def rewritten(graph: Graph, choice: Choice) -> Graph:
    """Return the graph with our operator for every Convolution that `choice` takes, at any
    depth."""

    def place(node: Node) -> Node:
        node = inside(node, lambda graph: rewritten(graph, choice))
        attributes, name = node.get("attrs", {}), node["name"]
        if node["op"] in _OTHER_OPERATORS:
            choice.leaves(name, _OTHER_OPERATORS[node["op"]])
        if node["op"] != "Convolution" or not choice.takes(name, attributes):
            return node
        kept = {key: text for key, text in attributes.items() if key not in IGNORED}
        return as_ours(node, kept, backend=choice.backend, precision=choice.precision)

    return {**graph, "nodes": [place(node) for node in graph["nodes"]]}
