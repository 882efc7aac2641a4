"""Grids of kernels/cuda/gemm/gemm_grid.cuh, which map convolutions to matrix products.

Common part of `implicit_gemm_prepacked` and its gradient for w: the grids' arithmetic, their
macros, and constants of the cost models.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Defines, divide_up
from . import layer_macros

SHARED_BYTES = gpu_limits.shared_bytes((9, 0)) - gpu_limits.RESERVED_SHARED_BYTES
RECORD_BYTES = 16
THREADS = 384
# Typical number of multiprocessors; only the work partition depends on it.
PROCESSORS = 132
MOST_STAGES = 8
# The tensor cores' tiles: rows, and values of k.
ROWS, STEP = 64, 16
# Overhead of a tile in cycles, besides multiplying.
TILE_CYCLES = 2500
# Approximate bytes per cycle and multiprocessor from the L2 cache and from memory.
CACHE_RATE, MEMORY_RATE = 26, 18
# Cycles in which a warp group waits for a tap's sums and multiplies nothing.
_PROMOTION_CYCLES = 150
# Limits of the sources' tap tables: in total, and in a row or column.
_MOST_TAPS, _LONGEST = 1024, 128
# Tensor cores are faster up to this number of products (zeros included) per needed product.
_MOST_ZEROS = 24
# Up to this number of channels per group, the taps of a row may be treated as channels.
_FEW_CHANNELS = 8
# Short sums. Up to _FEW_TERMS terms, a plain float32 sum rounds so rarely that numbers split into
# two halves, which keep 23 of 24 bits, are less exact. Up to _SHORT_TERMS, tensor cores, which
# truncate, may sum only SHORT_STEP terms at a time. Found by simulation and measurement with terms
# of very different magnitudes.
_FEW_TERMS, _SHORT_TERMS, SHORT_STEP = 96, 200, 32
_HALF = (("PARTS", 1), *((name, "__half") for name in ("ELEMENT", "X_TYPE", "Y_TYPE")))


@dataclass(frozen=True)
class Axis:
    """One axis of a grid, with the values of implicit_gemm_prepacked.cu's macros. `taps` lists, for
    each remainder, the taps' positions in the grid; `all_taps` lists them for remainders treated as
    channels."""

    grid: int
    in_first: int
    in_step: int
    out_first: int
    out_step: int
    valid: int
    last: int
    taps: tuple[tuple[int, ...], ...]
    all_taps: tuple[int, ...]


def forward_axis(size: int, out: int, kernel: int, stride: int, pad: int, dilate: int) -> Axis:
    """Return the grid of every stride-th pixel; a tap is an offset in it."""
    reach = (kernel - 1) * dilate
    taps = tuple(
        tuple(tap // stride for tap in range(0, reach + 1, dilate) if tap % stride == remainder)
        for remainder in range(stride)
    )
    grid = _grid(divide_up(size + pad, stride), pad // stride, out + reach // stride, out)
    return Axis(grid, -pad, stride, 0, 1, out, 0, taps, tuple(range(reach // stride + 1)))


def backward_axis(size: int, out: int, kernel: int, stride: int, pad: int, dilate: int) -> Axis:
    """Return the grid of dy; every stride-th pixel of dx is a product with the taps that reach
    it."""
    reach = (kernel - 1) * dilate
    zeros = max(0, reach // stride - pad // stride)
    last = pad // stride + zeros
    taps = tuple(
        tuple(
            last - tap // stride for tap in range(0, reach + 1, dilate) if tap % stride == remainder
        )
        for remainder in range(stride)
    )
    first = -(pad % stride)
    valid = divide_up(size - first, stride)
    grid = _grid(zeros + out, zeros, valid + last, valid)
    all_taps = tuple(range(last - reach // stride, last + 1))
    return Axis(grid, -zeros, 1, first, stride, valid, last, taps, all_taps)


def _grid(pixels: int, zeros: int, seen: int, valid: int) -> int:
    """Return an axis length; the zeros at the start of a row also serve the end of the row
    before."""
    return max(pixels, seen - zeros, valid)


@dataclass(frozen=True)
class Product:
    """The matrix product for a problem, independent of its tiling: axes, sets of groups, whether
    remainders are channels (forward) or rows (backward), whether the taps of a row are channels,
    the taps of each pair of a job and a phase with the pair's remainders, and the parts per
    number."""

    backward: bool
    axes: tuple[Axis, Axis]
    sets: int
    folded: bool
    folded_taps: bool
    pairs: tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]
    depth: int
    rows: int
    parts: int = 2

    @property
    def products(self) -> int:
        """Products of halves per product of numbers; that of the two low halves is omitted."""
        return 3 if self.parts == 2 else 1

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in shared memory."""
        return 2 * self.parts

    @property
    def phases(self) -> int:
        return 1 if self.backward else len(self.pairs)

    @property
    def jobs(self) -> int:
        return len(self.pairs) if self.backward else 1

    @property
    def positions(self) -> int:
        """Positions per image."""
        return self.axes[0].grid * self.axes[1].grid

    @property
    def taps(self) -> int:
        return sum(len(taps) for _, taps in self.pairs)

    @property
    def halo(self) -> int:
        """Positions beyond a tile that taps read, rounded up to fours."""
        width = self.axes[1].grid
        last = max(row * width + column for _, taps in self.pairs for row, column in taps)
        return divide_up(last, 4) * 4


