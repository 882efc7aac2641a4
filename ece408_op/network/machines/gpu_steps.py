"""Steps of a network on a GPU: CUDA launches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ... import settings
from ...backends.cuda.kernel_plan import (
    ARCHITECTURES,
    Code,
    Defines,
    Launch,
    Plan,
    Target,
    divide_up,
)
from ...problem import ConvProblem
from ..builder import MOST_AXES, Axis, Batch, Builder, Convolution, Lowering, Windows
from ..terms import Reading, Term, reading
from ..values import Value
from .cuda_terms import literal, statements
from .gpu_convolutions import chosen, convolve, stored, stored_as

_NAMES = (
    *("pointwise", "strided_copy", "pool", "reduce_rows", "softmax", "lrn", "resize"),
    *("batch_norm", "batch_norm_gradient", "pool_gradient", "one_hot", "dropout"),
)
CODES = tuple(Code(name, f"network/{name}.cu", ARCHITECTURES, "float32", True) for name in _NAMES)
_POINTWISE, _STRIDED, _POOL, _REDUCE, _SOFTMAX, _LRN, _RESIZE, *_TRAINING = CODES
_NORM, _NORM_GRADIENT, _POOL_GRADIENT, _ONE_HOT, _DROPOUT = _TRAINING
_THREADS, _WARPS = 256, 8
# Blocks of a pass over channels, and elements of a window that one thread searches.
_BLOCKS, _SMALL_WINDOW = 2048, 64
_TYPES = {"float32": "float", "float16": "__half", "uint8": "unsigned char"}
# Up to this number of rows in a window, a thread of `pool` has several outputs.
_FEW_ROWS = 7
# Half as many bytes gain nothing where launches take most of the time.
_FEWEST_STORED = 4
_BORDERS = {"constant": "ZERO", "edge": "NEAREST", "reflect": "MIRRORED"}
_WINDOWS = {"max": "LARGEST", "avg": "AVERAGE", "sum": "SUM"}
_LARGEST = {"max": "OF_ALL", "largest number": "OF_NUMBERS"}


@dataclass(frozen=True)
class GpuSteps(Lowering):
    """Launches for one kind of GPU, at the least precision of its convolutions."""

    target: Target
    precision: str
    adds_in_place = True

    def storage(self, images: int) -> str:
        halves = self.precision == "float16" and images >= _FEWEST_STORED
        return "float16" if halves else "float32"

    def pointwise(self, term: Term, y: Value) -> tuple[Plan, dict[str, Value]] | None:
        leaves = term.leaves()
        found = [reading(value, each.shape, y.shape) for each, value in leaves]
        readings = [each for each in found if each is not None]
        if len(readings) < len(found):
            return None
        values = [value for _, value in leaves]
        vector = 4 if _even(y, values, readings) else 1
        total = y.elements
        defines: list[tuple[str, str | int]] = [("VECTOR", vector)]
        arguments: list[str | int] = ["y", total]
        arguments += [y.per_image, y.image] if not y.dense else [1, 1]
        if not y.dense:
            defines.append(("KIND_OUT", "IMAGES"))
        inputs = ""
        for k, (value, each) in enumerate(zip(values, readings)):
            kind = each.kind
            if kind == "SHARED" and each.inner % vector == 0:
                kind = "UNIFORM"
            inputs += f"X({k},{_TYPES[value.dtype]},{kind})"
            arguments += [f"in{k}", each.outer, each.count, each.inner]
        defines.append(("INPUTS(X)", inputs))
        if y.dtype != "float32":
            defines.append(("TYPE_OUT", _TYPES[y.dtype]))
        names = {id(each): f"v{k}" for k, (each, _) in enumerate(leaves)}
        defines.append(("COMPUTE", statements(term, names, "r")))
        if any("__half" in str(text) for _, text in defines):
            defines.append(("HALF", 1))
        plan = _launched(_POINTWISE, defines, "compute", total, arguments, _THREADS * vector)
        return plan, {f"in{k}": value for k, value in enumerate(values)}

    def copy(self, axes: Sequence[Axis], border: str, fill: float, dtype: str) -> Plan:
        padded = [*reversed(axes), *[Axis(1, 0, 1, 0)] * (MOST_AXES - len(axes))]
        numbers = [number for axis in padded for number in axis]
        elements = math.prod(axis.size for axis in axes)
        plain = (border, fill) == ("constant", 0.0)
        defines: Defines = stored_as(dtype, dtype)
        if not plain:
            defines += ("BORDER", _BORDERS[border]), ("FILL", literal(fill))
        arguments: list[str | int] = ["y", "x", elements, *numbers]
        return _launched(_STRIDED, defines, "strided_copy", elements, arguments)

    def pool(self, x: Value, y: Value, windows: Windows) -> Plan:
        images = (x.image or x.per_image, y.image or y.per_image)
        # Windows of few rows share them with those below.
        run = min(4, y.shape[-2]) if windows.kernel[0] <= _FEW_ROWS else 1
        runs = y.elements // y.shape[-2] * divide_up(y.shape[-2], run)
        arguments = ("y", "x", runs, x.shape[1], *images)
        defines = (*_pooled(x, y, windows), ("RUN", run), *stored(x, y))
        return _launched(_POOL, defines, "pool", runs, arguments)

    def pool_gradient(self, x: Value, dy: Value, windows: Windows) -> Plan:
        defines, count = _pooled(x, dy, windows), dy.elements
        threads = math.prod(x.shape[:2]) * divide_up(x.shape[2], 2) * divide_up(x.shape[3], 2)
        size = math.prod(windows.kernel)
        finders, nbytes = 1 if size <= _SMALL_WINDOW else 32, 1 if size < 256 else 4
        defines += [("FINDERS", finders), ("PLACE", "unsigned char" if nbytes == 1 else "int")]
        arguments = ("y", "dy", "workspace", threads)
        plan = _launched(_POOL_GRADIENT, defines, "pool_gradient", threads, arguments)
        if windows.kind != "max":
            return plan
        grid = (divide_up(count, _THREADS // finders), 1, 1)
        find = Launch("find", grid, (_THREADS, 1, 1), ("workspace", "x", "pooled", count))
        return replace(plan, launches=(find, *plan.launches), workspace_bytes=nbytes * count)

    def norm(self, batch: Batch, names: Collection[str]) -> Plan:
        defines = ("EPSILON", repr(float(batch.epsilon))), ("ADDS", int("added" in names))
        made, read = ("y", "mean", "inverse", "factor", "addend"), ("x", "gamma", "beta", "added")
        arrays = (*made, *read, "workspace")
        return _passes(_NORM, defines, batch, ("workspace", "x"), "normalise", arrays)

    def norm_gradient(self, batch: Batch, names: Collection[str]) -> Plan:
        numbers = {"EPSILON": batch.epsilon, "MOMENTUM": batch.momentum}
        defines: list[tuple[str, str | int]] = [(n, repr(float(v))) for n, v in numbers.items()]
        defines += ("ADDS", int("dadded" in names)), ("ACCUMULATES", int("onto" in names))
        read, gradient = ("positive", "mean", "factor", "addend"), "dy"
        sums = ("workspace", "dadded", "x", gradient, *read)
        if "dadded" in names and _splits(batch) > 1:
            gradient = "dadded"
        made = ("y", "dgamma", "dbeta", "zeros", "new_mean", "new_variance", "dadded")
        last = ("inverse", "gamma", "moving_mean", "moving_variance", "workspace")
        arrays = (*made, "x", gradient, *read, *last)
        return _passes(_NORM_GRADIENT, tuple(defines), batch, sums, "differentiate", arrays)

    def one_hot(self, rows: int, length: int, inner: int) -> Plan:
        elements = rows * length * inner
        arguments = ("y", "x", elements, length, inner)
        return _launched(_ONE_HOT, (), "one_hot", elements, arguments)

    def dropout(self, elements: int, kept: float, layer: int) -> Plan:
        arguments = ("y", "x", "seed", elements, layer)
        kept_ = (("KEPT", literal(kept)),)
        return _launched(_DROPOUT, kept_, "dropout", elements, arguments, 4 * _THREADS)

    def reduce(
        self, kind: str, x: Value, outputs: int, length: int, inner: int, factor: float
    ) -> Plan:
        defines: Defines = ("LARGEST", _LARGEST.get(kind, "NONE")), ("FACTOR", literal(factor))
        defines += stored(x)
        return _of_warps(_REDUCE, defines, "reduce_rows", outputs, length, inner)

    def softmax(
        self, x: Value, rows: int, length: int, inner: int, logarithm: bool, scale: float
    ) -> Plan:
        defines: Defines = ("LOGARITHM", int(logarithm)), ("SCALE", literal(scale))
        defines += stored(x)
        return _of_warps(_SOFTMAX, defines, "softmax", rows, length, inner)

    def lrn(self, x: Value, y: Value, size: int, alpha: float, beta: float, knorm: float) -> Plan:
        named = {"ALPHA": alpha, "BETA": beta, "KNORM": knorm}
        defines: list[tuple[str, str | int]] = [("SIZE", size), *stored(x, y)]
        defines += [(name, literal(value)) for name, value in named.items()]
        arguments = ("y", "x", x.elements, x.shape[1], math.prod(x.shape[2:]))
        return _launched(_LRN, defines, "normalise", x.elements, arguments)

    def resize(self, x: Value, y: Value, aligned: bool) -> Plan:
        arguments: list[str | int] = ["y", "x", y.elements, *x.shape[2:], *y.shape[2:]]
        defines = (("ALIGNED", int(aligned)), *stored(x, y))
        return _launched(_RESIZE, defines, "resize", y.elements, arguments)

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


def _pooled(x: Value, y: Value, windows: Windows) -> list[tuple[str, str | int]]:
    """Return the macros of windows on x, and of their results."""
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
    return defines


def _lanes(batch: Batch) -> int:
    """Return the channels of a block (kLanes)."""
    return 8 if batch.pixels == 1 else 1


def _splits(batch: Batch) -> int:
    """Return the number of splits of each channel, whose sums are added up by each block of the
    second pass: enough to fill a GPU, but few enough that it reads much more of the arrays. Small
    channels have one, which a block reads again from its cache."""
    elements, threads = batch.images * batch.pixels, _THREADS // _lanes(batch)
    vectors = elements // 4 if batch.pixels % 4 == 0 else elements
    if vectors <= 8 * threads:
        return 1
    enough = divide_up(_BLOCKS, divide_up(batch.channels, _lanes(batch)))
    # Threads read four vectors at a time.
    turns = divide_up(vectors, 4 * threads * min(enough, math.isqrt(elements // 8)))
    return divide_up(vectors, 4 * threads * turns)


def _activation(batch: Batch) -> Defines:
    """Return the macros of the function after a normalisation: relu or clip."""
    if not batch.is_relu and not batch.bounds:
        return ()
    low, high = map(literal, batch.bounds or (0.0, math.inf))
    passes = "v>0" if batch.is_relu else f"!(v>{high}||v<{low})"
    return ("ACTIVATED(v)", f"(v>{high}?{high}:v<{low}?{low}:v)"), ("PASSES(v)", f"({passes})")


def _passes(
    code: Code,
    defines: Defines,
    batch: Batch,
    sums: tuple[str, ...],
    function: str,
    arrays: tuple[str, ...],
) -> Plan:
    """Return the passes over channels: "sum" with the arrays `sums`, unless there is one split,
    then `function`."""
    splits = _splits(batch)
    sizes = (*batch[:3], splits, batch.x_image, batch.y_image)
    grid = (divide_up(batch.channels, _lanes(batch)), splits, 1)
    apart = ("APART", int(batch.x_image + batch.y_image > 0))
    last = apart, ("CHANNELS_LAST", int(batch.pixels == 1)), *_activation(batch)
    launches = tuple(
        Launch(name, grid, (_THREADS, 1, 1), (*names, *sizes))
        for name, names in (("sum", sums), (function, arrays))
    )
    if splits == 1:
        return Plan(code, (*defines, *last), launches[1:])
    return Plan(code, (*defines, *last), launches, workspace_bytes=16 * splits * batch.channels)


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
