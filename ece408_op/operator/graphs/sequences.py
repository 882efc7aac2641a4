"""Sequences: nodes of ours that run consecutively become one node, `ece408_sequence`.

MXNet takes some microseconds per node of a library, in addition to its computation; and for a
single image, inputs of a concatenation can be written directly to its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import compiled_operator
from . import fusion, groups
from .graph_json import Entry, Graph, Node

# MXNet's profile names a sequence instead of its nodes: two nodes are not worth that.
_LEAST = 3


def fused(graph: Graph) -> Graph:
    """Return a float32 inference graph with as few nodes of ours as possible; its nodes are changed
    in place.

    If several nodes compute the graph's outputs, each stays, so that these keep their names.
    """
    graph = fusion.fuse(graph)
    nodes, heads = graph["nodes"], {head[0] for head in graph["heads"]}
    if any(node.get("control_deps") for node in nodes):
        return graph
    stays = heads if len(heads) > 1 else ()
    goes = [node["op"] in fusion.OURS and number not in stays for number, node in enumerate(nodes)]
    long = [group for group in groups.by_level(graph, goes) if len(group) >= _LEAST]
    return groups.replaced(graph, long, lambda *given: _sequence(nodes, *given))


def _sequence(nodes: Sequence[Node], group: Sequence[int], outputs: Sequence[Entry]) -> Node:
    own = set(group)
    entries = [entry for number in group for entry in nodes[number]["inputs"]]
    taken = dict.fromkeys((entry[0], entry[1]) for entry in entries if entry[0] not in own)
    places = {entry: place for place, entry in enumerate(taken)}
    places.update(((number, 0), len(taken) + place) for place, number in enumerate(group))

    def words() -> Iterator[str | int]:
        yield len(group)
        for node in (nodes[number] for number in group):
            yield from (node["op"], len(node["attrs"]))
            yield from (word for pair in node["attrs"].items() for word in pair)
            yield len(node["inputs"])
            yield from (places[entry[0], entry[1]] for entry in node["inputs"])
        yield from (places[entry[0], entry[1]] for entry in outputs)

    return {
        "op": compiled_operator.SEQUENCE,
        "name": nodes[outputs[0][0]]["name"],
        "attrs": fusion.made({"counts": f"{len(taken)} {len(outputs)}", "nodes": _text(words())}),
        "inputs": [[*entry, 0] for entry in taken],
    }


def _text(words: Iterator[str | int]) -> str:
    """Encode words for the compiled operator: each after its length in bytes."""
    texts = map(str, words)
    return "".join(f"{len(text.encode())}:{text}" for text in texts)