def product(problem: ConvProblem, backward: bool, parts: int = 2) -> Product:
    """Return the cheapest matrix product for an image of the problem, with numbers split into
    `parts` halves; float16 arrays need one."""
    made = _cheapest(dataclasses.replace(problem, batch=1, bias=False), backward)
    return dataclasses.replace(made, parts=1 if problem.dtype == "float16" else parts)


@functools.lru_cache(maxsize=1024)
def _cheapest(problem: ConvProblem, backward: bool) -> Product:
    ways = (_product(problem, backward, *way) for way in _ways(problem, backward))
    # Folded taps increase the cost of packing.
    return min(ways, key=lambda made: _products(made) * (1.15 if made.folded_taps else 1))


def _ways(problem: ConvProblem, backward: bool) -> Iterator[tuple[int, bool, bool]]:
    """Yield the sets of groups, and whether to fold remainders and a row's taps (pays for few
    channels)."""
    sets = (count for count in range(1, problem.groups + 1) if problem.groups % count == 0)
    strided = math.prod(problem.stride) > 1
    few = not backward and problem.channels // problem.groups <= _FEW_CHANNELS
    for count, folded, taps in itertools.product(sets, (False, True), (False, True)):
        if folded <= strided and taps <= (few and folded == strided):
            yield count, folded, taps


def _product(
    problem: ConvProblem, backward: bool, sets: int, folded: bool, folded_taps: bool
) -> Product:
    make = backward_axis if backward else forward_axis
    sizes = zip(
        (problem.height, problem.width),
        (problem.out_height, problem.out_width),
        *(problem.kernel, problem.stride, problem.pad, problem.dilate),
    )
    rows, columns = (make(*each) for each in sizes)
    fold = math.prod(problem.stride) if folded else 1
    if folded_taps:
        # Columns need no zeros between rows: a channel holds the pixel of its own tap.
        reach = (problem.kernel[1] - 1) * problem.dilate[1]
        fold *= reach // problem.stride[1] + 1
        columns = dataclasses.replace(columns, grid=columns.valid, taps=((0,),), all_taps=(0,))
    if folded:
        pairs = [((0, 0), tuple(itertools.product(rows.all_taps, columns.all_taps)))]
    else:
        remainders = itertools.product(*(range(stride) for stride in problem.stride))
        pairs = [
            ((down, across), tuple(itertools.product(rows.taps[down], columns.taps[across])))
            for down, across in remainders
        ]
        if not backward:
            pairs = [each for each in pairs if each[1]]
    depth, outs = problem.channels // sets, problem.filters // sets
    if backward:
        depth, outs = outs, depth * fold
    else:
        depth *= fold
    return Product(backward, (rows, columns), sets, folded, folded_taps, tuple(pairs), depth, outs)


