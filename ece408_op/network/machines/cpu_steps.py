"""Steps of a network on the CPU: structures of `kernels/cpu/network/program.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...backends.cpu import native, program
from ...backends.cpu.program import Kind
from ...problem import ConvProblem
from ..builder import MOST_AXES, Axis, Builder, Chain, Convolution, Lowering, Windows
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


@dataclass(frozen=True)
class CpuPlan:
    """A step without its arrays: its kind, the names of its inputs in the header's order ("" for
    none), and the member of the header's union."""

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    of: Any
    workspace_bytes: int = 0

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
        found = [reading(value, each.shape, y.shape) for each, value in leaves]
        made = program.Pointwise(y.elements, y.per_image, len(leaves), 0)
        for number, how in enumerate(found):
            if how is None:
                return None
            # One image has no distance to the next.
            alone = how.kind == "IMAGES" and leaves[number][1].shape[0] == 1
            kind = program.Read.ALIKE if alone else program.Read[how.kind]
            made.readings[number] = program.Reading(how.outer, how.count, how.inner, kind)
        names = {id(each): number for number, (each, _) in enumerate(leaves)}
        for each in term.all():
            if id(each) in names:
                continue
            op = made.op[made.ops]
            op.op = program.TERMS.index(each.op)
            for number, argument in enumerate(each.arguments):
                op.arguments[number] = names[id(argument)]
            op.p, op.q = (*each.constants, 0.0, 0.0)[:2]
            names[id(each)] = len(leaves) + made.ops
            made.ops += 1
        arrays = {f"in{number}": value for number, (_, value) in enumerate(leaves)}
        return CpuPlan("pointwise", Kind.POINTWISE, tuple(arrays), made), arrays

    def copy(self, axes: Sequence[Axis], border: str, fill: float) -> CpuPlan:
        elements = math.prod(axis.size for axis in axes)
        made = program.Strided(elements, _BORDERS[border], fill=fill)
        padded = [*reversed(axes), *[Axis(1, 0, 1, 0)] * (MOST_AXES - len(axes))]
        for number, axis in enumerate(padded):
            made.size[number], made.first[number] = axis.size, axis.first
            made.held[number], made.stride[number] = axis.held, axis.stride
        return CpuPlan("strided_copy", Kind.COPY, ("x",), made)

    def pool(self, x: Value, y: Value, windows: Windows) -> CpuPlan:
        along = zip(x.shape[-2:], y.shape[-2:], windows.kernel, windows.stride, windows.pad)
        rows, columns = (program.Windows(*each) for each in along)
        sizes = _WINDOWS[windows.kind], windows.border, x.shape[0], x.shape[1]
        made = program.Pooled(*sizes, rows, columns)
        return CpuPlan("pool", Kind.POOL, ("x",), made)

    def reduce(self, kind: str, outputs: int, length: int, inner: int, factor: float) -> CpuPlan:
        how = _REDUCED.get(kind, program.Reduce.SUM)
        made = program.Reduced(how, outputs, length, inner, factor)
        return CpuPlan("reduce_rows", Kind.REDUCE, ("x",), made)

    def softmax(self, rows: int, length: int, inner: int, logarithm: bool, scale: float) -> CpuPlan:
        made = program.Softmaxed(rows, length, inner, logarithm, scale)
        return CpuPlan("softmax", Kind.SOFTMAX, ("x",), made)

    def lrn(self, x: Value, size: int, alpha: float, beta: float, knorm: float) -> CpuPlan:
        sizes = x.elements, x.shape[1], math.prod(x.shape[2:]), size
        return CpuPlan("lrn", Kind.LRN, ("x",), program.Lrn(*sizes, alpha, beta, knorm))

    def resize(self, x: Value, y: Value, aligned: bool) -> CpuPlan:
        planes = x.shape[0] * x.shape[1]
        made = program.Resized(planes, *x.shape[2:], *y.shape[2:], aligned)
        return CpuPlan("resize", Kind.RESIZE, ("x",), made)

    def data_gradient(self, problem: ConvProblem) -> CpuPlan:
        name, made = self._convolution(problem, "backward_data", False)
        return CpuPlan(name, Kind.DATA_GRADIENT, ("w", "x"), made)

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
        name, made = self._convolution(problem, "forward", pending.w.constant)
        packed = self._packed(builder, pending, made)
        if packed is not None:
            read["packed"] = packed
        made.lowest, made.highest = bounds or (-math.inf, math.inf)
        y = place or builder.empty(pending.shape, builder.constant(pending))
        inputs = tuple(each if each in read else "" for each in _CONVOLVED)
        # The array in the layer's own shape, so that `emit` checks all that the kernel writes.
        own = replace(y, shape=problem.y_shape, image=0)
        logged = problem if pending.logged else None
        plan = CpuPlan(name, Kind.CONVOLVE, inputs, made)
        y = replace(
            builder.emit(plan, own, read, pending.node, logged), shape=y.shape, image=y.image
        )
        if after is None or bounds is not None or pending.sums is None:
            return y
        term = substituted(after, pending.sums, leaf(y))
        return builder.compute(term, y) if place else builder.value(Chain(pending.shape, term))

    def _convolution(
        self, problem: ConvProblem, direction: str, kept: bool
    ) -> tuple[str, program.Convolve]:
        kernel = native.choose(problem, direction, self.isa, self.strict, kept)
        number = native.kernels().index(kernel)
        made = program.Convolve(native.as_struct(problem), number, self.strict)
        return f"{kernel}_{self.isa}", made

    def _packed(
        self, builder: Builder, pending: Convolution, made: program.Convolve
    ) -> Value | None:
        """Emit the packing of weights, which runs once; `None` if the kernel reads them in
        place."""
        w, bias = pending.w, pending.bias
        if self.strict or not w.constant or (bias is not None and not bias.constant):
            return None
        floats = native.library().ece408_packed_floats(
            ctypes.byref(made.problem), native.ISA_CODES[self.isa], made.kernel
        )
        if not floats:
            return None
        read = {"w": builder.claimed(w)}
        if bias is not None:
            read["bias"] = builder.claimed(bias)
        plan = CpuPlan("pack", Kind.PACK, ("w", "bias" if bias is not None else ""), made)
        place = builder.empty((_HEADER_FLOATS + floats,), True)
        return builder.emit(plan, place, read, pending.node)

    def _dense(self, builder: Builder, operand: Value | Chain) -> Value:
        """Return a float32 array with contiguous images; those of one image are."""
        if isinstance(operand, Value) and operand.dtype == "float32" and operand.shape[0] == 1:
            return replace(operand, image=0)
        return builder.dense(operand)


# Inputs of CONVOLVE.
_CONVOLVED = ("x", "w", "bias", "added", "packed")


def _bounds(after: Term, sums: Term | None) -> tuple[float, float] | None:
    """Return the bounds of a convolution's results that are the same as the epilogue, if any."""
    if after.arguments != (sums,):
        return None
    p, q = (*after.constants, math.inf, math.inf)[:2]
    found = {
        "relu": (0.0, math.inf),
        "clip": (p, q),
        "maximum": (p, math.inf),
        "minimum": (-math.inf, p),
    }
    bounds = found.get(after.op)
    return bounds if bounds and bounds[0] <= bounds[1] else None
