"""From a graph and the shapes of its inputs to steps: what operators use to say what they compute.

Results are computed as late as possible: a convolution, or a chain of pointwise operators, that
only one node reads is pending until that node has seen whether it can be done in the same launch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Union

from ...errors import UnsupportedProblem
from ...problem import ConvProblem
from ..cuda.kernel_plan import Defines, Kernel, Plan, Target
from ..cuda.kernels import catalog, tuned
from . import pointwise, strided_copy
from .graph import Entry, Graph, Node
from .host_arrays import ITEM_BYTES
from .pointwise import Term, leaf
from .values import ARENA, LASTING, OUTPUT, Buffer, Step, Steps, Value

# Sizes are 32-bit integers in the kernels.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(eq=False)
class Chain:
    """Pointwise operators that are not computed yet."""

    shape: tuple[int, ...]
    term: Term

    def values(self) -> list[Value]:
        return self.term.values()


@dataclass(eq=False)
class Convolution:
    """A convolution that is not computed yet, seen as an array of `shape`.

    x may be a chain of pointwise operators, done as the kernel reads it where it can do that. Sums
    are added to `onto`, in place, if that is given, and then become what `after` makes of
    `sums`, if there is any. `node` is the layer's name, of which there are op times if `logged`.
    """

    node: str
    logged: bool
    shape: tuple[int, ...]
    problem: ConvProblem
    x: Value | Chain
    w: Value
    bias: Value | None
    onto: Value | None = None
    sums: Term | None = None
    after: Term | None = None

    def values(self) -> list[Value]:
        found = [*_values(self.x), self.w, self.bias, self.onto]
        return [value for value in found if value is not None]


Operand = Union[Value, Chain, Convolution]
# The results of a node of a graph on its operands.
Lower = Callable[["Builder", Node, list[Operand]], list[Operand]]


@dataclass(frozen=True)
class Room:
    """Concatenations, by number, that are the beginnings of others: the channels that they have to
    have room for; and those that go on with such a one."""

    channels: dict[int, int] = field(default_factory=dict)
    goes_on: set[int] = field(default_factory=set)


class Builder:
    """Makes the steps for a number of images on a GPU, by the kernels that are the best for
    `chosen_for` images, or for these; the outputs are of the types `results`.

    A buffer counts claims on it. An operand brings a claim on each buffer that it has to do with:
    it is to be handed on, to `emit`, to `drop`, or with what the operator returns. What these
    methods return brings one, too. An array without claims is computed onto.
    """

    def __init__(
        self,
        gpu: Target,
        precision: str,
        images: int,
        room: Room | None = None,
        chosen_for: int | None = None,
        results: Sequence[str] = (),
    ) -> None:
        self.gpu = gpu
        self.steps = Steps(images)
        self.node = ""
        self.number = 0
        self.room = room or Room()
        # The shapes of the nodes' results, by number.
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._precision = precision
        # The number of images that kernels are chosen for.
        self._chosen_for = images if chosen_for is None else chosen_for
        self._uses: Counter[Entry] = Counter()
        self._results = results

    def build(self, graph: Graph, inputs: Mapping[str, Value], lower: Lower) -> Steps:
        """The steps of a graph on these arrays; `lower` knows the operators. Raises
        `UnsupportedProblem` and `InvalidProblem`."""
        self._uses = graph.uses()
        found: dict[Entry, Operand] = {}
        for number, name in graph.variables():
            self._bind(found, Entry(number), self.given(inputs[name]))
        for number, node in graph.computed():
            self.node, self.number = node.name, number
            results = lower(self, node, [found[entry] for entry in node.inputs])
            for output, result in enumerate(results):
                self._bind(found, Entry(number, output), result)
            for entry in self._uses:
                if entry.node == number and entry.output >= len(results):
                    raise UnsupportedProblem(
                        f"{node.op} {node.name}: output {entry.output} is not computed"
                    )
        for number, head in enumerate(graph.heads):
            self._output(found[head], number)
        return self.steps

    def _bind(self, found: dict[Entry, Operand], entry: Entry, result: Operand) -> None:
        """Have `result` be an array of the graph, with a claim for each reader."""
        if entry.output == 0:
            self.shapes[entry.node] = result.shape
        uses = self._uses[entry]
        if uses == 0:
            self.drop(result)
            return
        if uses > 1:
            result = self.value(result)
            result.buffer.uses += uses - 1
        if not self.constant(result) and result.shape[:1] != (self.steps.images,):
            self.steps.divisible = False
        found[entry] = result

    def _output(self, operand: Operand, number: int) -> None:
        """Write a result where it leaves the GPU from. A result that is the same for all images has
        no chunks: each would write all of it."""
        if self.constant(operand):
            self.mixes_images()
        dtype = self._results[number]
        if dtype != "float32":
            value = self._compute(self.chain(operand), self.empty(operand.shape, False, dtype))
        else:
            value = self.value(operand)
        if not self._is_whole(value) or value.buffer.kind != ARENA:
            value = self._compute(leaf(value), self.empty(value.shape, False))
        value.buffer.kind, value.buffer.number = OUTPUT, number
        self.steps.outputs.append(value)

    def constant(self, operand: Operand) -> bool:
        """Whether it is the same for all images."""
        return all(value.constant for value in _values(operand))

    def mixes_images(self) -> None:
        """Note that the operator computes an image from other images."""
        self.steps.divisible = False

    def given(self, value: Value) -> Operand:
        """The operand for a variable, with a claim. Halves are converted where they are read."""
        value = self.claimed(value)
        return Chain(value.shape, leaf(value)) if value.dtype == "float16" else value

    def empty(self, shape: Sequence[int], constant: bool, dtype: str = "float32") -> Value:
        """A new array, without a claim."""
        elements = math.prod(shape)
        if elements > _MOST_ELEMENTS:
            raise UnsupportedProblem(
                f"{self.node}: an array of shape {tuple(shape)} has more than {_MOST_ELEMENTS} "
                "elements; use a smaller batch"
            )
        buffer = Buffer(LASTING if constant else ARENA, ITEM_BYTES[dtype] * elements)
        return Value(buffer, tuple(shape), dtype=dtype)

    def emit(
        self,
        plan: Plan,
        y: Value,
        read: Mapping[str, Value],
        node: str | None = None,
        problem: ConvProblem | None = None,
    ) -> Value:
        """Have a plan compute "y" from the arrays that it reads; returns y. It is for the node that
        is at hand, unless another one is named. Raises `UnsupportedProblem` for arrays that reach
        beyond their memory."""
        for name, value in (("y", y), *read.items()):
            if value.end > value.buffer.nbytes:
                raise UnsupportedProblem(
                    f"{node or self.node}: {plan.kernel.name} would reach byte {value.end} of "
                    f"{name}, which has {value.buffer.nbytes}; this is an error in this package"
                )
        # By where y lies: a result, or a part of one, is written in every call, also if all that it
        # is made of is weights.
        steps = self.steps.for_weights if y.constant else self.steps.for_images
        steps.append(Step(node or self.node, plan, {"y": y, **read}, problem))
        for value in read.values():
            self.drop(value)
        return self.claimed(y)

    def drop(self, operand: Operand) -> None:
        """Give up an operand's claims."""
        for value in _values(operand):
            assert value.buffer.uses > 0, "a claim that nobody has made"
            value.buffer.uses -= 1

    def claimed(self, value: Value) -> Value:
        """The array with one more claim."""
        value.buffer.uses += 1
        return value

    def value(self, operand: Operand) -> Value:
        """The operand as an array, computed now if it has not been."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Chain):
            return self._compute(operand.term, self._place(operand))
        return self._convolve(operand)

    def is_free(self, value: Value) -> bool:
        """Whether the one claim on the array is its reader's, who can compute onto it."""
        buffer = value.buffer
        return buffer.kind == ARENA and buffer.uses == 1 and self._is_whole(value)

    def _is_whole(self, value: Value) -> bool:
        """Whether nothing else is in its memory."""
        return value.dense and value.buffer.nbytes == ITEM_BYTES[value.dtype] * value.elements

    def dense(self, operand: Operand) -> Value:
        """As `value`, of floats, with the images one behind the other."""
        value = self.value(operand)
        if value.dense and value.dtype == "float32":
            return value
        return self._compute(leaf(value), self.empty(value.shape, value.constant))

    def chain(self, operand: Operand) -> Term:
        """The operand's elements as a term; a convolution is computed."""
        return operand.term if isinstance(operand, Chain) else leaf(self.value(operand))

    def pointwise(self, shape: Sequence[int], form: str, *terms: Term) -> Chain:
        """The chain of one more operator on terms, which are computed first where it gets long."""
        term = Term(form, terms)
        if not term.fits():
            term = Term(form, tuple(self._ended(each) for each in terms))
        return Chain(tuple(shape), term)

    def unary(self, operand: Operand, form: str) -> Operand:
        """C of {0}, done as a convolution's sums are stored if the operand is one."""
        if isinstance(operand, Convolution):
            sums = operand.sums or Term("")
            return replace(operand, sums=sums, after=Term(form, (operand.after or sums,)))
        return self.pointwise(operand.shape, form, self.chain(operand))

    def view(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """The operand as an array of another shape, of as many elements."""
        shape = tuple(shape)
        if isinstance(operand, Convolution):
            return replace(operand, shape=shape)
        value = self.value(operand)
        if not value.dense and shape[:1] != value.shape[:1]:
            value = self.dense(value)
        # The distance between images is of the old shape.
        return replace(value, shape=shape, image=0 if value.dense else value.image)

    def into(self, operand: Operand, y: Value) -> None:
        """Compute the operand where `y` lies, an array of its shape."""
        if isinstance(operand, Convolution):
            self.drop(self._convolve(operand, y))
        else:
            self.drop(self._compute(self.chain(operand), y))

    def _ended(self, term: Term) -> Term:
        """The same as an array, computed now unless it is one."""
        if term.value is not None:
            return term
        shape = tuple(map(max, zip(*(each.shape for each in term.all() if each.value))))
        return leaf(self.value(Chain(shape, term)))

    def _place(self, chain: Chain) -> Value:
        """Where to compute a chain: onto an array that nobody else reads, if there is one."""
        for each in chain.term.all():
            value = each.value
            if value is not None and self.is_free(value) and each.shape == chain.shape:
                return replace(value, shape=chain.shape)
        return self.empty(chain.shape, self.constant(chain))

    def _compute(self, term: Term, y: Value) -> Value:
        made = pointwise.plan(term, y.shape, y)
        while made is None:
            term = self._spread(term, y.shape)
            made = pointwise.plan(term, y.shape, y)
        return self.emit(made[0], y, made[1])

    def _spread(self, term: Term, shape: tuple[int, ...]) -> Term:
        """The term with an input copied to the shape, one that pointwise.cu cannot spread."""
        if term.value is None:
            return Term(term.form, tuple(self._spread(each, shape) for each in term.arguments))
        if pointwise.reading(term.value, term.shape, shape) is not None:
            return term
        value = replace(self.dense(term.value), shape=term.shape)
        y = self.empty(shape, value.constant)
        return leaf(self.emit(strided_copy.spread(value, shape), y, {"x": value}))

    def _convolve(self, asked: Convolution, place: Value | None = None) -> Value:
        """The convolution as an array, at `place` if one is given."""
        onto, after = asked.onto, asked.after
        kernel, plan = self._plan(asked.problem, onto is not None)
        activates = after is None or kernel.family.activates(onto is not None)
        # A kernel writes images of the layer, which may be seen as other ones.
        fits = place is None or place.dense or place.shape[:1] == (asked.problem.batch,)
        if place is not None and not (fits and onto is None and activates and kernel.family.spaced):
            return self._compute(leaf(self._convolve(asked)), place)
        if onto is not None:
            self.drop(onto)
            y = replace(onto, shape=asked.shape)
        else:
            y = place or self.empty(asked.shape, self.constant(asked))
        defines: Defines = () if y.dense else (("OUT_IMAGE", f"{y.image}u"),)
        if after is not None and activates:
            text = pointwise.statements(after, {id(asked.sums): "v"}, "v")
            defines = (*defines, ("ACTIVATE(v)", text))
        of_x = _prelude(asked.x) if kernel.family.prelude else None
        if of_x is None:
            of_x = Prelude(self.dense(asked.x), {}, ())
        y = self._launched(asked, plan, (*defines, *of_x.defines), of_x, y)
        if activates or after is None or asked.sums is None:
            return y
        return self.value(Chain(asked.shape, substituted(after, asked.sums, leaf(y))))

    def _launched(
        self, asked: Convolution, plan: Plan, defines: Defines, of_x: Prelude, y: Value
    ) -> Value:
        """A convolution's plan with further macros; what depends on weights alone is done once."""
        read = {"x": of_x.x, "w": asked.w, **of_x.arrays}
        if asked.bias is not None:
            read["bias"] = asked.bias
        apart = plan.apart
        if apart is not None and asked.w.constant and not of_x.x.constant:
            weights = of_x.added_to(replace(apart.weights, defines=(*plan.defines, *defines)))
            place = self.empty((apart.nbytes // 4,), True)
            w = self.claimed(asked.w)
            read["prepared"] = self.emit(weights, place, {"w": w}, asked.node)
            plan = apart.images
        plan = of_x.added_to(replace(plan, defines=(*plan.defines, *defines), apart=None))
        # In the layer's own shape, so that `emit` sees all that the kernel writes.
        image = 0 if y.dense else y.image
        own = replace(y, shape=asked.problem.y_shape, image=image)
        made = self.emit(plan, own, read, asked.node, asked.problem if asked.logged else None)
        return replace(made, shape=y.shape)

    def _plan(self, problem: ConvProblem, accumulate: bool) -> tuple[Kernel, Plan]:
        """The best kernel for a convolution, and its plan."""
        batch = problem.batch * self._chosen_for // max(1, self.steps.images)
        like = replace(problem, batch=max(1, batch))
        choice = tuned.best(like, self.gpu, self._precision)
        capability = self.gpu.capability
        plan = choice.kernel.plan(problem, capability, accumulate, choice.layout)
        if not plan.constants:
            return choice.kernel, plan
        # Constants are a module's, which several layers may use at once.
        kernel = catalog.default(like, "forward", capability, self._precision)
        return kernel, kernel.plan(problem, capability, accumulate)


@dataclass(frozen=True)
class Prelude:
    """What a convolution reads: x, arrays with an element for each channel, and the macros that say
    how x lies, and what becomes of it."""

    x: Value
    arrays: Mapping[str, Value]
    defines: Defines

    def added_to(self, plan: Plan) -> Plan:
        """The plan of which every launch takes the arrays."""
        if "CONVERT(v,c)" not in dict(self.defines):
            return plan
        launches = tuple(
            replace(launch, arguments=(*launch.arguments, *_PRELUDE)) for launch in plan.launches
        )
        return replace(plan, launches=launches)


# What functions with a PRELUDE take besides.
_PRELUDE = ("factors", "addends")


def _prelude(operand: Value | Chain) -> Prelude | None:
    """An array, or a chain on one and at most two more with an element for each channel, as a
    prelude; `None` if it is none."""
    if isinstance(operand, Value):
        operand = Chain(operand.shape, leaf(operand))
    leaves = [each for each in operand.term.all() if each.value is not None]
    of_channels = (1, operand.shape[1], *[1] * (len(operand.shape) - 2))
    # One image of one pixel has an element for each channel, too.
    x = next((each for each in leaves if each.shape == operand.shape), None)
    others = [each for each in leaves if each is not x]
    if x is None or x.value is None or len(others) > len(_PRELUDE):
        return None
    if any(each.shape != of_channels for each in others):
        return None
    if any(each.value is not None and each.value.dtype != "float32" for each in leaves):
        return None
    value = x.value
    defines: Defines = () if value.dense else (("IN_IMAGE", f"{value.image}u"),)
    if operand.term is not x:
        names = dict(zip(map(id, others), _PRELUDE))
        start = {id(x): "v", **{key: f"__ldg({name}+c)" for key, name in names.items()}}
        text = pointwise.statements(operand.term, start, "v")
        defines = (*defines, ("CONVERT(v,c)", text))
    arrays = {name: each.value for name, each in zip(_PRELUDE, others) if each.value is not None}
    return Prelude(value, arrays, defines)


def substituted(term: Term, old: Term, new: Term) -> Term:
    """A term of one argument at a time with what it begins with exchanged."""
    if term is old:
        return new
    return Term(term.form, tuple(substituted(each, old, new) for each in term.arguments))


def _values(operand: Operand) -> list[Value]:
    return [operand] if isinstance(operand, Value) else operand.values()
