"""Plans of the ladder's kernels that keep a tile of rows by filters in each thread's registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ..plan import Capability, Defines, Kernel, Launch, Plan, divide_up
from .runtime_shapes import not_plain, output_defines

_SHARED_BYTES = 48 << 10
_THREADS = 128
# Sums and pixels that a thread holds besides addresses, of the 128 registers it may have.
_REGISTERS = 104
_SPLIT = 4
_ALL_REGISTERS = 65536


@dataclass(frozen=True)
class Tile:
    """Rows by filters of a thread."""

    rows: int
    filters: int


def choose_tile(
    problem: ConvProblem, most_filters: int, per_sum: float = 1, most_rows: int = 16
) -> Tile | None:
    """The largest tile that fits into registers, `per_sum` of them for each sum; or `None`."""
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
    """`not_plain`, and kernels whose window does not fit into registers."""
    reason = not_plain(problem)
    if reason is None and math.prod(problem.kernel) > _REGISTERS - 4:
        reason = (
            f"it keeps a window of the kernel's size in registers, at most {_REGISTERS - 4} "
            f"pixels, not {problem.kernel[0]}x{problem.kernel[1]}"
        )
    return reason


def one_input_channel(problem: ConvProblem) -> str | None:
    """`too_large_kernel`, and channels that leave nothing to reduce."""
    if problem.channels == 1:
        return "it splits the sum over input channels, and there is one"
    return too_large_kernel(problem)


def shape_defines(problem: ConvProblem) -> Defines:
    """The macros of shape.cuh."""
    return (
        ("CHANNELS", problem.channels),
        ("HEIGHT", problem.height),
        ("WIDTH", problem.width),
        ("FILTERS", problem.filters),
        ("KERNEL_H", problem.kernel[0]),
        ("KERNEL_W", problem.kernel[1]),
    )


def register_tiles(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = _tile(problem)
    chunk = _chunk(problem, tile, problem.channels, 4)
    return _single(kernel, problem, accumulate, tile, (("CHUNK", chunk),))


def half(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = choose_tile(problem, 8, 1.5) or Tile(1, 2)
    tile = Tile(tile.rows, max(2, tile.filters))
    chunk = _chunk(problem, tile, problem.channels, 2)
    return _single(kernel, problem, accumulate, tile, (("CHUNK", chunk),))


def channel_tree(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = _tile(problem)
    split = _SPLIT if problem.channels >= _SPLIT else 2
    threads = _THREADS // split
    chunk = _chunk(problem, tile, problem.channels, 4, 24 << 10)
    defines = (
        *tile_defines(problem, accumulate, tile),
        *(("CHUNK", chunk), ("SPLIT", split), ("THREADS", threads)),
    )
    blocks = divide_up(_columns(problem, tile), threads) * divide_up(problem.filters, tile.filters)
    launch = Launch(
        "convolve", (blocks, 1, 1), (threads, split, 1), ("y", "x", "w", "bias", problem.batch)
    )
    return Plan(kernel, defines, (launch,))


def channel_atomics(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = _tile(problem)
    chunk = _chunk(problem, tile, min(4, divide_up(problem.channels, 2)), 4)
    defines = (*tile_defines(problem, accumulate, tile), ("CHUNK", chunk))
    elements = math.prod(problem.y_shape)
    prepare = Launch(
        "prepare", (divide_up(elements, 256), 1, 1), (256, 1, 1), ("y", "bias", elements)
    )
    blocks = divide_up(_columns(problem, tile), _THREADS)
    blocks *= divide_up(problem.filters, tile.filters) * divide_up(problem.channels, chunk)
    add = Launch("convolve", (blocks, 1, 1), (_THREADS, 1, 1), ("y", "x", "w", problem.batch))
    return Plan(kernel, defines, (prepare, add))


def _single(
    kernel: Kernel, problem: ConvProblem, accumulate: bool, tile: Tile, extra: Defines
) -> Plan:
    defines = (*tile_defines(problem, accumulate, tile), *extra)
    blocks = divide_up(_columns(problem, tile), _THREADS)
    grid = (blocks * divide_up(problem.filters, tile.filters), 1, 1)
    launch = Launch("convolve", grid, (_THREADS, 1, 1), ("y", "x", "w", "bias", problem.batch))
    return Plan(kernel, defines, (launch,))


def _tile(problem: ConvProblem) -> Tile:
    return choose_tile(problem, 8) or Tile(1, 2)


def tile_defines(problem: ConvProblem, accumulate: bool, tile: Tile) -> Defines:
    """The macros of shape.cuh, output.cuh and of a tile."""
    return (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        *(("ROWS", tile.rows), ("BLOCK_FILTERS", tile.filters)),
    )


def _columns(problem: ConvProblem, tile: Tile) -> int:
    """Threads that it takes: one for each column of each strip of rows of each image."""
    return problem.batch * divide_up(problem.out_height, tile.rows) * problem.out_width


def _chunk(
    problem: ConvProblem, tile: Tile, most: int, item_bytes: int, limit: int = _SHARED_BYTES
) -> int:
    """Channels whose weights fit into shared memory together."""
    channel_bytes = item_bytes * math.prod(problem.kernel) * tile.filters
    return max(1, min(most, limit // channel_bytes))
