"""Gradient for w if the whole batch has few pixels, in plain float32 arithmetic.

kernels/cuda/gemm/implicit_gemm_simt_backward_weight.cu explains the algorithm; this module
chooses the tiling.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import (
    ARCHITECTURES,
    Capability,
    Code,
    Family,
    Launch,
    Layout,
    Plan,
    divide_up,
    entry,
)
from . import gemm_grid, implicit_gemm_fused, layer_macros

# Typical number of multiprocessors; only the work partition depends on it.
_PROCESSORS = 132
# Warps with their own filters, and warps that split positions; filters and windows per thread, 9
# for 3x3 kernels; and maximum sums per thread.
_ROW_WARPS, _SHARES, _ROWS, _COLUMNS = (1, 2, 4, 8), (1, 2, 4, 8), (4, 8), (4, 8, 9)
_MOST_SUMS = 64
_LEAST_WARPS, _MOST_WARPS = 4, 16
# Maximum positions per step, and the number of parts in which they are loaded.
_MOST_DEPTH, _PARTS = 256, (1, 2)
# Maximum warps per multiprocessor, by registers; registers per thread besides sums and their
# operands.
_MOST_BUSY, _OTHER_REGISTERS = 32, 48
_MOST_LAYOUTS = 16
# Cost model, fitted to about 1100 runs on an H200; the chosen layouts take 1% longer than the best
# (at most 6%). A launch in microseconds; cycles per microsecond. Instructions of a product, of a
# thread for four positions in addition, and of a number copied to shared memory: alone, or in a
# vector of four.
_LAUNCH, _CYCLES = 3.5, 1755
_PRODUCT, _STEP, _COPY, _COPY_OF_FOUR = 1.36, 8, 25, 10.4
# Instructions of a sum within a thread; of one split over threads, and of each of its parts.
_OWN, _SHARED, _PART = 65, 2, 15
# Latency of a slab in cycles, and the fraction of it that is not hidden.
_LATENCY, _EXPOSED = 2370, 0.3


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: warps with their own filters, warps that split positions, filters and windows per
    thread, positions per step, and blocks per multiprocessor."""

    row_warps: int
    shares: int
    rows: int
    columns: int
    depth: int
    blocks: int

    @property
    def warps(self) -> int:
        return self.row_warps * self.shares

    @property
    def tile(self) -> tuple[int, int]:
        """Filters and windows."""
        return self.row_warps * 4 * self.rows, 8 * self.columns


@dataclass(frozen=True)
class ShortSums(Family):
    """The gradient for w: filters by channels and taps, summed over positions."""

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        if problem.groups != 1:
            return f"it computes groups 1 only, not {problem.groups}"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        room = gpu_limits.shared_bytes(capability)
        return list(_ordered(*_sizes(problem), _is_plain(problem), room)[:_MOST_LAYOUTS])

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        rows, columns, _ = _sizes(problem)
        layout = self.layouts(problem, capability)[0]
        positions = problem.batch * problem.out_height * problem.out_width
        time = microseconds(rows, columns, positions, _is_plain(problem), layout)
        laid_out = implicit_gemm_fused.Gemm("backward_weight").other_microseconds(problem)
        one_launch = implicit_gemm_fused.microseconds(problem, "backward_weight")
        return time < min(one_launch, laid_out)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        rows, columns, _ = _sizes(problem)
        of_tile, across = layout.tile
        nbytes = shared_bytes(layout)
        grid, block = (divide_up(columns, across), divide_up(rows, of_tile), 1), layout.warps * 32
        arguments = ("dw", "x", "dy", problem.batch)
        launch = Launch("multiply_positions", grid, (block, 1, 1), arguments, nbytes)
        macros = (
            *layer_macros.sizes(problem, "channels", "height", "width", "filters"),
            *layer_macros.window(problem),
            *layer_macros.output(False, accumulate),
            *layout.defines,
            ("SHARED_BYTES", nbytes),
        )
        return Plan(kernel, macros, (launch,))


