"""Builder of steps: lowers a graph with known input shapes; operators call its methods.

Evaluation is lazy: a convolution, or a chain of pointwise operators, that only one node reads stays
pending until that node decides whether to fuse it into its own launch.
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
    """Pending pointwise operators."""

    shape: tuple[int, ...]
    term: Term

    def values(self) -> list[Value]:
        return self.term.values()


@dataclass(eq=False)
class Convolution:
    """A pending convolution, viewed as an array of `shape`.

    x may be a chain of pointwise operators, fused into the kernel's loads if the kernel supports
    it. The sums are added in place to `onto`, if given; then the epilogue `after`, a C expression
    of `sums`, is applied, if given. Op times are logged under the layer name `node` if `logged`.
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
# Lowers a node of a graph on its operands to its results.
Lower = Callable[["Builder", Node, list[Operand]], list[Operand]]


@dataclass(frozen=True)
class Room:
    """Nested concatenations. `channels` of a result's array, by node number, if the concatenation
    is the beginning of a larger one; and the larger ones, which extend it in place."""

    channels: dict[int, int] = field(default_factory=dict)
    goes_on: set[int] = field(default_factory=set)


class Builder:
    """Builds the steps for `images` images on one GPU. Kernels are chosen for `chosen_for` images
    if given. `results` are the output types.

    Buffers are reference-counted. An operand holds a claim on each of its buffers; an operator
    passes it on to `emit`, to `drop`, or with its result. Arrays returned by these methods carry a
    claim, too. An array without claims is overwritten.
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
        # The shapes of the nodes' results, by node number.
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._precision = precision
        # Kernels are chosen for this number of images.
        self._chosen_for = images if chosen_for is None else chosen_for
        self._uses: Counter[Entry] = Counter()
        self._results = results

    def build(self, graph: Graph, inputs: Mapping[str, Value], lower: Lower) -> Steps:
        """Return the steps that compute a graph on these arrays; `lower` lowers one node. Raises
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
        """Bind `result` to an array of the graph, with one claim per reader."""
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
        """Write a result to the output buffer. A result that is the same for all images cannot be
        split into chunks, as each chunk would write all of it."""
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
        """Return whether the operand is the same for all images."""
        return all(value.constant for value in _values(operand))

    def mixes_images(self) -> None:
        """Note that the operator computes an image from other images."""
        self.steps.divisible = False

    def given(self, value: Value) -> Operand:
        """Return the operand of a variable, with a claim. Readers convert float16 as they load."""
        value = self.claimed(value)
        return Chain(value.shape, leaf(value)) if value.dtype == "float16" else value

    def empty(self, shape: Sequence[int], constant: bool, dtype: str = "float32") -> Value:
        """Return a new array, without a claim."""
        if min(shape, default=1) < 1:
            raise UnsupportedProblem(
                f"{self.node}: an array of shape {tuple(shape)} has no elements"
            )
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
        """Append a step: `plan` computes "y" from the arrays in `read`. Returns y. `node` defaults
        to the current node. Raises `UnsupportedProblem` for arrays that exceed their buffers."""
        for name, value in (("y", y), *read.items()):
            if value.end > value.buffer.nbytes:
                raise UnsupportedProblem(
                    f"{node or self.node}: {plan.kernel.name} would reach byte {value.end} of "
                    f"{name}, which has {value.buffer.nbytes}; this is an error in this package"
                )
        # The location of y decides: outputs, and parts of them, are written in every call, even if
        # they depend on weights alone.
        steps = self.steps.for_weights if y.constant else self.steps.for_images
        steps.append(Step(node or self.node, plan, {"y": y, **read}, problem))
        for value in read.values():
            self.drop(value)
        return self.claimed(y)

    def drop(self, operand: Operand) -> None:
        """Release an operand's claims."""
        for value in _values(operand):
            assert value.buffer.uses > 0, "a claim that nobody has made"
            value.buffer.uses -= 1

    def claimed(self, value: Value) -> Value:
        """Return the array with one more claim."""
        value.buffer.uses += 1
        return value

    def value(self, operand: Operand) -> Value:
        """Return the operand as an array; compute it now if it is pending."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Chain):
            return self._compute(operand.term, self._place(operand))
        return self._convolve(operand)

    def is_free(self, value: Value) -> bool:
        """Return whether the reader holds the only claim, so that it may overwrite the array."""
        buffer = value.buffer
        return buffer.kind == ARENA and buffer.uses == 1 and self._is_whole(value)

    def _is_whole(self, value: Value) -> bool:
        """Return whether the array fills its buffer."""
        return value.dense and value.buffer.nbytes == ITEM_BYTES[value.dtype] * value.elements

    def dense(self, operand: Operand) -> Value:
        """Return the operand as a float32 array with contiguous images."""
        value = self.value(operand)
        if value.dense and value.dtype == "float32":
            return value
        return self._compute(leaf(value), self.empty(value.shape, value.constant))

    def chain(self, operand: Operand) -> Term:
        """Return the operand's elements as a term; a pending convolution is computed."""
        return operand.term if isinstance(operand, Chain) else leaf(self.value(operand))

    def pointwise(self, shape: Sequence[int], form: str, *terms: Term) -> Chain:
        """Return a chain that applies one more operator to terms; long terms are computed first."""
        term = Term(form, terms)
        if not term.fits():
            term = Term(form, tuple(self._ended(each) for each in terms))
        return Chain(tuple(shape), term)

    def unary(self, operand: Operand, form: str) -> Operand:
        """Apply the C expression `form` of {0}; a convolution applies it in its epilogue."""
        if isinstance(operand, Convolution):
            sums = operand.sums or Term("")
            return replace(operand, sums=sums, after=Term(form, (operand.after or sums,)))
        return self.pointwise(operand.shape, form, self.chain(operand))

    def view(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """Return the operand viewed as another shape with the same number of elements."""
        shape = tuple(shape)
        if isinstance(operand, Convolution):
            return replace(operand, shape=shape)
        value = self.value(operand)
        if not value.dense and shape[:1] != value.shape[:1]:
            value = self.dense(value)
        return replace(value, shape=shape)

    def into(self, operand: Operand, y: Value) -> None:
        """Compute the operand into `y`, an array of its shape."""
        if isinstance(operand, Convolution):
            self.drop(self._convolve(operand, y))
        else:
            self.drop(self._compute(self.chain(operand), y))

    def _ended(self, term: Term) -> Term:
        """Return the term as a leaf: computed to an array, unless it is one already."""
        if term.value is not None:
            return term
        shape = tuple(map(max, zip(*(each.shape for each in term.all() if each.value))))
        return leaf(self.value(Chain(shape, term)))

    def _place(self, chain: Chain) -> Value:
        """Return the array to compute a chain into: an input that nobody else reads, if any."""
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
        """Return the term with an input broadcast by a copy, for which pointwise.cu has no
        indexing."""
        if term.value is None:
            return Term(term.form, tuple(self._spread(each, shape) for each in term.arguments))
        if pointwise.reading(term.value, term.shape, shape) is not None:
            return term
        value = replace(self.dense(term.value), shape=term.shape)
        y = self.empty(shape, value.constant)
        return leaf(self.emit(strided_copy.spread(value, shape), y, {"x": value}))

    def _convolve(self, pending: Convolution, place: Value | None = None) -> Value:
        """Compute the convolution into `place`, if given, else into a new array."""
        onto, after = pending.onto, pending.after
        kernel, plan = self._plan(pending.problem, onto is not None)
        activates = after is None or kernel.family.activates(onto is not None)
        # The kernel writes images of the layer; `place` may be viewed as images of another shape.
        fits = place is None or place.dense or place.shape[:1] == (pending.problem.batch,)
        if place is not None and not (fits and onto is None and activates and kernel.family.spaced):
            return self._compute(leaf(self._convolve(pending)), place)
        if onto is not None:
            self.drop(onto)
            y = replace(onto, shape=pending.shape)
        else:
            y = place or self.empty(pending.shape, self.constant(pending))
        defines: Defines = () if y.dense else (("OUT_IMAGE", f"{y.image}u"),)
        if after is not None and activates:
            text = pointwise.statements(after, {id(pending.sums): "v"}, "v")
            defines = (*defines, ("ACTIVATE(v)", text))
        of_x = _prelude(pending.x) if kernel.family.prelude else None
        if of_x is None:
            of_x = Prelude(self.dense(pending.x), {}, ())
        y = self._launched(pending, plan, (*defines, *of_x.defines), of_x, y)
        if activates or after is None or pending.sums is None:
            return y
        return self.value(Chain(pending.shape, substituted(after, pending.sums, leaf(y))))

    def _launched(
        self, pending: Convolution, plan: Plan, defines: Defines, of_x: Prelude, y: Value
    ) -> Value:
        """Emit a convolution's plan with further macros; preparation that depends only on weights
        runs once."""
        read = {"x": of_x.x, "w": pending.w, **of_x.arrays}
        if pending.bias is not None:
            read["bias"] = pending.bias
        apart = plan.apart
        if apart is not None and pending.w.constant and not of_x.x.constant:
            weights = of_x.added_to(replace(apart.weights, defines=(*plan.defines, *defines)))
            place = self.empty((apart.nbytes // 4,), True)
            w = self.claimed(pending.w)
            read["prepared"] = self.emit(weights, place, {"w": w}, pending.node)
            plan = apart.images
        plan = of_x.added_to(replace(plan, defines=(*plan.defines, *defines), apart=None))
        # The array in the layer's own shape, so that `emit` checks all that the kernel writes.
        own = replace(y, shape=pending.problem.y_shape)
        made = self.emit(plan, own, read, pending.node, pending.problem if pending.logged else None)
        return replace(made, shape=y.shape)

    def _plan(self, problem: ConvProblem, accumulate: bool) -> tuple[Kernel, Plan]:
        """Return the best kernel for a convolution, and its plan."""
        batch = problem.batch * self._chosen_for // max(1, self.steps.images)
        like = replace(problem, batch=max(1, batch))
        choice = tuned.best(like, self.gpu, self._precision)
        capability = self.gpu.capability
        plan = choice.kernel.plan(problem, capability, accumulate, choice.layout)
        if not plan.constants:
            return choice.kernel, plan
        # Constant memory belongs to a module, which several layers may use at the same time.
        kernel = catalog.default(like, "forward", capability, self._precision)
        return kernel, kernel.plan(problem, capability, accumulate)


@dataclass(frozen=True)
class Prelude:
    """The input of a convolution: x, arrays with one element per channel, and the macros that
    define x's layout and how its elements are transformed."""

    x: Value
    arrays: Mapping[str, Value]
    defines: Defines

    def added_to(self, plan: Plan) -> Plan:
        """Return the plan with the arrays added to every launch."""
        if "CONVERT(v,c)" not in dict(self.defines):
            return plan
        launches = tuple(
            replace(launch, arguments=(*launch.arguments, *_PRELUDE)) for launch in plan.launches
        )
        return replace(plan, launches=launches)


# Additional arguments of kernels compiled with a PRELUDE.
_PRELUDE = ("factors", "addends")


def _prelude(operand: Value | Chain) -> Prelude | None:
    """Return the prelude for an array, or for a chain on one array and at most two others with one
    element per channel; `None` for other operands."""
    if isinstance(operand, Value):
        operand = Chain(operand.shape, leaf(operand))
    leaves = [each for each in operand.term.all() if each.value is not None]
    of_channels = (1, operand.shape[1], *[1] * (len(operand.shape) - 2))
    # An image of one pixel, too, has one element per channel.
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
    """Return a single-argument term with `old`, where it starts, replaced by `new`."""
    if term is old:
        return new
    return Term(term.form, tuple(substituted(each, old, new) for each in term.arguments))


def _values(operand: Operand) -> list[Value]:
    return [operand] if isinstance(operand, Value) else operand.values()
