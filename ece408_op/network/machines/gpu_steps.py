"""Steps of a network on a GPU: CUDA launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ... import settings
from ...backends.cuda.kernel_plan import ARCHITECTURES, Code, Launch, Plan, Target, divide_up
from ...problem import ConvProblem
from ..builder import MOST_AXES, Axis, Builder, Convolution, Lowering, Windows
from ..terms import Reading, Term, reading
from ..values import Value
from .cuda_terms import literal, statements
from .gpu_convolutions import chosen, convolve

_POINTWISE, _STRIDED, _POOL, _REDUCE, _SOFTMAX, _LRN, _RESIZE = CODES = tuple(
    Code(name, f"network/{name}.cu", ARCHITECTURES, "float32", True)
    for name in ("pointwise", "strided_copy", "pool", "reduce_rows", "softmax", "lrn", "resize")
)
_THREADS, _WARPS = 256, 8
_TYPES = {"float32": "float", "float16": "__half", "uint8": "unsigned char"}
_BORDERS = {"constant": "ZERO", "edge": "NEAREST", "reflect": "MIRRORED"}
_WINDOWS = {"max": "LARGEST", "avg": "AVERAGE", "sum": "SUM"}
_LARGEST = {"max": "OF_ALL", "largest number": "OF_NUMBERS"}


@dataclass(frozen=True)
class GpuSteps(Lowering):
    """Launches for one kind of GPU, at the least precision of its convolutions."""

    target: Target
    precision: str
    adds_in_place = True
    accumulates = True

    def pointwise(self, term: Term, y: Value) -> tuple[Plan, dict[str, Value]] | None:
        leaves = term.leaves()
        found = [reading(value, each.shape, y.shape) for each, value in leaves]
        readings = [each for each in found if each is not None]
        if len(readings) < len(found):
            return None
        values = [value for _, value in leaves]
        vector = 4 if _even(y, values, readings) else 1
        total = y.elements
        defines: list[tuple[str, str | int]] = [("INPUTS", len(values)), ("VECTOR", vector)]
        arguments: list[str | int] = ["y", total]
        arguments += [y.per_image, y.image] if not y.dense else [1, 1]
        if not y.dense:
            defines.append(("KIND_OUT", "IMAGES"))
        for k, (value, each) in enumerate(zip(values, readings)):
            kind = each.kind
            if kind == "SHARED" and each.inner % vector == 0:
                kind = "UNIFORM"
            if kind != "ALIKE":
                defines.append((f"KIND{k}", kind))
            if value.dtype != "float32":
                defines.append((f"TYPE{k}", _TYPES[value.dtype]))
            arguments += [f"in{k}", each.outer, each.count, each.inner]
        if y.dtype != "float32":
            defines.append(("TYPE_OUT", _TYPES[y.dtype]))
        names = {id(each): f"v{k}" for k, (each, _) in enumerate(leaves)}
        defines.append(("COMPUTE", statements(term, names, "r")))
        if any("__half" in str(text) for _, text in defines):
            defines.append(("HALF", 1))
        plan = _launched(_POINTWISE, defines, "compute", total, arguments, _THREADS * vector)
        return plan, {f"in{k}": value for k, value in enumerate(values)}

    def copy(self, axes: Sequence[Axis], border: str, fill: float) -> Plan:
        padded = [*reversed(axes), *[Axis(1, 0, 1, 0)] * (MOST_AXES - len(axes))]
        numbers = [number for axis in padded for number in axis]
        elements = math.prod(axis.size for axis in axes)
        plain = (border, fill) == ("constant", 0.0)
        defines = () if plain else (("BORDER", _BORDERS[border]), ("FILL", literal(fill)))
        arguments: list[str | int] = ["y", "x", elements, *numbers]
        return _launched(_STRIDED, defines, "strided_copy", elements, arguments)

    def pool(self, x: Value, y: Value, windows: Windows) -> Plan:
        defines: list[tuple[str, str | int]] = [
            ("KIND", _WINDOWS[windows.kind]),
            ("WITH_BORDER", int(windows.border)),
        ]
        named = (
            *(("", x.shape[-2:]), ("OUT", y.shape[-2:]), ("KERNEL", windows.kernel)),
            *(("STRIDE", windows.stride), ("PAD", windows.pad)),
        )
        for name, sizes in named:
            names = (f"{name}_H", f"{name}_W") if name else ("HEIGHT", "WIDTH")
            defines += zip(names, sizes)
        images = (x.image or x.per_image, y.image or y.per_image)
        arguments = ("y", "x", y.elements, x.shape[1], *images)
        return _launched(_POOL, defines, "pool", y.elements, arguments)

    def reduce(self, kind: str, outputs: int, length: int, inner: int, factor: float) -> Plan:
        defines = (("LARGEST", _LARGEST.get(kind, "NONE")), ("FACTOR", literal(factor)))
        return _of_warps(_REDUCE, defines, "reduce_rows", outputs, length, inner)

    def softmax(self, rows: int, length: int, inner: int, logarithm: bool, scale: float) -> Plan:
        defines = (("LOGARITHM", int(logarithm)), ("SCALE", literal(scale)))
        return _of_warps(_SOFTMAX, defines, "softmax", rows, length, inner)

    def lrn(self, x: Value, size: int, alpha: float, beta: float, knorm: float) -> Plan:
        named = {"ALPHA": alpha, "BETA": beta, "KNORM": knorm}
        defines: list[tuple[str, str | int]] = [("SIZE", size)]
        defines += [(name, literal(value)) for name, value in named.items()]
        arguments = ("y", "x", x.elements, x.shape[1], math.prod(x.shape[2:]))
        return _launched(_LRN, defines, "normalise", x.elements, arguments)

    def resize(self, x: Value, y: Value, aligned: bool) -> Plan:
        arguments: list[str | int] = ["y", "x", y.elements, *x.shape[2:], *y.shape[2:]]
        return _launched(_RESIZE, (("ALIGNED", int(aligned)),), "resize", y.elements, arguments)

    def data_gradient(self, problem: ConvProblem, adds: bool = False) -> Plan:
        return self._gradient("backward_data", problem, adds, {"dx": "y", "dy": "x"})

    def weight_gradient(self, problem: ConvProblem, adds: bool = False) -> Plan:
        return self._gradient("backward_weight", problem, adds, {"dw": "y"})

    def _gradient(
        self, direction: str, problem: ConvProblem, adds: bool, names: Mapping[str, str]
    ) -> Plan:
        precision = settings.gradient_precision() or self.precision
        plan = chosen(self.target, precision, problem, problem, direction, adds)[1]
        return replace(_renamed(plan, names), apart=None)

    def convolve(self, builder: Builder, pending: Convolution, place: Value | None) -> Value:
        return convolve(self.target, self.precision, builder, pending, place)


def _launched(
    code: Code,
    defines: Iterable[tuple[str, str | int]],
    function: str,
    elements: int,
    arguments: Iterable[str | int],
    of_block: int = _THREADS,
) -> Plan:
    """Return one launch whose blocks of threads compute `of_block` elements each."""
    grid = (divide_up(elements, of_block), 1, 1)
    launch = Launch(function, grid, (_THREADS, 1, 1), tuple(arguments))
    return Plan(code, tuple(defines), (launch,))


def _of_warps(
    code: Code, defines: Iterable[tuple[str, str | int]], function: str, rows: int, *sizes: int
) -> Plan:
    """Return one launch whose warps compute a row each."""
    grid = (divide_up(rows, _WARPS), 1, 1)
    launch = Launch(function, grid, (32 * _WARPS, 1, 1), ("y", "x", rows, *sizes))
    return Plan(code, tuple(defines), (launch,))


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with its arrays renamed."""
    launches = []
    for launch in plan.launches:
        arguments = tuple(
            names.get(each, each) if isinstance(each, str) else each for each in launch.arguments
        )
        launches.append(replace(launch, arguments=arguments))
    return replace(plan, launches=tuple(launches))


def _even(y: Value, values: Sequence[Value], readings: Sequence[Reading]) -> bool:
    """Return whether groups of four elements are contiguous and aligned."""
    if y.elements % 4 or y.offset % 16:
        return False
    if not y.dense and (y.per_image % 4 or y.image % 4):
        return False
    for value, each in zip(values, readings):
        if each.kind == "IMAGES" and (each.outer % 4 or each.inner % 4):
            return False
        if each.kind != "SHARED" and value.offset % 16:
            return False
    return True