def _sizes(problem: ConvProblem) -> tuple[int, int, int]:
    """Return filters, channels times taps, and positions of the nominal batch."""
    positions = gemm_grid.nominal(problem.batch) * problem.out_height * problem.out_width
    return problem.filters, problem.channels * math.prod(problem.kernel), positions


def _is_plain(problem: ConvProblem) -> bool:
    """Return whether windows are single pixels with the layout of positions."""
    return (problem.kernel, problem.stride, problem.pad) == ((1, 1), (1, 1), (0, 0))


# Cached: networks have hundreds of layers and query each several times.
@functools.lru_cache(maxsize=1024)
def _ordered(rows: int, columns: int, positions: int, plain: bool, room: int) -> tuple[Blocks, ...]:
    """Return layouts in order of estimated time."""
    fitting = _fitting(positions, room)
    return tuple(
        sorted(fitting, key=lambda each: microseconds(rows, columns, positions, plain, each))
    )


@functools.lru_cache(maxsize=1024)
def _fitting(positions: int, room: int) -> tuple[Blocks, ...]:
    """Return layouts with the most blocks that fit into shared memory and registers."""
    return tuple(_every(positions, room))


def _every(positions: int, room: int) -> Iterator[Blocks]:
    slabs = divide_up(positions, _MOST_DEPTH)
    depths = sorted({divide_up(divide_up(positions, slabs * by), 4) * 4 for by in _PARTS})
    for sizes in itertools.product(_ROW_WARPS, _SHARES, _ROWS, _COLUMNS, depths):
        row_warps, shares, rows, columns, _ = sizes
        warps = row_warps * shares
        if not _LEAST_WARPS <= warps <= _MOST_WARPS or rows * columns > _MOST_SUMS:
            continue
        registers = rows * columns + 4 * columns + 4 + _OTHER_REGISTERS
        nbytes = shared_bytes(Blocks(*sizes, 1))
        blocks = min(
            room // (nbytes + gpu_limits.RESERVED_SHARED_BYTES),
            gpu_limits.REGISTERS // (divide_up(registers, 8) * 8 * 32 * warps),
            _MOST_BUSY // warps,
        )
        if blocks:
            yield Blocks(*sizes, blocks)


def microseconds(rows: int, columns: int, positions: int, plain: bool, layout: Blocks) -> float:
    """Estimate the time of the product."""
    of_tile, across = layout.tile
    tiles = divide_up(rows, of_tile) * divide_up(columns, across)
    turns = divide_up(tiles, _PROCESSORS * layout.blocks)
    at_once = min(layout.blocks, divide_up(tiles, _PROCESSORS))
    slabs = divide_up(positions, layout.depth)
    # Instructions per warp.
    sums = layout.rows * layout.columns
    multiplied = divide_up(layout.depth // 4, layout.shares) * (4 * sums * _PRODUCT + _STEP)
    copy = _COPY if positions % 4 else _COPY_OF_FOUR
    copies = of_tile * copy + across * (copy if plain else _COPY)
    copied = layout.depth * copies / (32 * layout.warps)
    parts = of_tile * across * (layout.shares + 4) / (32 * layout.warps)
    written = sums * _OWN if layout.shares == 1 else sums * _SHARED + parts * _PART
    work = slabs * (copied + multiplied) + written
    cycles = turns * max(work * at_once * layout.warps / 4, work + slabs * _LATENCY)
    return _LAUNCH + (cycles + _EXPOSED * slabs * _LATENCY) / _CYCLES


def shared_bytes(layout: Blocks) -> int:
    """The size of the union Shared, which the source asserts."""
    rows, columns = layout.tile
    pitch = layout.depth if layout.depth % 8 == 4 else layout.depth + 4
    return 4 * max((rows + columns) * pitch, layout.shares * rows * (columns + 8))


KERNELS = (
    entry(
        "implicit_gemm_simt_backward_weight",
        "the gradient for w where images have few pixels, in float32 arithmetic",
        *(ShortSums(), 8, ARCHITECTURES[1:]),
        source="gemm/{}.cu",
    ),
)
