"""Plans of the ladder's kernels for one input channel, whose pixels stay in registers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ....problem import ConvProblem
from ..plan import Capability, Defines, Kernel, Launch, Plan, Tunables, divide_up
from .register_tiles import Tile, choose_tile, shape_defines, tile_defines, too_large_kernel
from .runtime_shapes import output_defines

_SHARED_BYTES = 48 << 10
# Blocks of kernel 15 for each that a processor holds: those that run at a time should be at work
# on neighbouring images, and blocks that stay for all of their images drift apart.
_ROUNDS = 18
_THREADS = 128
ALL_REGISTERS = 65536
# Sums and pixels that a thread holds besides addresses, of the 128 registers it may have.
_REGISTERS = 104
# Registers of a thread of kernels 15, 16 and 19 at most, and those for what is neither pixels nor
# sums.
MOST_REGISTERS, _OTHER_REGISTERS = 160, 22
_FEW_REGISTERS = 96

# What measured best on an H200 for layers of the course: height, width, filters and kernel.
_MEASURED_PAIRS = {
    (28, 28, 50, (5, 5)): (Tile(6, 1), 6),
    (48, 48, 6, (5, 5)): (Tile(4, 2), 6),
    (64, 64, 6, (5, 5)): (Tile(5, 1), 6),
    (70, 70, 12, (5, 5)): (Tile(3, 4), 4),
    (72, 72, 12, (7, 7)): (Tile(6, 1), 3),
}


def several_input_channels(problem: ConvProblem) -> str | None:
    """`too_large_kernel`, and what is not one channel with few enough weights."""
    if problem.channels > 1:
        return f"it computes one input channel only, not {problem.channels}"
    reason = too_large_kernel(problem)
    nbytes = 4 * (problem.filters + 3) * math.prod(problem.kernel)
    if reason is None and nbytes > _SHARED_BYTES:
        reason = f"its weights take {nbytes} bytes of shared memory, more than 48 KiB"
    return reason


def odd_width(problem: ConvProblem) -> str | None:
    """`several_input_channels`, and columns that are not all in aligned pairs."""
    if problem.width % 2 or problem.out_width % 2:
        return (
            f"it computes columns in pairs, of even widths only, not {problem.width} and "
            f"{problem.out_width}"
        )
    return several_input_channels(problem)


def one_channel(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile = choose_tile(problem, 4, most_rows=3) or Tile(1, 2)
    defines = tile_defines(problem, accumulate, tile)
    columns = problem.batch * divide_up(problem.out_height, tile.rows) * problem.out_width
    return _plan(kernel, problem, defines, divide_up(columns, _THREADS))


def column_pairs(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    tile, blocks = choose_pairs(problem)
    defines = (*tile_defines(problem, accumulate, tile), ("MIN_BLOCKS", blocks))
    return _plan(kernel, problem, defines, divide_up(windows_of(problem, tile.rows), _THREADS))


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
    return Tile(rows, filters), max(1, min(6, ALL_REGISTERS // (_THREADS * registers)))


class Fewer(NamedTuple):
    """How 15 is laid out: rows of a thread, and blocks that a processor is to hold."""

    rows: int
    blocks: int


def no_fewer_products(problem: ConvProblem) -> str | None:
    """What is not one channel with rows of taps in twos and a three that fit into registers."""
    if problem.channels > 1:
        return f"it computes one input channel only, not {problem.channels}"
    reason = too_large_kernel(problem)
    if reason is not None:
        return reason
    if problem.kernel[1] % 2 == 0 or problem.kernel[1] == 1:
        return f"it takes kernels of odd widths from 3 only, not {problem.kernel[1]}"
    if registers(problem, 1) > MOST_REGISTERS:
        return (
            f"what it makes of the pixels takes {registers(problem, 1)} registers for a kernel "
            f"of {problem.kernel[0]}x{problem.kernel[1]}, more than {MOST_REGISTERS}"
        )
    if factor_bytes(problem) > _SHARED_BYTES:
        return (
            f"what it makes of the weights takes {factor_bytes(problem)} bytes of shared memory, "
            "more than 48 KiB"
        )
    return None


def prefers_fewer_products(problem: ConvProblem, _: Capability) -> bool:
    """Whether 15 is faster than 13: where it is arithmetic that takes the time."""
    return problem.kernel[1] >= 7 and problem.out_width % 2 == 0


def fewer_products(
    kernel: Kernel,
    problem: ConvProblem,
    _: Capability,
    accumulate: bool,
    tunables: Tunables = (),
) -> Plan:
    tile = Fewer(**dict(tunables)) if tunables else _default_fewer(problem)
    defines = (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        *(("ROWS", tile.rows), ("MIN_BLOCKS", tile.blocks)),
    )
    blocks = divide_up(windows_of(problem, tile.rows), _THREADS)
    return _plan(kernel, problem, defines, blocks, _ROUNDS * tile.blocks)


def fewer_products_choices(problem: ConvProblem, _: Capability) -> Iterator[Tunables]:
    """Tunables of `fewer_products`."""
    possible = possible_rows(problem)
    for rows in [rows for rows in possible if rows > 2] or possible:
        most = _most_blocks(problem, rows)
        for blocks in (most, most - 1)[:most]:
            yield tuple(Fewer(rows, blocks)._asdict().items())


def _default_fewer(problem: ConvProblem) -> Fewer:
    """Few enough registers for five blocks, or else as many rows as there are registers for."""
    possible = possible_rows(problem)
    few = [r for r in possible if r > 2 and registers(problem, r) <= _FEW_REGISTERS]
    rows = max(few or possible)
    return Fewer(rows, _most_blocks(problem, rows))


def possible_rows(problem: ConvProblem) -> list[int]:
    """Rows of a thread that cover the output with few to spare and fit into registers."""
    height = problem.out_height
    even = {divide_up(height, divide_up(height, rows)) for rows in range(1, 9)}
    return sorted(r for r in even if registers(problem, r) <= MOST_REGISTERS)


def registers(problem: ConvProblem, rows: int) -> int:
    """Registers of a thread of kernels 15, 16 and 19, about."""
    kh, kw = problem.kernel
    return (rows + kh - 1) * _row_products(kw) + 3 * rows + _OTHER_REGISTERS


def _row_products(kernel_w: int) -> int:
    """Products of a pair of outputs with a row of taps."""
    return 3 * (kernel_w // 2) + 1


def factor_bytes(problem: ConvProblem) -> int:
    """Of what the products have of the weights, for each filter in whole words of 16 bytes."""
    kh, kw = problem.kernel
    return 4 * problem.filters * whole(kh * _row_products(kw), 4)


def _most_blocks(problem: ConvProblem, rows: int) -> int:
    """Blocks of kernel 15 that a processor's registers suffice for."""
    return max(1, min(8, ALL_REGISTERS // (_THREADS * registers(problem, rows))))


def windows_of(problem: ConvProblem, rows: int) -> int:
    """Threads that it takes: one for each pair of columns of each strip of rows of each image."""
    strips = divide_up(problem.out_height, rows)
    return problem.batch * strips * divide_up(problem.out_width, 2)


def whole(count: int, size: int) -> int:
    """`count` rounded up to a multiple of `size`."""
    return divide_up(count, size) * size


def _plan(
    kernel: Kernel, problem: ConvProblem, defines: Defines, blocks: int, persistent: int = 0
) -> Plan:
    """One launch; `persistent` blocks for each processor, if any."""
    arguments = ("y", "x", "w", "bias", problem.batch)
    launch = Launch("convolve", (blocks, 1, 1), (_THREADS, 1, 1), arguments, 0, persistent)
    return Plan(kernel, defines, (launch,))
