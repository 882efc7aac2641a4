"""Plans of the ladder's kernels that keep a tile of rows by filters in each thread's registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...problem import ConvProblem
from .plan import Capability, Defines, Kernel, Launch, Plan, divide_up
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


# What measured best on an H200 for layers of the course: height, width, filters and kernel.
_MEASURED_PAIRS = {
    (28, 28, 50, (5, 5)): (Tile(6, 1), 6),
    (48, 48, 6, (5, 5)): (Tile(4, 2), 6),
    (64, 64, 6, (5, 5)): (Tile(5, 1), 6),
    (70, 70, 12, (5, 5)): (Tile(3, 4), 4),
    (72, 72, 12, (7, 7)): (Tile(6, 1), 3),
}


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


def several_input_channels(problem: ConvProblem) -> str | None:
    """`too_large_kernel`, and what is not one channel with few enough weights."""
    if problem.channels > 1:
        return f"it computes one input channel only, not {problem.channels}"
    reason = too_large_kernel(problem)
    nbytes = 4 * (problem.filters + 3) * math.prod(problem.kernel)
    if reason is None and nbytes > _SHARED_BYTES:
        reason = f"its weights take {nbytes} bytes of shared memory, more than 48 KiB"
    return reason


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


def one_channel(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = choose_tile(problem, 4, most_rows=3) or Tile(1, 2)
    defines = _defines(problem, accumulate, tile)
    grid = (divide_up(_columns(problem, tile), _THREADS), 1, 1)
    launch = Launch("convolve", grid, (_THREADS, 1, 1), ("y", "x", "w", "bias", problem.batch))
    return Plan(kernel.name, kernel.source, defines, (launch,))


def odd_width(problem: ConvProblem) -> str | None:
    """`several_input_channels`, and columns that are not all in aligned pairs."""
    if problem.width % 2 or problem.out_width % 2:
        return (
            f"it computes columns in pairs, of even widths only, not {problem.width} and "
            f"{problem.out_width}"
        )
    return several_input_channels(problem)


def column_pairs(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile, blocks = choose_pairs(problem)
    grid = (divide_up(_columns(problem, tile) // 2, _THREADS), 1, 1)
    launch = Launch("convolve", grid, (_THREADS, 1, 1), ("y", "x", "w", "bias", problem.batch))
    defines = (*_defines(problem, accumulate, tile), ("MIN_BLOCKS", blocks))
    return Plan(kernel.name, kernel.source, defines, (launch,))


def choose_pairs(problem: ConvProblem) -> tuple[Tile, int]:
    """The tile of pairs of columns and the blocks that a processor is to hold."""
    layer = (problem.height, problem.width, problem.filters, problem.kernel)
    if layer in _MEASURED_PAIRS:
        return _MEASURED_PAIRS[layer]
    filters = min(2, problem.filters)
    (kh, kw) = problem.kernel
    rows = (_REGISTERS - (kh - 1) * (kw + 1)) // (2 * filters + kw + 1)
    rows = max(1, min(rows, 3, problem.out_height))
    rows = divide_up(problem.out_height, divide_up(problem.out_height, rows))
    registers = 2 * filters * rows + (rows + kh - 1) * (kw + 1) + 20
    return Tile(rows, filters), max(1, min(6, _ALL_REGISTERS // (_THREADS * registers)))


def channel_tree(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = _tile(problem)
    split = _SPLIT if problem.channels >= _SPLIT else 2
    threads = _THREADS // split
    chunk = _chunk(problem, tile, problem.channels, 4, 24 << 10)
    defines = (
        *_defines(problem, accumulate, tile),
        *(("CHUNK", chunk), ("SPLIT", split), ("THREADS", threads)),
    )
    blocks = divide_up(_columns(problem, tile), threads) * divide_up(problem.filters, tile.filters)
    launch = Launch(
        "convolve", (blocks, 1, 1), (threads, split, 1), ("y", "x", "w", "bias", problem.batch)
    )
    return Plan(kernel.name, kernel.source, defines, (launch,))


def channel_atomics(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = _tile(problem)
    chunk = _chunk(problem, tile, min(4, divide_up(problem.channels, 2)), 4)
    defines = (*_defines(problem, accumulate, tile), ("CHUNK", chunk))
    elements = math.prod(problem.y_shape)
    prepare = Launch(
        "prepare", (divide_up(elements, 256), 1, 1), (256, 1, 1), ("y", "bias", elements)
    )
    blocks = divide_up(_columns(problem, tile), _THREADS)
    blocks *= divide_up(problem.filters, tile.filters) * divide_up(problem.channels, chunk)
    add = Launch("convolve", (blocks, 1, 1), (_THREADS, 1, 1), ("y", "x", "w", problem.batch))
    return Plan(kernel.name, kernel.source, defines, (prepare, add))


def _single(
    kernel: Kernel, problem: ConvProblem, accumulate: bool, tile: Tile, extra: Defines
) -> Plan:
    defines = (*_defines(problem, accumulate, tile), *extra)
    blocks = divide_up(_columns(problem, tile), _THREADS)
    grid = (blocks * divide_up(problem.filters, tile.filters), 1, 1)
    launch = Launch("convolve", grid, (_THREADS, 1, 1), ("y", "x", "w", "bias", problem.batch))
    return Plan(kernel.name, kernel.source, defines, (launch,))


def _tile(problem: ConvProblem) -> Tile:
    return choose_tile(problem, 8) or Tile(1, 2)


def _defines(problem: ConvProblem, accumulate: bool, tile: Tile) -> Defines:
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
