"""Builder of steps: lowers a graph with known input shapes; operators call its methods, and it
asks a machine's `Lowering` for the plan of each step.

Evaluation is lazy: a convolution, or a chain of pointwise operators, that only one node reads stays
pending until that node decides whether to fuse it into its own launch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Union

from ..errors import UnsupportedProblem
from ..problem import ConvProblem
from .graph import Entry, Graph, Node
from .host_arrays import ITEM_BYTES
from .terms import Term, leaf, reading
from .values import ARENA, LASTING, OUTPUT, Buffer, Lasting, Plan, Step, Steps, Value

# Axes of a strided copy.
MOST_AXES = 6
# Sizes are 32-bit integers in the kernels.
_MOST_ELEMENTS = 2**31 - 1
_NOTHING: Mapping[str, Value] = {}
# What elements beyond an array are: border and fill of `Lowering.copy`.
Border = tuple[str, float]
_ZEROS = "constant", 0.0


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
    it. The sums are added to `onto`, if given; then the epilogue `after`, a term of `sums`, is
    applied, if given. Op times are logged under the layer name `node` if `logged`.
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
        found = [*values_of(self.x), self.w, self.bias, self.onto]
        return [value for value in found if value is not None]

    def changed(self, **fields: Any) -> Convolution:
        """Return it with other fields: several times as fast as `replace`."""
        made = object.__new__(Convolution)
        vars(made).update(vars(self), **fields)
        return made


Operand = Union[Value, Chain, Convolution]
# Lowers a node of a graph on its operands to its results.
Lower = Callable[["Builder", Node, list[Operand]], list[Operand]]


class Axis(NamedTuple):
    """An axis of a strided copy: its `size` in y begins `first` elements before the `held` elements
    of x, which are `stride` apart."""

    size: int
    first: int
    held: int
    stride: int


@dataclass(frozen=True)
class Windows:
    """Pooling windows, (height, width) each. `kind` is "max", "avg" or "sum"; with `border` an
    average counts the padding's zeros."""

    kind: str
    border: bool
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]


class Batch(NamedTuple):
    """Normalisation of an array (images, channels, pixels) by each channel's mean and variance, to
    which `epsilon` is added; relu follows if `is_relu`. The rest is a GPU's: else clip to `bounds`,
    if given; the `momentum` of moving averages; and the elements from an image to the next in x and
    dx, and in y and dy, 0 if images are contiguous."""

    images: int
    channels: int
    pixels: int
    epsilon: float
    is_relu: bool
    bounds: tuple[float, ...] = ()
    momentum: float = 0.9
    x_image: int = 0
    y_image: int = 0


