"""Ladder kernels that keep a tile of rows by filters in each thread's registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Capability, Code, Defines, Family, Launch, Layout, Plan, divide_up, entry
from . import layer_macros
from .runtime_shapes import not_plain

_THREADS = 128
# Registers for sums and pixels, of the 128 registers per thread.
_REGISTERS = 104
_SPLIT = 4


@dataclass(frozen=True)
class Tile(Layout):
    """Rows by filters per thread."""

    rows: int
    block_filters: int


def choose_tile(
    problem: ConvProblem, most_filters: int, per_sum: float = 1, most_rows: int = 16
) -> Tile | None:
    """Return the largest tile that fits into registers, with `per_sum` registers per sum, or
    `None`."""
    blocks = divide_up(problem.filters, most_filters)
    filters = divide_up(problem.filters, blocks)
    filters += filters % 2 if filters > 1 else 0
    (kh, kw) = problem.kernel
    rows = int((_REGISTERS - (kh - 1) * kw) / (filters * per_sum + kw))
    if rows < 1:
        return Tile(1, 2) if kh * kw + 2 * per_sum <= _REGISTERS else None
    strips = divide_up(problem.out_height, min(rows, most_rows, problem.out_height))
    return Tile(divide_up(problem.out_height, strips), filters)


def too_large_kernel(problem: ConvProblem) -> str | None:
    """Return why it is not plain or its window does not fit into registers, or `None`."""
    reason = not_plain(problem)
    if reason is None and math.prod(problem.kernel) > _REGISTERS - 4:
        reason = (
            f"it keeps a window of the kernel's size in registers, at most {_REGISTERS - 4} "
            f"pixels, not {problem.kernel[0]}x{problem.kernel[1]}"
        )
    return reason


def shape_defines(problem: ConvProblem) -> Defines:
    """Return the macros of shape.cuh."""
    sizes = layer_macros.sizes(problem, "channels", "height", "width", "filters")
    return (*sizes, *layer_macros.window(problem)[:2])


@dataclass(frozen=True)
class _Chunked(Tile):
    """A tile and the channels whose weights are in shared memory at a time."""

    chunk: int


class RegisterTiles(Family):
    """Kernels with one thread per column of a strip of rows, for some filters."""

    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        return too_large_kernel(problem)

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        tile = _tile(problem)
        chunk = _chunk(problem, tile, problem.channels, 4)
        return (_Chunked(tile.rows, tile.block_filters, chunk),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        blocks, arguments = _tiles(problem, layout, _THREADS), ("y", "x", "w", "bias")
        launch = Launch.line("convolve", blocks, _THREADS, (*arguments, problem.batch))
        return Plan(kernel, defines(problem, layout, accumulate), (launch,))


class Half(RegisterTiles):
    """Filters in pairs, in half precision."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        tile = choose_tile(problem, 8, 1.5) or Tile(1, 2)
        tile = Tile(tile.rows, max(2, tile.block_filters))
        chunk = _chunk(problem, tile, problem.channels, 2)
        return (_Chunked(tile.rows, tile.block_filters, chunk),)


@dataclass(frozen=True)
class _Split(_Chunked):
    """A chunked tile and the number of channel parts, each with its own threads."""

    split: int
    threads: int


class ChannelTree(Family):
    """Kernels in which the threads of a block split the channels of an output."""

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.channels == 1:
            return "it splits the sum over input channels, and there is one"
        return too_large_kernel(problem)

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        tile = _tile(problem)
        split = _SPLIT if problem.channels >= _SPLIT else 2
        chunk = _chunk(problem, tile, problem.channels, 4, gpu_limits.STATIC_SHARED_BYTES // 2)
        return (_Split(tile.rows, tile.block_filters, chunk, split, _THREADS // split),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: _Split, accumulate: bool) -> Plan:
        launch = Launch(
            "convolve",
            (_tiles(problem, layout, layout.threads), 1, 1),
            (layout.threads, layout.split, 1),
            ("y", "x", "w", "bias", problem.batch),
        )
        return Plan(kernel, defines(problem, layout, accumulate), (launch,))


class ChannelAtomics(ChannelTree):
    """Kernels in which blocks split the channels of an output."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        tile = _tile(problem)
        chunk = _chunk(problem, tile, min(4, divide_up(problem.channels, 2)), 4)
        return (_Chunked(tile.rows, tile.block_filters, chunk),)

    def activates(self, accumulate: bool) -> bool:
        # Sums are complete only when all blocks have ended, so there is no place for an epilogue.
        return False

    def plan(self, kernel: Code, problem: ConvProblem, layout: _Chunked, accumulate: bool) -> Plan:
        elements = math.prod(problem.y_shape)
        prepare = Launch.line("prepare", divide_up(elements, 256), 256, ("y", "bias", elements))
        blocks = _tiles(problem, layout, _THREADS) * divide_up(problem.channels, layout.chunk)
        add = Launch.line("convolve", blocks, _THREADS, ("y", "x", "w", problem.batch))
        return Plan(kernel, defines(problem, layout, accumulate), (prepare, add))


def _tile(problem: ConvProblem) -> Tile:
    return choose_tile(problem, 8) or Tile(1, 2)


def defines(problem: ConvProblem, layout: Layout, accumulate: bool) -> Defines:
    """Return the macros of shape.cuh, output.cuh and the layout."""
    return (
        *shape_defines(problem),
        *layer_macros.output(problem.bias, accumulate),
        *layout.defines,
    )


def _tiles(problem: ConvProblem, tile: Tile, threads: int) -> int:
    """Return the blocks for one thread per column of a strip of rows of an image."""
    columns = problem.batch * divide_up(problem.out_height, tile.rows) * problem.out_width
    return divide_up(columns, threads) * divide_up(problem.filters, tile.block_filters)


def _chunk(
    problem: ConvProblem,
    tile: Tile,
    most: int,
    item_bytes: int,
    limit: int = gpu_limits.STATIC_SHARED_BYTES,
) -> int:
    """Return the channels whose weights fit into shared memory at a time."""
    channel_bytes = item_bytes * math.prod(problem.kernel) * tile.block_filters
    return max(1, min(most, limit // channel_bytes))


KERNELS = (
    entry(
        "6_register_tiles",
        "rows by filters in each thread's registers, shapes known at compile time",
        *(RegisterTiles(), 14),
    ),
    entry("7_channel_tree", "channels split within a block and reduced by a tree", ChannelTree()),
    entry(
        "8_channel_atomics",
        "channels split between blocks and reduced by atomic additions",
        ChannelAtomics(),
    ),
    entry("9_half", "6 in half precision, two filters an instruction", Half(), precision="float16"),
)
