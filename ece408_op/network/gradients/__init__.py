"""Gradients of a graph, as further nodes of it, before it is lowered for a machine.

The forward pass becomes that of training: normalisation is by the batch's averages, with the sum
and the relu that follow it. Then each node's rule adds the nodes of the wanted gradients. What an
array gets from its uses is summed in reverse order of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import UnsupportedProblem
from ..graph import Entry, Graph, Node
from ..operators import why_not
from . import layer_rules, pointwise_rules
from .tape import Of, Rule, Tape, Term

RULES: dict[str, Rule] = {**pointwise_rules.RULES, **layer_rules.RULES}
# Their gradients are zero.
_CONSTANT = ("BlockGrad", "stop_gradient", "zeros_like", "ones_like")
# Losses, whose gradient is the same whatever the gradient for their result, also of zeros.
_LOSSES = ("SoftmaxOutput", "Softmax")
# The variable of a graph that draws random numbers.
SEED = "random seed"
_SUMS = ("elemwise_add", "_plus", "_Plus", "_add")


@dataclass(frozen=True)
class Joint:
    """A graph with its gradients. The nodes from number `backward` on are the backward pass; its
    variables there are the gradients for the outputs. Its heads are the `outputs` first ones, the
    wanted gradients, and new values of the moving averages, the variables `averages`. MXNet sets
    the variables `fixed` to 1. If it `draws` random numbers, the variable `SEED` is their seed, 8
    bytes."""

    graph: Graph
    backward: int
    outputs: int
    averages: tuple[str, ...]
    fixed: tuple[str, ...]
    draws: bool


def differentiate(
    graph: Graph,
    wanted: Sequence[str],
    train: bool = True,
    on_gpu: bool = False,
    recomputes: bool = False,
) -> Joint:
    """Return the graph with gradients for the variables in `wanted`, in training mode or not, for a
    GPU or the CPU. On a GPU it saves less and computes more if it `recomputes`. Raises
    `UnsupportedProblem` for operators whose gradients are not computed."""
    return _Pass(graph, wanted, train, Tape(on_gpu, recomputes)).joint()


def why_not_trained(op: str, attributes: Mapping[str, str], on_gpu: bool) -> str | None:
    """Return why a part that trains cannot have a node of MXNet's operator `op`, on a GPU or the
    CPU, or `None` if it can."""
    node = Node(op, op, attributes, ())
    if node.kind not in RULES and op not in _CONSTANT:
        return "its gradient is not computed"
    if op in _LOSSES:
        return "MXNet must know that it is a loss, which needs no gradient for its result"
    cut = node.read.text("pooling_convention", "valid") == "full"
    whole = node.read.flag("global_pool")
    if cut and not whole and node.read.text("pool_type", "max") == "avg":
        return "MXNet's gradient is another one than that of its averages of cut windows"
    return _why_not(node, True, on_gpu)


def _drops(node: Node) -> bool:
    return node.op == "Dropout" and node.read.number("p", 0.5) > 0


def _why_not(node: Node, train: bool, on_gpu: bool) -> str | None:
    if train and _drops(node) and not (on_gpu and node.read.text("axes", "()") == "()"):
        return "dropout is not computed in training" + " along axes" * on_gpu
    if node.read.text("act_type", "") == "rrelu":
        return "the gradient of rrelu is not computed"
    return None


class _Pass:
    """One call of `differentiate`."""

    def __init__(self, graph: Graph, wanted: Sequence[str], train: bool, tape: Tape) -> None:
        self._tape = tape
        self._train = train
        self._seed: Entry | None = None
        self._uses = graph.uses
        self._graph = graph
        # Where the graph's arrays are on the tape, and the gradients of the tape's arrays.
        self._place: dict[Entry, Entry] = {}
        self._variables: dict[str, Entry] = {}
        self._found: dict[int, dict[int, Entry]] = {}
        for _, node in graph.computed:
            self._check(node)
        fused = {number for node in graph.nodes for number in self._fused(node)}
        for number, node in enumerate(graph.nodes):
            if number not in fused:
                self._forward(number, node)
        self._heads = [self._place[head] for head in graph.heads]
        missing = [name for name in wanted if name not in self._variables]
        if missing:
            raise UnsupportedProblem(f"the network takes no {', '.join(missing)} to differentiate")
        self._wanted = [self._variables[name] for name in wanted]

    def joint(self) -> Joint:
        tape = self._tape
        backward = len(tape.nodes)
        for number, head in enumerate(self._heads):
            tape.name = f"gradient for output {number}"
            self._add(head, tape.add(Node("null", tape.name, {}, ())))
        needed = self._needed(backward)
        for number in reversed(range(backward)):
            self._differentiate(number, needed)
        tape.name = "gradients"
        gradients = [
            self._found.get(each.node, {}).get(0) or tape.node("zeros_like", [each], {})
            for each in self._wanted
        ]
        names, averages = self._averages(needed)
        heads = (*self._heads, *gradients, *averages)
        graph = Graph(tuple(tape.nodes), heads)
        draws = self._seed is not None
        return Joint(graph, backward, len(self._heads), names, self._fixed(), draws)

    def _check(self, node: Node) -> None:
        reason = why_not(node.op, node.attributes) or _why_not(node, self._train, self._tape.on_gpu)
        if reason is not None:
            raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")

    def _forward(self, number: int, node: Node) -> None:
        """Append a node of the forward pass to the tape."""
        fused = self._fused(node) or [number] * self._trains(Entry(number))
        if fused:
            made = self._append_norm(node, fused)
        elif node.op == "null" and node.name in self._variables:
            # One array, whose gradients are summed.
            made = self._variables[node.name]
        else:
            inputs = tuple(self._place[entry] for entry in node.inputs)
            if self._train and _drops(node):
                made = self._append_dropout(node, number, inputs[0])
            else:
                made = self._tape.add(replace(node, op=node.kind, inputs=inputs))
        if node.op == "null":
            self._variables[node.name] = made
        outputs = self._graph.outputs.get(number, 1)
        self._place |= {Entry(number, k): Entry(made.node, k) for k in range(outputs)}

    def _append_dropout(self, node: Node, number: int, x: Entry) -> Entry:
        if self._seed is None:
            self._seed = self._tape.add(Node("null", SEED, {}, ()))
        attributes = {"p": node.attributes.get("p", "0.5"), "layer": str(number)}
        return self._tape.add(Node("_dropout", node.name, attributes, (x, self._seed)))

    def _trains(self, entry: Entry) -> bool:
        """Return whether the array is normalised by the batch's averages."""
        node = self._graph.nodes[entry.node]
        batch = node.op == "BatchNorm" and not node.read.flag("use_global_stats")
        return self._train and batch and entry.output == 0

    def _fused(self, node: Node) -> list[int]:
        """Return the numbers of the nodes before relu, or clip on a GPU, that are computed with it:
        a normalisation and, maybe, a sum before relu."""
        is_relu = node.op == "relu" or node.attributes.get("act_type") == "relu"
        if not is_relu and not (node.op == "clip" and self._tape.on_gpu):
            return []
        before, found = node.inputs[0], []
        summed = self._graph.nodes[before.node]
        if is_relu and self._uses[before] == 1 and summed.op in _SUMS:
            found.append(before.node)
            before = next(filter(self._ends, summed.inputs), before)
        return [*found, before.node] if self._ends(before) else []

    def _ends(self, entry: Entry) -> bool:
        return self._uses[entry] == 1 and self._trains(entry)

    def _append_norm(self, node: Node, fused: list[int]) -> Entry:
        """Append a normalisation; `node` is that, or relu or clip after the `fused` nodes."""
        norm, read = self._graph.nodes[fused[-1]], "x gamma beta"
        given = {**norm.attributes, **node.attributes}
        names = ("eps", "axis", "fix_gamma", "momentum", "a_min", "a_max")
        attributes = {name: given[name] for name in names if name in given}
        inputs = list(norm.inputs[:3])
        if node is not norm and node.op != "clip":
            attributes["is_relu"] = "True"
        if len(fused) > 1:
            summed, read = self._graph.nodes[fused[0]], "x gamma beta added"
            inputs += [entry for entry in summed.inputs if entry.node != fused[-1]]
        made = "mean inverse" + " factor addend" * self._tape.on_gpu
        attributes |= {"read": read, "made": made}
        places = [self._place[each] for each in (*inputs, *norm.inputs[3:])]
        place = self._tape.add(Node("_norm", norm.name, attributes, tuple(places[: len(inputs)])))
        self._tape.moving[place.node] = places[len(inputs) :]
        return place

    def _needed(self, backward: int) -> set[int]:
        """Return the numbers of the nodes through which a wanted variable changes an output."""
        found = {entry.node for entry in self._wanted}
        for number, node in enumerate(self._tape.nodes[:backward]):
            if node.op not in _CONSTANT and any(entry.node in found for entry in node.inputs):
                found.add(number)
        return found

    def _differentiate(self, number: int, needed: set[int]) -> None:
        """Add the gradients for a node's inputs."""
        node, given = self._tape.nodes[number], self._found.get(number, {})
        if node.op == "null" or number not in needed or not (given or node.op in _LOSSES):
            return
        if node.op not in RULES:
            raise UnsupportedProblem(f"{node.op} {node.name}: its gradient is not computed")
        self._tape.name = node.name
        gradients = RULES[node.op](Of(self._tape, number, node, given))
        for entry, gradient in zip(node.inputs, gradients):
            if gradient is not None and entry.node in needed:
                before = len(self._tape.nodes)
                made = gradient().entry
                # Others of these arrays may get one that is not new, too.
                self._add(entry, made, is_new=made.node >= before)

    def _add(self, entry: Entry, gradient: Entry, is_new: bool = True) -> None:
        found = self._found.setdefault(entry.node, {})
        found[entry.output] = self._tape.added(found.get(entry.output), gradient, is_new)

    def _fixed(self) -> tuple[str, ...]:
        """Return the variables that are fixed gammas of normalisations in training."""
        norms = [node for _, node in self._graph.computed if node.op == "BatchNorm" and self._train]
        gammas = [norm.inputs[1] for norm in norms if norm.read.flag("fix_gamma", True)]
        nodes = [self._graph.nodes[gamma.node] for gamma in gammas]
        return tuple(dict.fromkeys(node.name for node in nodes if node.op == "null"))

    def _averages(self, needed: set[int]) -> tuple[tuple[str, ...], list[Entry]]:
        """Return the variables that are moving averages, and their new values. As MXNet's, those of
        normalisations that no wanted gradient passes through do not move."""
        tape, newest = self._tape, self._tape.newest
        for number, averages in reversed(tape.moving.items()):
            if number not in needed or number not in self._found:
                continue
            norm = tape.nodes[number]
            tape.name = norm.name
            momentum, epsilon = norm.read.number("momentum", 0.9), norm.read.number("eps", 1e-3)
            mean, inverse = (Term(tape, Entry(number, output)) for output in (1, 2))
            variance = 1 / inverse.term("square") - epsilon
            for entry, new in zip(averages, (mean, variance)):
                old = Term(tape, newest.get(entry, entry))
                newest[entry] = (old * momentum + new * (1 - momentum)).entry
        names = tuple(tape.nodes[entry.node].name for entry in newest)
        return names, list(newest.values())