class Lowering(ABC):
    """The steps of one machine at one precision. Arrays of a plan are named "y", "x" and "w".

    Arrays that depend on images are stored as `storage` says for a number of images. Plans read
    and write this type and float32; the results of `reduce` and `softmax` are float32, and so are
    all arrays of gradients.

    `adds_in_place`: a convolution adds its sums to an array that nobody else reads, not to any.
    """

    adds_in_place: bool

    def storage(self, images: int) -> str:
        """Return the type of arrays that depend on this number of images."""
        return "float32"

    @abstractmethod
    def pointwise(self, term: Term, y: Value) -> tuple[Plan, dict[str, Value]] | None:
        """Return the plan that computes a term into y, and the arrays that it reads by name; `None`
        if an input must be broadcast by a copy first."""

    @abstractmethod
    def copy(self, axes: Sequence[Axis], border: str, fill: float, dtype: str) -> Plan:
        """Return a strided copy of at most six axes of a type. Elements beyond x are `fill`, the
        nearest or the mirrored ones: `border` is "constant", "edge" or "reflect"."""

    @abstractmethod
    def pool(self, x: Value, y: Value, windows: Windows) -> Plan:
        """Return the pooling of an array with two axes of pixels."""

    @abstractmethod
    def reduce(
        self, kind: str, x: Value, outputs: int, length: int, inner: int, factor: float
    ) -> Plan:
        """Return the reduction of `length` elements, `inner` apart, to each output: "mean" and
        "sum" are sums times `factor`, "max" the largest, "largest number" ignores NaN."""

    @abstractmethod
    def softmax(
        self, x: Value, rows: int, length: int, inner: int, logarithm: bool, scale: float
    ) -> Plan:
        """Return the softmax, or its logarithm, of rows whose elements are `inner` apart."""

    @abstractmethod
    def lrn(self, x: Value, y: Value, size: int, alpha: float, beta: float, knorm: float) -> Plan:
        """Return MXNet's LRN over `size` adjacent channels."""

    @abstractmethod
    def resize(self, x: Value, y: Value, aligned: bool) -> Plan:
        """Return MXNet's BilinearResize2D."""

    @abstractmethod
    def data_gradient(self, problem: ConvProblem, adds: bool = False) -> Plan:
        """Return the gradient for x of a convolution, from "w" and, as "x", the gradient for y. If
        it `adds`, to an array that it accumulates in, that is also the input "onto"."""

    @abstractmethod
    def weight_gradient(self, problem: ConvProblem, adds: bool = False) -> Plan:
        """Return the gradient for w, from "x" and "dy"; `adds` as for `data_gradient`."""

    @abstractmethod
    def pool_gradient(self, x: Value, dy: Value, windows: Windows) -> Plan:
        """Return the gradient of `pool`, from "dy" and, for a maximum, "x" and its
        result "pooled"."""

    @abstractmethod
    def norm(self, batch: Batch, names: Collection[str]) -> Plan:
        """Return the normalisation of "x" with "beta". If they are among the arrays' `names`, it
        reads "gamma", and what is "added" before relu. Its further results are "mean" and the
        "inverse" of the deviation, and on a GPU "factor" and "addend": it is (x - mean) * factor +
        addend."""

    @abstractmethod
    def norm_gradient(self, batch: Batch, names: Collection[str]) -> Plan:
        """Return the gradient of `norm` for x, from "x", "dy", "mean", "inverse", "gamma" and, for
        relu, its result "positive"; its further results are "dgamma", "dbeta" and "dadded".

        On a GPU it is added to "onto", the same array, if that is among the `names`. "positive" is
        read only with "dadded", and else "factor" and "addend". "new_mean" and "new_variance" come
        from "moving_mean" and "moving_variance", and "zeros" are dx's sums for each channel."""

    @abstractmethod
    def one_hot(self, rows: int, length: int, inner: int) -> Plan:
        """Return y of shape (rows, length, inner), 1 where the index of the second axis equals the
        label x of shape (rows, inner), else 0."""

    def dropout(self, elements: int, kept: float, layer: int) -> Plan:
        """Return the plan that multiplies each element of "x" by 1 / `kept` with that probability,
        else by 0, by random numbers of a `layer` and the "seed", 8 bytes."""
        raise UnsupportedProblem("dropout in training is computed on a GPU only")

    @abstractmethod
    def convolve(self, builder: Builder, pending: Convolution, place: Value | None) -> Value:
        """Emit a convolution's steps into `place`, if given, else into a new array; return it with
        a claim."""


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@dataclass(frozen=True)
class Room:
    """Nested concatenations. `channels` of a result's array, by node number, if the concatenation
    is the beginning of a larger one; and the larger ones, which extend it in place."""

    channels: dict[int, int] = field(default_factory=dict)
    goes_on: set[int] = field(default_factory=set)