def _products(made: Product) -> int:
    """Return the tensor cores' products per image, zeros included."""
    depth, rows = divide_up(made.depth, STEP) * STEP, divide_up(made.rows, ROWS) * ROWS
    return made.positions * made.sets * made.taps * depth * rows


def refused(problem: ConvProblem, parts: int) -> str | None:
    """Return why neither direction can be computed, or `None`."""
    if problem.dtype == "float64":
        return "it computes float32 and float16 only, not float64"
    if problem.dtype == "float16" and parts == 1:
        return "it makes float32 arrays less exact; implicit_gemm_prepacked computes float16 ones"
    taps = math.prod(problem.kernel)
    if taps > _MOST_TAPS or max(problem.kernel) > _LONGEST:
        height, width = problem.kernel
        return f"it has room for {_MOST_TAPS} taps, {_LONGEST} in a line, not {height}x{width}"
    return None


def nominal(batch: int) -> int:
    """Return the nominal batch size for choosing layouts, so that one compilation serves a factor
    of four."""
    return next((size for below, size in ((4, 1), (16, 8), (64, 32)) if batch < below), 256)


def terms(problem: ConvProblem, direction: str) -> int:
    """Return the maximum number of terms in an element of a direction's result."""
    if direction == "backward_weight":
        return nominal(problem.batch) * problem.out_height * problem.out_width
    if direction == "forward":
        return problem.channels // problem.groups * math.prod(problem.kernel)
    reaching = (divide_up(*each) for each in zip(problem.kernel, problem.stride))
    return problem.filters // problem.groups * math.prod(reaching)


def halves_hold(problem: ConvProblem, direction: str) -> bool:
    """Return whether products of numbers in two halves are as exact as plain float32 arithmetic."""
    return problem.dtype == "float16" or terms(problem, direction) > _FEW_TERMS


def is_short(problem: ConvProblem, direction: str) -> bool:
    """Return whether tensor cores may sum at most SHORT_STEP terms before float32 registers do."""
    return problem.dtype != "float16" and terms(problem, direction) <= _SHORT_TERMS


def is_dense_product(problem: ConvProblem, made: Product) -> bool:
    """Return whether few zeros are multiplied; groups of one or two channels have other kernels."""
    needed = math.prod(problem.y_shape[1:]) * math.prod(problem.w_shape[1:])
    return _products(made) <= _MOST_ZEROS * needed


def both_busy(cycles: float) -> float:
    """Return the time of two warp groups that multiply for `cycles` each: one waits for its sums
    while the other multiplies."""
    return max(2 * cycles, cycles + _PROMOTION_CYCLES)


def defines(problem: ConvProblem, made: Product, accumulate: bool, bias: bool) -> Defines:
    sizes = {
        "IN": (problem.channels, problem.height, problem.width),
        "OUT": (problem.filters, problem.out_height, problem.out_width),
    }
    if made.backward:
        sizes = {"IN": sizes["OUT"], "OUT": sizes["IN"]}
    layer = [
        (f"{name}_{axis}", value)
        for name, values in sizes.items()
        for axis, value in zip(("CHANNELS", "H", "W"), values)
    ]
    grid = [
        (f"{name.upper()}_{letter}", getattr(axis, name))
        for letter, axis in zip("HW", made.axes)
        for name in ("grid", "in_first", "in_step", "out_first", "out_step", "valid", "last")
    ]
    return (
        *(*layer, *layer_macros.window(problem), ("GROUPS", problem.groups), *grid),
        *(("SETS", made.sets), ("FOLD", int(made.folded))),
        ("FOLD_TAPS", int(made.folded_taps)),
        *(_HALF if problem.dtype == "float16" else ()),
        *layer_macros.output(bias, accumulate),
    )
