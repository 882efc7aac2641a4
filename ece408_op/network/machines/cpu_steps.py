"""Steps of a network on the CPU: structures of `kernels/cpu/network/program.h`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...backends.cpu import native, program
from ...backends.cpu.program import Kind
from ...problem import ConvProblem
from ..builder import MOST_AXES, Axis, Batch, Builder, Chain, Convolution, Lowering, Windows
from ..terms import Term, leaf, reading, substituted
from ..values import Value

_BORDERS = {
    "constant": program.Border.FILL,
    "edge": program.Border.NEAREST,
    "reflect": program.Border.MIRRORED,
}
_WINDOWS = {
    "max": program.Pool.LARGEST,
    "avg": program.Pool.AVERAGE,
    "sum": program.Pool.SUM,
}
_REDUCED = {
    "max": program.Reduce.LARGEST,
    "largest number": program.Reduce.LARGEST_NUMBER,
}
_HEADER_FLOATS = program.PACKED_HEADER // 4
_READS = {name: int(read) for name, read in program.Read.__members__.items()}
_TERMS = {name: number for number, name in enumerate(program.TERMS)}


class CpuPlan(NamedTuple):
    """A step without its arrays: its kind, the names of its inputs in the header's order, the bytes
    of the member of the header's union, and the names of its further results; a step may lack some.
    `reads_packed`: a convolution reads packed weights alone, if they could be packed."""

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    of: bytes
    workspace_bytes: int = 0
    reads_packed: bool = False
    also: tuple[str, ...] = ()

    def has_code_of(self, other: Any) -> bool:
        return False


@dataclass(frozen=True)
class CpuSteps(Lowering):
    """Steps for one instruction set; `strict` convolutions sum in float64."""

    isa: str
    strict: bool
    adds_in_place = False

    def pointwise(self, term: Term, y: Value) -> tuple[CpuPlan, dict[str, Value]] | None:
        leaves = term.leaves()
        readings: list[int] = []
        for each, value in leaves:
            how = reading(value, each.shape, y.shape)
            if how is None:
                return None
            # One image has no distance to the next.
            alone = how.kind == "IMAGES" and value.shape[0] == 1
            readings += how.outer, how.count, how.inner, _READS["ALIKE" if alone else how.kind]
        readings += [0] * (4 * (program.MOST_INPUTS - len(leaves)))
        names = {id(each): number for number, (each, _) in enumerate(leaves)}
        ops: list[float] = []
        for each in term.all():
            if id(each) not in names:
                given = [names[id(argument)] for argument in each.arguments]
                names[id(each)] = len(names)
                ops += _TERMS[each.op], *(*given, 0, 0, 0, 0)[:4], 0
                ops += (*each.constants, 0.0, 0.0)[:2]
        sizes = y.elements, y.per_image, len(leaves), len(names) - len(leaves)
        made = program.packed(program.Pointwise, *sizes, *readings, *ops)
        arrays = {f"in{number}": value for number, (_, value) in enumerate(leaves)}
        return CpuPlan("pointwise", Kind.POINTWISE, tuple(arrays), made), arrays

    def copy(self, axes: Sequence[Axis], border: str, fill: float, dtype: str) -> CpuPlan:
        elements = math.prod(axis.size for axis in axes)
        padded = [*reversed(axes), *[Axis(1, 0, 1, 0)] * (MOST_AXES - len(axes))]
        # All sizes, then all first elements ...
        numbers = itertools.chain(*zip(*padded))
        made = program.packed(program.Strided, elements, _BORDERS[border], *numbers, fill)
        return CpuPlan("strided_copy", Kind.COPY, ("x",), made)

    def pool(self, x: Value, y: Value, windows: Windows) -> CpuPlan:
        return CpuPlan("pool", Kind.POOL, ("x",), _pooled(x, y, windows))

    def pool_gradient(self, x: Value, dy: Value, windows: Windows) -> CpuPlan:
        made = _pooled(x, dy, windows)
        return CpuPlan("pool_gradient", Kind.POOL_GRADIENT, ("dy", "x", "pooled"), made)

    def reduce(
        self, kind: str, x: Value, outputs: int, length: int, inner: int, factor: float
    ) -> CpuPlan:
        how = _REDUCED.get(kind, program.Reduce.SUM)
        made = program.packed(program.Reduced, how, outputs, length, inner, factor)
        return CpuPlan("reduce_rows", Kind.REDUCE, ("x",), made)

    def softmax(
        self, x: Value, rows: int, length: int, inner: int, logarithm: bool, scale: float
    ) -> CpuPlan:
        made = program.packed(program.Softmaxed, rows, length, inner, logarithm, scale)
        return CpuPlan("softmax", Kind.SOFTMAX, ("x",), made)

    def lrn(
        self, x: Value, y: Value, size: int, alpha: float, beta: float, knorm: float
    ) -> CpuPlan:
        sizes = x.elements, x.shape[1], math.prod(x.shape[2:]), size
        made = program.packed(program.Lrn, *sizes, alpha, beta, knorm)
        return CpuPlan("lrn", Kind.LRN, ("x",), made)

    def resize(self, x: Value, y: Value, aligned: bool) -> CpuPlan:
        planes = x.shape[0] * x.shape[1]
        sizes = planes, *x.shape[2:], *y.shape[2:], aligned
        made = program.packed(program.Resized, *sizes)
        return CpuPlan("resize", Kind.RESIZE, ("x",), made)

    def data_gradient(self, problem: ConvProblem, adds: bool = False) -> CpuPlan:
        return self._gradient(Kind.DATA_GRADIENT, problem, ("w", "x", "onto"))

    def weight_gradient(self, problem: ConvProblem, adds: bool = False) -> CpuPlan:
        return self._gradient(Kind.WEIGHT_GRADIENT, problem, ("x", "dy", "onto"))

    def _gradient(self, kind: Kind, problem: ConvProblem, inputs: tuple[str, ...]) -> CpuPlan:
        direction = "backward_data" if kind == Kind.DATA_GRADIENT else "backward_weight"
        kernel = native.choose(problem, direction, self.isa, self.strict)
        return CpuPlan(f"{kernel}_{self.isa}", kind, inputs, self._convolution(problem, kernel))

    def norm(self, batch: Batch, names: Collection[str]) -> CpuPlan:
        inputs = ("x", "beta", "gamma", "added")
        made = program.packed(program.Batch, *batch[:5])
        return CpuPlan("norm", Kind.NORM, inputs, made, also=("mean", "inverse"))

    def norm_gradient(self, batch: Batch, names: Collection[str]) -> CpuPlan:
        inputs = ("x", "dy", "mean", "inverse", "gamma", "positive")
        made = program.packed(program.Batch, *batch[:5])
        also = ("dgamma", "dbeta", "dadded")
        return CpuPlan("norm_gradient", Kind.NORM_GRADIENT, inputs, made, also=also)

    def one_hot(self, rows: int, length: int, inner: int) -> CpuPlan:
        made = program.packed(program.Softmaxed, rows, length, inner)
        return CpuPlan("one_hot", Kind.ONE_HOT, ("x",), made)

    def convolve(self, builder: Builder, pending: Convolution, place: Value | None) -> Value:
        if place is not None and not place.dense and place.shape[0] > 1:
            # Kernels write images without gaps.
            return builder.compute(leaf(self.convolve(builder, pending, None)), place)
        problem, after = pending.problem, pending.after
        bounds = (-math.inf, math.inf) if after is None else _bounds(after, pending.sums)
        read = {"x": self._dense(builder, pending.x), "w": pending.w}
        if pending.bias is not None:
            read["bias"] = pending.bias
        if pending.onto is not None:
            read["added"] = self._dense(builder, pending.onto)
        kernel = native.choose(problem, "forward", self.isa, self.strict, pending.w.constant)
        packed = self._packed(builder, pending, kernel)
        if packed is not None:
            read["packed"] = packed
        made = self._convolution(problem, kernel, *(bounds or (-math.inf, math.inf)))
        y = place or builder.empty(pending.shape, builder.constant(pending))
        # The array in the layer's own shape, so that `emit` checks all that the kernel writes.
        own = y.seen(problem.y_shape)
        logged = problem if pending.logged else None
        alone = packed is not None and kernel == _READS_PACKED
        plan = CpuPlan(f"{kernel}_{self.isa}", Kind.CONVOLVE, _CONVOLVED, made, reads_packed=alone)
        builder.emit(plan, own, read, pending.node, logged)
        if after is None or bounds is not None or pending.sums is None:
            return y
        term = substituted(after, pending.sums, leaf(y))
        return builder.compute(term, y) if place else builder.value(Chain(pending.shape, term))

    def _convolution(self, problem: ConvProblem, kernel: str, *bounds: float) -> bytes:
        sizes = native.as_numbers(problem)
        number = native.kernels().index(kernel)
        return program.packed(program.Convolve, *sizes, number, self.strict, *bounds)

    def _packed(self, builder: Builder, pending: Convolution, kernel: str) -> Value | None:
        """Emit the packing of weights, which runs once; `None` if the kernel reads them in
        place."""
        w, bias = pending.w, pending.bias
        if self.strict or not w.constant or (bias is not None and not bias.constant):
            return None
        floats = native.packed_floats(pending.problem, self.isa, kernel)
        if not floats:
            return None

        def packed() -> tuple[Value]:
            read = {"w": builder.claimed(w)}
            if bias is not None:
                read["bias"] = builder.claimed(bias)
            made = self._convolution(pending.problem, kernel)
            plan = CpuPlan("pack", Kind.PACK, ("w", "bias"), made)
            place = builder.empty((_HEADER_FLOATS + floats,), True)
            return (builder.emit(plan, place, read, pending.node),)

        # They are the same for images of any number and size, with these exceptions.
        of = pending.problem
        what = (kernel, floats, of.w_shape, of.stride, of.pad, of.dilate, of.groups)
        rows_and_columns = [size == 1 for size in of.y_shape[2:]]
        return builder.once((*what, *rows_and_columns), [w, bias], packed)[0]

    def _dense(self, builder: Builder, operand: Value | Chain) -> Value:
        """Return a float32 array with contiguous images; those of one image are."""
        if isinstance(operand, Value) and operand.dtype == "float32" and operand.shape[0] == 1:
            return operand if operand.dense else operand.seen(operand.shape)
        return builder.dense(operand)


def _pooled(x: Value, y: Value, windows: Windows) -> bytes:
    along = zip(x.shape[-2:], y.shape[-2:], windows.kernel, windows.stride, windows.pad)
    sizes = _WINDOWS[windows.kind], windows.border, x.shape[0], x.shape[1]
    return program.packed(program.Pooled, *sizes, *itertools.chain(*along))


# The other kernels compute sums that are not finite once more, from weights that are not packed.
_READS_PACKED = "direct"
# Inputs of CONVOLVE.
_CONVOLVED = ("x", "w", "bias", "added", "packed")


def _bounds(after: Term, sums: Term | None) -> tuple[float, float] | None:
    """Return the bounds of a convolution's results that are the same as the epilogue, if any."""
    if after.arguments != (sums,):
        return None
    if after.op == "relu":
        return 0.0, math.inf
    p, q = (*after.constants, math.inf, math.inf)[:2]
    found = {"clip": (p, q), "maximum": (p, math.inf), "minimum": (-math.inf, p)}
    bounds = found.get(after.op)
    return bounds if bounds and bounds[0] <= bounds[1] else None
