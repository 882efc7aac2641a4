"""A graph that grows node by node, and arithmetic on its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ..graph import Entry, Node
from ..node_attributes import Attributes

# Operators of gradients that can be added to an array, their last input; the last one on a GPU.
_ACCUMULATING = ("_data_gradient", "_weight_gradient", "_norm_gradient")


class Tape:
    """Nodes in topological order, for a GPU or the CPU. Equal nodes are made once. If it
    `recomputes`, a backward pass on a GPU computes normalisations again instead of reading them."""

    def __init__(self, on_gpu: bool, recomputes: bool = False) -> None:
        self.nodes: list[Node] = []
        self.on_gpu, self._recomputes = on_gpu, recomputes and on_gpu
        # Moving averages: of normalisations whose gradients do not update them, and newest values.
        self.moving: dict[int, list[Entry]] = {}
        self.newest: dict[Entry, Entry] = {}
        # The name of the nodes that are made.
        self.name = ""
        self._known: dict[object, int] = {}

    def add(self, node: Node) -> Entry:
        """Append a node and return its first output."""
        self.nodes.append(node)
        return Entry(len(self.nodes) - 1)

    def node(self, op: str, inputs: Sequence[Entry], attributes: Mapping[str, object]) -> Entry:
        """Return the first output of a node."""
        texts = {name: str(value) for name, value in attributes.items()}
        key = op, tuple(inputs), tuple(sorted(texts.items()))
        if key not in self._known:
            self._known[key] = self.add(Node(op, self.name, texts, tuple(inputs))).node
        return Entry(self._known[key])

    def again(self, of: Term) -> Term:
        """Return an array of the forward pass for the backward pass to read: computed again if that
        takes one pointwise step and saves memory."""
        norm = self.nodes[of.entry.node]
        is_norm = norm.op == "_norm" and of.entry.output == 0
        if not (self._recomputes and is_norm) or "added" in norm.attributes["read"]:
            return of
        axis = norm.read.integer("axis", 1)
        mean, _, factor, addend = (Term(self, Entry(of.entry.node, n)) for n in range(1, 5))
        y = Term(self, norm.inputs[0]).term("subtract", mean, axis=axis)
        # The same bits: a maximum is found by them.
        y = y.term("multiply_add", factor, addend, axis=axis)
        if norm.read.flag("is_relu"):
            return y.term("relu")
        if not norm.read.is_set("a_min"):
            return y
        return y.term("clip", p=norm.read.number("a_min"), q=norm.read.number("a_max"))

    def added(self, total: Entry | None, more: Entry, is_new: bool) -> Entry:
        """Return the sum of gradients; the last node may be made to add to the total if only this
        sum reads it, because `more` is new."""
        if total is None:
            return more
        last = self.nodes[-1]
        is_last = is_new and total.node < more.node == len(self.nodes) - 1 and more.output == 0
        is_norms = last.op == "_norm_gradient"
        if last.op not in _ACCUMULATING or not is_last or (is_norms and not self.on_gpu):
            return self.node("_term", (total, more), {"term": "add"})
        if not is_norms:
            self._known = {key: n for key, n in self._known.items() if n != more.node}
        attributes = {**last.attributes, "accumulates": "True"}
        self.nodes[-1] = replace(last, inputs=(*last.inputs, total), attributes=attributes)
        return more


def _binary(op: str, op_of_number: str) -> Callable[[Term, Term | float], Term]:
    def apply(self: Term, other: Term | float) -> Term:
        return self.term(op, other) if isinstance(other, Term) else self.term(op_of_number, p=other)

    return apply


@dataclass(frozen=True)
class Term:
    """An array of a tape."""

    tape: Tape
    entry: Entry

    def node(self, op: str, *others: Term, **attributes: object) -> Term:
        """Return the first output of a node on this array and others."""
        inputs = [each.entry for each in (self, *others)]
        return Term(self.tape, self.tape.node(op, inputs, attributes))

    def term(self, op: str, *others: Term, axis: int = 1, **constants: float) -> Term:
        """Return a term of this array and others; those with one axis are along `axis` of the
        others. `constants` are p and q."""
        return self.node("_term", *others, term=op, axis=axis, **constants)

    def constant(self, number: float) -> Term:
        """Return an array of this shape that holds a number."""
        return self.term("constant", p=number)

    def where(self, then: Term, otherwise: Term | float = 0.0) -> Term:
        """Return `then` where this array is positive, else `otherwise`."""
        if not isinstance(otherwise, Term):
            otherwise = then.constant(otherwise)
        return self.term("where", then, otherwise)

    __add__ = _binary("add", "plus")
    __sub__ = _binary("subtract", "minus")
    __mul__ = _binary("multiply", "times")
    __truediv__ = _binary("divide", "over")

    def __rsub__(self, number: float) -> Term:
        return self.term("minus_from", p=number)

    def __rtruediv__(self, number: float) -> Term:
        return self.term("over_from", p=number)

    def __neg__(self) -> Term:
        return self.term("negative")


# Makes the nodes of the gradient for one input; `None` if that is always zero.
Gradient = Optional[Callable[[], Term]]


@dataclass(frozen=True)
class Of:
    """A node whose gradients are wanted: its number, and the gradients for its outputs, by their
    numbers."""

    tape: Tape
    number: int
    node: Node
    given: Mapping[int, Entry]

    @property
    def inputs(self) -> list[Term]:
        return [Term(self.tape, entry) for entry in self.node.inputs]

    @property
    def x(self) -> Term:
        return self.inputs[0]

    @property
    def y(self) -> Term:
        return self.output(0)

    @property
    def dy(self) -> Term:
        """The gradient for the first output."""
        return Term(self.tape, self.given[0])

    @property
    def read(self) -> Attributes:
        return self.node.read

    def output(self, number: int) -> Term:
        return Term(self.tape, Entry(self.number, number))


# Returns the gradients for the node's first inputs, in order; those for the others are zero.
Rule = Callable[[Of], Sequence[Gradient]]
# The gradient for x, from those of y, x, y and a number.
Unary = Callable[[Term, Term, Term, float], Term]
