"""General kernels for every problem, direction and array type; and variants with float64 sums for
`precision="strict"`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ....problem import ITEM_BYTES, ConvProblem
from ..kernel_plan import Capability, Code, Defines, Family, Launch, Layout, Plan, divide_up, entry
from . import layer_macros

_TYPES = {
    "float16": ("__half", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}
_PER_COLUMN = 4
# Minimum pixels that a block of backward_weight sums.
_SLICE_PIXELS = 2048
_WORKSPACE_BYTES = 32 << 20
_BIAS_THREADS = 256
_BIAS_ELEMENTS = 1 << 16
_MANY = 1 << 30


@dataclass(frozen=True)
class Tile(Layout):
    """Threads along rows and columns of a product, and rows per thread."""

    threads_r: int
    threads_c: int
    per_row: int


def _tile(rows: int, columns: int) -> Tile:
    """Return the tile for a product of this size."""
    per_row = 1 if rows == 1 else 4
    if rows > 32:
        return Tile(16, 16, per_row)
    return Tile(4 if rows > 4 else 1, 64 if columns > 64 else 16, per_row)


@dataclass(frozen=True)
class _General(Family):
    """Kernels for all problems. Tiles do not depend on the batch; they are chosen for many pixels.

    `sum_bytes` is the minimum size of the accumulator's type: 8 in the sources that sum in double.
    """

    sum_bytes: int = 4

    def why_not(self, problem: ConvProblem) -> str | None:
        return None


class Forward(_General):
    """Product of filters by pixels."""

    spaced = True

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Tile, ...]:
        return (_tile(problem.filters // problem.groups, _MANY),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        rows = problem.filters // problem.groups
        columns = problem.batch * problem.out_height * problem.out_width
        launch = _launch("convolve", problem, layout, rows, columns, ("y", "x", "w", "bias"))
        macros = _defines(problem, layout, accumulate, problem.bias)
        return Plan(kernel, macros, (launch,))


class BackwardData(_General):
    """Product of channels by pixels, in phases of the stride with equal numbers of pixels."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Tile, ...]:
        return (_tile(problem.channels // problem.groups, _MANY),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        rows = problem.channels // problem.groups
        axes = tuple(zip((problem.height, problem.width), problem.stride))
        columns = problem.batch * math.prod(divide_up(size, stride) for size, stride in axes)
        phases = math.prod(min(size, stride) for size, stride in axes)
        launch = _launch("backward_data", problem, layout, rows, columns, ("dx", "w", "dy"), phases)
        return Plan(kernel, _defines(problem, layout, accumulate), (launch,))


class BackwardWeight(_General):
    """Product of filters by channels and taps, in slices of the pixels, which are then added up."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Tile, ...]:
        return (_tile(problem.filters // problem.groups, math.prod(problem.w_shape[1:])),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        rows, columns = problem.filters // problem.groups, math.prod(problem.w_shape[1:])
        weights = math.prod(problem.w_shape)
        sum_bytes = max(self.sum_bytes, ITEM_BYTES[problem.dtype])
        pixels = problem.batch * problem.out_height * problem.out_width
        most = max(1, _WORKSPACE_BYTES // (weights * sum_bytes))
        depth = max(_SLICE_PIXELS, divide_up(pixels, most))
        slices = divide_up(pixels, depth)
        arrays = ("workspace", "x", "dy")
        launch = _launch(
            "backward_weight", problem, layout, rows, columns, arrays, slices, (depth,)
        )
        return Plan(
            kernel,
            _defines(problem, layout, accumulate),
            (launch, _reduce("dw", weights, slices, ("x", "dy", problem.batch))),
            workspace_bytes=slices * weights * sum_bytes,
        )


class BackwardBias(_General):
    """Sums over pixels in slices of the batch, which are then added up."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Tile, ...]:
        return (Tile(4, 64, 4),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        pixels = problem.out_height * problem.out_width
        most = max(1, _WORKSPACE_BYTES // (8 * problem.filters))
        images = max(1, _BIAS_ELEMENTS // pixels, divide_up(problem.batch, most))
        slices = divide_up(problem.batch, images)
        blocks, arguments = problem.filters * slices, ("workspace", "dy", problem.batch, images)
        add = Launch.line("backward_bias", blocks, _BIAS_THREADS, arguments)
        return Plan(
            kernel,
            (*_defines(problem, layout, accumulate), ("BIAS_THREADS", _BIAS_THREADS)),
            (add, _reduce("dbias", problem.filters, slices)),
            workspace_bytes=8 * slices * problem.filters,
        )


def _reduce(output: str, elements: int, slices: int, others: tuple[str | int, ...] = ()) -> Launch:
    """Return the launch that adds up slices, with one thread per element."""
    arguments = (output, "workspace", *others, slices)
    return Launch.line("reduce", divide_up(elements, 256), 256, arguments)


def _launch(
    function: str,
    problem: ConvProblem,
    tile: Tile,
    rows: int,
    columns: int,
    arrays: tuple[str, ...],
    parts: int = 1,
    numbers: tuple[int, ...] = (),
) -> Launch:
    blocks = problem.groups * parts * divide_up(rows, tile.threads_r * tile.per_row)
    blocks *= divide_up(columns, tile.threads_c * _PER_COLUMN)
    # At least a warp, for any tile.
    threads = tile.threads_r * tile.threads_c
    return Launch.line(function, blocks, threads, (*arrays, problem.batch, *numbers))


def _defines(problem: ConvProblem, layout: Tile, accumulate: bool, bias: bool = False) -> Defines:
    element, total = _TYPES[problem.dtype]
    return (
        *(("ELEMENT", element), ("SUM", total)),
        *layer_macros.sizes(problem, "channels", "height", "width", "filters", "groups"),
        *layer_macros.window(problem),
        *layer_macros.output(bias, accumulate),
        *layout.defines,
    )


_ENTRIES = (
    ("", "every convolution and type: an implicit matrix product for each group", Forward(), 15),
    ("_backward_data", "the gradient for x of every convolution and type", BackwardData(), 14),
    ("_backward_weight", "the gradient for w of every convolution and type", BackwardWeight(), 15),
)
_STRICT = (
    ("", 'general with sums in float64: what precision="strict" takes', Forward(8), 18),
    ("_backward_data", "the gradient for x like that", BackwardData(8), 18),
    ("_backward_weight", "the gradient for w like that", BackwardWeight(8), 19),
)
_entry = functools.partial(entry, source="general/{}.cu")
_strict = functools.partial(_entry, precision="strict")
_BIAS = "the gradient for the bias of every convolution and type"
KERNELS = (
    *(_entry("general" + end, about, family, rank) for end, about, family, rank in _ENTRIES),
    _strict("general_backward_bias", _BIAS, BackwardBias(), 16),
    *(
        _strict("general_strict" + end, about, family, rank, macros=(("TOTAL", "double"),))
        for end, about, family, rank in _STRICT
    ),
)