class Builder:
    """Builds the steps for `images` images on one machine. Kernels are chosen for `chosen_for`
    images if given. `results` are the output types. `lasting` are arrays of other programs of the
    graph, which these steps may read.

    Buffers are reference-counted. An operand holds a claim on each of its buffers; an operator
    passes it on to `emit`, to `drop`, or with its result. Arrays returned by these methods carry a
    claim, too. An array without claims is overwritten.
    """

    def __init__(
        self,
        lowering: Lowering,
        images: int,
        room: Room | None = None,
        chosen_for: int | None = None,
        results: Sequence[str] = (),
        lasting: Lasting | None = None,
    ) -> None:
        self.lowering = lowering
        self.steps = Steps(images)
        self.node = ""
        self.number = self.readers = 0
        self.room = room or Room()
        # The shapes of the nodes' results, by node number.
        self.shapes: dict[int, tuple[int, ...]] = {}
        # Kernels are chosen for this number of images.
        self.chosen_for = images if chosen_for is None else chosen_for
        # The type of new arrays that depend on images.
        self.storage = lowering.storage(self.chosen_for)
        self._uses: Counter[Entry] = Counter()
        self._counts: dict[int, int] = {}
        self._results = results
        self._lasting = lasting or {}

    def build(self, graph: Graph, inputs: Mapping[str, Value], lower: Lower) -> Steps:
        """Return the steps that compute a graph on these arrays; `lower` lowers one node. Raises
        `UnsupportedProblem` and `InvalidProblem`."""
        self._uses, self._counts = graph.uses, graph.outputs
        found: dict[Entry, Operand] = {}
        for entry, name in graph.variables:
            self._bind(found, entry, self.given(inputs[name]))
        for number, node in graph.computed:
            self._node(found, number, node, lower)
        for number, head in enumerate(graph.heads):
            self._output(found[head], number)
        return self.steps

    def _node(self, found: dict[Entry, Operand], number: int, node: Node, lower: Lower) -> None:
        """Lower a node and bind its results."""
        self.node, self.number, self.readers = node.name, number, self._uses[Entry(number)]
        results = lower(self, node, [found[entry] for entry in node.inputs])
        for output, result in enumerate(results):
            self._bind(found, Entry(number, output), result)
        if self._counts.get(number, 0) > len(results):
            raise UnsupportedProblem(
                f"{node.op} {node.name}: output {self._counts[number] - 1} is not computed"
            )

    def _bind(self, found: dict[Entry, Operand], entry: Entry, result: Operand) -> None:
        """Bind `result` to an array of the graph, with one claim per reader."""
        if entry.output == 0:
            self.shapes[entry.node] = result.shape
        uses = self._uses.get(entry, 0)
        if uses == 0:
            self.drop(result)
            return
        if uses > 1:
            result = self.value(result)
            result.buffer.uses += uses - 1
        if result.shape[:1] != (self.steps.images,) and not self.constant(result):
            self.steps.divisible = False
        found[entry] = result

    def _output(self, operand: Operand, number: int) -> None:
        """Write a result to the output buffer. A result that is the same for all images cannot be
        split into chunks, as each chunk would write all of it."""
        if self.constant(operand):
            self.mixes_images()
        dtype = self._results[number]
        if dtype != self.storage:
            value = self.empty(operand.shape, False, dtype)
            self.into(operand, value)
            self.claimed(value)
        else:
            value = self.value(operand)
        if value.dtype != dtype or not self._is_whole(value) or value.buffer.kind != ARENA:
            value = self.compute(leaf(value), self.empty(value.shape, False, dtype))
        value.buffer.kind, value.buffer.number = OUTPUT, number
        self.steps.outputs.append(value)

    def constant(self, operand: Operand) -> bool:
        """Return whether the operand is the same for all images."""
        if isinstance(operand, Value):
            return operand.constant
        if isinstance(operand, Convolution) and not self.constant(operand.x):
            return False
        return all(value.constant for value in operand.values())

    def mixes_images(self) -> None:
        """Note that the operator computes an image from other images."""
        self.steps.divisible = False

    def given(self, value: Value) -> Operand:
        """Return the operand of a variable, with a claim. Readers convert float16 as they load."""
        value.buffer.uses += 1
        converts = value.dtype == "float16" != self._usual(value.constant)
        return Chain(value.shape, leaf(value)) if converts else value

    def _usual(self, constant: bool) -> str:
        """Return the type of new arrays."""
        return "float32" if constant else self.storage

    def once(
        self,
        recipe: object,
        arrays: Sequence[Operand | None],
        make: Callable[[], tuple[Value, ...]],
    ) -> tuple[Value, ...]:
        """Return the arrays that `make` computes from others, each with a claim. If all depend on
        weights alone, those that another program computed for the same `recipe` are taken."""
        key: list[object] = [recipe]
        for each in arrays:
            if each is not None and not (isinstance(each, Value) and each.constant):
                return make()
            key.append(each and each.identity)
        found = self._lasting.get(tuple(key))
        if found is None:
            found = self.steps.lasting[tuple(key)] = make()
        else:
            for value in found:
                value.buffer.uses += 1
        return found

    def empty(self, shape: Sequence[int], constant: bool, dtype: str = "") -> Value:
        """Return a new array, without a claim, of the usual type if none is given."""
        elements, dtype = math.prod(shape), dtype or self._usual(constant)
        if min(shape, default=1) < 1:
            raise UnsupportedProblem(
                f"{self.node}: an array of shape {tuple(shape)} has no elements"
            )
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
        also: Mapping[str, Value] = _NOTHING,
        direction: str = "forward",
    ) -> Value:
        """Append a step: `plan` computes "y", and the arrays in `also`, from the arrays in `read`.
        Returns y; all results have a claim. `node` defaults to the current node; the others are as
        in `Step`. Raises
        `UnsupportedProblem` for arrays that exceed their buffers."""
        arrays = {"y": y, **also, **read}
        for name, value in arrays.items():
            if value.end > value.buffer.nbytes:
                raise UnsupportedProblem(
                    f"{node or self.node}: {plan.name} would reach byte {value.end} of "
                    f"{name}, which has {value.buffer.nbytes}; this is an error in this package"
                )
        # The location of y decides: outputs, and parts of them, are written in every call, even if
        # they depend on weights alone.
        steps = self.steps.for_weights if y.constant else self.steps.for_images
        steps.append(Step(node or self.node, plan, arrays, problem, direction))
        _release(read.values())
        y.buffer.uses += 1
        for value in also.values():
            value.buffer.uses += 1
        return y

    def drop(self, operand: Operand) -> None:
        """Release an operand's claims."""
        _release(values_of(operand))

    def transposed(self, x: Value, axes: Sequence[int]) -> Value:
        """Transpose x; axis i of the result is axis `axes[i]` of x."""
        strides = _strides(x.shape)
        return self._copied(x, [Axis(x.shape[k], 0, x.shape[k], strides[k]) for k in axes])

    def spread(self, x: Value, shape: Sequence[int]) -> Value:
        """Broadcast x to `shape`, which has as many axes."""
        found = zip(shape, x.shape, _strides(x.shape))
        axes = [Axis(size, 0, size, stride if mine > 1 else 0) for size, mine, stride in found]
        return self._copied(x, axes)

    def windowed(
        self, x: Value, shape: Sequence[int], first: Sequence[int], border: Border = _ZEROS
    ) -> Value:
        """Copy a window: x's first element is at `first` in the result, which may be negative."""
        found = zip(shape, first, x.shape, _strides(x.shape))
        return self._copied(x, [Axis(*each) for each in found], border)

    def part(self, x: Value, axis: int, begin: int, size: int) -> Value:
        """Return elements of an axis: channels are a view, others a copy."""
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        if axis == 1 and not x.constant:
            offset = x.offset + ITEM_BYTES[x.dtype] * begin * math.prod(shape[2:])
            return x.seen(shape, x.image or x.per_image, offset)
        first = [-begin if k == axis else 0 for k in range(len(shape))]
        return self.windowed(self.dense(x), shape, first)

    def _copied(self, x: Value, axes: Sequence[Axis], border: Border = _ZEROS) -> Value:
        if len(axes) > MOST_AXES:
            raise UnsupportedProblem(f"an array of {len(axes)} axes is more than {MOST_AXES}")
        y = self.empty([axis.size for axis in axes], x.constant, x.dtype)
        return self.emit(self.lowering.copy(axes, *border, x.dtype), y, {"x": x})

    def claimed(self, value: Value) -> Value:
        """Return the array with one more claim."""
        value.buffer.uses += 1
        return value

    def value(self, operand: Operand) -> Value:
        """Return the operand as an array; compute it now if it is pending."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Chain):
            return self.compute(operand.term, self._place(operand))
        return self.lowering.convolve(self, operand, None)

    def is_free(self, value: Value, part: bool = False) -> bool:
        """Return whether the reader holds the only claim, so that it may overwrite the array, which
        may be `part` of a buffer."""
        buffer = value.buffer
        return buffer.kind == ARENA and buffer.uses == 1 and (part or self._is_whole(value))

    def _is_whole(self, value: Value) -> bool:
        """Return whether the array fills its buffer."""
        return value.dense and value.buffer.nbytes == ITEM_BYTES[value.dtype] * value.elements

    def dense(self, operand: Operand, apart: bool = False) -> Value:
        """Return the operand as an array of float32, or of the usual type, with contiguous images,
        or with any if they may be `apart`."""
        value = self.value(operand)
        fits = value.dtype in ("float32", self._usual(value.constant))
        if (apart or value.dense) and fits:
            return value
        return self.compute(leaf(value), self.empty(value.shape, value.constant))

    def single(self, operand: Operand) -> Value:
        """Return the operand as a float32 array with contiguous images."""
        if isinstance(operand, Chain) and self.storage != "float32":
            y = self.empty(operand.shape, self.constant(operand), "float32")
            return self.compute(operand.term, y)
        value = self.dense(operand)
        if value.dtype == "float32":
            return value
        return self.compute(leaf(value), self.empty(value.shape, value.constant, "float32"))

    def chain(self, operand: Operand) -> Term:
        """Return the operand's elements as a term; a pending convolution is computed."""
        return operand.term if isinstance(operand, Chain) else leaf(self.value(operand))

    def pointwise(
        self, shape: Sequence[int], op: str, *terms: Term, constants: tuple[float, ...] = ()
    ) -> Chain:
        """Return a chain that applies one more operator to terms; long terms are computed first."""
        term = Term(op, terms, constants)
        if not term.fits():
            term = Term(op, tuple(self._ended(each) for each in terms), constants)
        return Chain(tuple(shape), term)

    def unary(self, operand: Operand, op: str, *constants: float) -> Operand:
        """Apply an operator of one argument; a convolution applies it in its epilogue."""
        if isinstance(operand, Convolution):
            sums = operand.sums or Term("")
            after = Term(op, (operand.after or sums,), constants)
            return operand.changed(sums=sums, after=after)
        return self.pointwise(operand.shape, op, self.chain(operand), constants=constants)

    def view(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """Return the operand viewed as another shape with the same number of elements."""
        shape = tuple(shape)
        if isinstance(operand, Convolution):
            return operand.changed(shape=shape)
        value = self.value(operand)
        if not value.dense and shape[:1] != value.shape[:1]:
            value = self.dense(value)
        return value.seen(shape, value.image)

    def into(self, operand: Operand, y: Value) -> None:
        """Compute the operand into `y`, an array of its shape."""
        if isinstance(operand, Convolution) and y.dtype in ("float32", self.storage):
            self.drop(self.lowering.convolve(self, operand, y))
        else:
            self.drop(self.compute(self.chain(operand), y))

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
                return value.seen(chain.shape)
        return self.empty(chain.shape, self.constant(chain))

    def compute(self, term: Term, y: Value) -> Value:
        """Compute a term into an array; return it with a claim."""
        made = self.lowering.pointwise(term, y)
        while made is None:
            term = self._spread(term, y.shape)
            made = self.lowering.pointwise(term, y)
        return self.emit(made[0], y, made[1])

    def _spread(self, term: Term, shape: tuple[int, ...]) -> Term:
        """Return the term with inputs broadcast by a copy for which `reading` has no indexing."""
        if term.value is None:
            arguments = tuple(self._spread(each, shape) for each in term.arguments)
            return Term(term.op, arguments, term.constants)
        if reading(term.value, term.shape, shape) is not None:
            return term
        value = self.dense(term.value).seen(term.shape)
        return leaf(self.spread(value, shape))


def _release(values: Iterable[Value]) -> None:
    for value in values:
        assert value.buffer.uses > 0, "a claim that nobody has made"
        value.buffer.uses -= 1


def values_of(operand: Operand) -> list[Value]:
    """Return the arrays that an operand reads, or is."""
    return [operand] if isinstance(operand, Value) else operand.values()
