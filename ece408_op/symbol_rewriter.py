"""A network's JSON with our operator in the place of MXNet's Convolution."""

from __future__ import annotations

from typing import Any, Protocol

# Attributes of MXNet's Convolution that mean nothing to ours.
_DROPPED = ("workspace", "cudnn_tune", "cudnn_off", "layout")
# Other operators that convolve, and why they stay.
_OTHER_OPERATORS = {
    "Convolution_v1": "it is the operator Convolution_v1",
    "_npx_convolution": "it is of MXNet's NumPy interface; swap the Gluon net before exporting it",
}


class Choice(Protocol):
    """Who decides which layers are swapped, which backend computes them, and how exactly."""

    backend: str | None
    precision: str | None

    def takes(self, name: str, attributes: dict[str, str]) -> bool: ...

    def leaves(self, name: str, reason: str) -> None: ...


class Rewriter:
    """Rewrites a network's JSON, in which nodes refer to nodes before them by number."""

    def __init__(self, graph: dict[str, Any], choice: Choice) -> None:
        self._graph = graph
        self._choice = choice
        self._heads = {head[0] for head in graph["heads"]}
        self._nodes: list[dict[str, Any]] = []
        self._moved: list[int] = []

    def rewritten(self) -> dict[str, Any]:
        for number, node in enumerate(self._graph["nodes"]):
            node = {**node, "inputs": [self._follow(entry) for entry in node["inputs"]]}
            if "control_deps" in node:
                node["control_deps"] = [self._moved[dep] for dep in node["control_deps"]]
            self._moved.append(self._place(node, is_head=number in self._heads))
        return {
            "nodes": self._nodes,
            "arg_nodes": [i for i, node in enumerate(self._nodes) if node["op"] == "null"],
            "heads": [self._follow(head) for head in self._graph["heads"]],
            "attrs": self._graph.get("attrs", {}),
        }

    def _follow(self, entry: list[int]) -> list[int]:
        return [self._moved[entry[0]], *entry[1:]]

    def _place(self, node: dict[str, Any], is_head: bool) -> int:
        """Add a node, or what takes its place; returns the number that stands for it."""
        attributes = node.get("attrs", {})
        name = node["name"]
        if node["op"] in _OTHER_OPERATORS:
            self._choice.leaves(name, _OTHER_OPERATORS[node["op"]])
        if node["op"] != "Convolution" or not self._choice.takes(name, attributes):
            return self._add(node)
        return self._place_ours(node, attributes, is_head)

    def _place_ours(self, node: dict[str, Any], attributes: dict[str, str], is_head: bool) -> int:
        """Our operator between guards (see layout_guard), its output under the old name."""
        name = node["name"]
        of_mxnet = {k: v for k, v in attributes.items() if k.startswith("__")}
        kept = {k: v for k, v in attributes.items() if k not in _DROPPED}
        own = {"op_type": "ece408_conv", "layer": name}
        # What is not asked for is not written, so that files stay as they were.
        for attribute in ("backend", "precision"):
            if getattr(self._choice, attribute) is not None:
                own[attribute] = getattr(self._choice, attribute)
        bounds = {"a_min": "-inf", "a_max": "inf", **of_mxnet}
        data, *parameters = node["inputs"]
        guarded = [
            self._guard("reshape", f"{name}_data_plain", data, {"shape": "(-2,)", **of_mxnet})
        ]
        for role, entry in zip(("weight", "bias"), parameters):
            variable = self._nodes[entry[0]]["op"] == "null"
            op = "_contrib_gradientmultiplier" if variable else "clip"
            own_attributes = {"scalar": "1.0", **of_mxnet} if variable else bounds
            guarded.append(self._guard(op, f"{name}_{role}_plain", entry, own_attributes))
        # The output of the network keeps its name; elsewhere the layer keeps its attributes.
        names = (f"{name}_conv", name) if is_head else (name, f"{name}_plain")
        ours = {**node, "op": "Custom", "name": names[0], "attrs": {**kept, **own}}
        ours["inputs"] = [[number, 0, 0] for number in guarded]
        return self._guard("clip", names[1], [self._add(ours), 0, 0], bounds)

    def _guard(self, op: str, name: str, entry: list[int], attributes: dict[str, str]) -> int:
        return self._add({"op": op, "name": name, "attrs": attributes, "inputs": [entry]})

    def _add(self, node: dict[str, Any]) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1
