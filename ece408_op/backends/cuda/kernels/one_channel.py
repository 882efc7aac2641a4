"""Ladder kernels for one input channel; a thread keeps its pixels in registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Capability, Code, Family, Launch, Layout, Plan, divide_up, entry
from .register_tiles import Tile, choose_tile, defines, too_large_kernel

# Number of grids of resident blocks that kernel 15 launches. Concurrent blocks should process
# adjacent images; persistent blocks drift apart.
_ROUNDS = 18
_THREADS = 128
# Registers for sums and pixels, of the 128 registers per thread.
_REGISTERS = 104
# Maximum registers per thread of kernels 15, 16 and 19, and those for anything but pixels and sums.
MOST_REGISTERS, _OTHER_REGISTERS = 160, 22
_FEW_REGISTERS = 96


@dataclass(frozen=True)
class _Blocks(Tile):
    """A tile and the blocks per multiprocessor."""

    blocks: int


# Fastest on an H200 for layers of the course: height, width, filters and kernel.
_MEASURED_PAIRS = {
    (28, 28, 50, (5, 5)): _Blocks(6, 1, 6),
    (48, 48, 6, (5, 5)): _Blocks(4, 2, 6),
    (64, 64, 6, (5, 5)): _Blocks(5, 1, 6),
    (70, 70, 12, (5, 5)): _Blocks(3, 4, 4),
    (72, 72, 12, (7, 7)): _Blocks(6, 1, 3),
}


class OneChannel(Family):
    """Kernels with one thread per column of a strip of rows, for some filters."""

    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.channels > 1:
            return f"it computes one input channel only, not {problem.channels}"
        reason = too_large_kernel(problem)
        nbytes = 4 * (problem.filters + 3) * math.prod(problem.kernel)
        if reason is None and nbytes > gpu_limits.STATIC_SHARED_BYTES:
            reason = f"its weights take {nbytes} bytes of shared memory, more than 48 KiB"
        return reason

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        return (choose_tile(problem, 4, most_rows=3) or Tile(1, 2),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        columns = problem.batch * divide_up(problem.out_height, layout.rows) * problem.out_width
        return _plan(kernel, problem, layout, accumulate, divide_up(columns, _THREADS))


class ColumnPairs(OneChannel):
    """Kernels with one thread per pair of columns."""

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.width % 2 or problem.out_width % 2:
            return (
                f"it computes columns in pairs, of even widths only, not {problem.width} and "
                f"{problem.out_width}"
            )
        return super().why_not(problem)

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Layout, ...]:
        layer = (problem.height, problem.width, problem.filters, problem.kernel)
        if layer in _MEASURED_PAIRS:
            return (_MEASURED_PAIRS[layer],)
        filters = min(2, problem.filters)
        (kh, kw) = problem.kernel
        rows = (_REGISTERS - (kh - 1) * (kw + 1)) // (2 * filters + kw + 1)
        rows = max(1, min(rows, 3, problem.out_height))
        rows = divide_up(problem.out_height, divide_up(problem.out_height, rows))
        registers = 2 * filters * rows + (rows + kh - 1) * (kw + 1) + 20
        return (_Blocks(rows, filters, _blocks(registers, 6)),)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Tile, accumulate: bool) -> Plan:
        blocks = divide_up(windows_of(problem, layout.rows), _THREADS)
        return _plan(kernel, problem, layout, accumulate, blocks)


@dataclass(frozen=True)
class _Rows(Layout):
    """Rows per thread and blocks per multiprocessor."""

    rows: int
    blocks: int


class Winograd(Family):
    """Winograd F(2, 3) along the rows, with one thread per pair of columns of a strip of rows."""

    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        return no_winograd(problem)

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Layout]:
        """Return first the layout with registers for five blocks, else with the most rows that
        registers allow; then the others."""
        possible = possible_rows(problem)
        several = [rows for rows in possible if rows > 2]
        few = [rows for rows in several if registers(problem, rows) <= _FEW_REGISTERS]
        best = max(few or possible)
        found = [_Rows(best, _blocks(registers(problem, best), 8))]
        for rows in several or possible:
            most = _blocks(registers(problem, rows), 8)
            found += [_Rows(rows, blocks) for blocks in (most, most - 1)[:most]]
        return list(dict.fromkeys(found))

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        # For smaller kernels memory limits 13_column_pairs, not arithmetic.
        return problem.kernel[1] >= 7 and problem.out_width % 2 == 0

    def plan(self, kernel: Code, problem: ConvProblem, layout: _Rows, accumulate: bool) -> Plan:
        blocks = divide_up(windows_of(problem, layout.rows), _THREADS)
        return _plan(kernel, problem, layout, accumulate, blocks, _ROUNDS * layout.blocks)


def no_winograd(problem: ConvProblem) -> str | None:
    """Return why a problem is not one channel with rows of taps in twos and a three that fit into
    registers, or `None`."""
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
    if factor_bytes(problem) > gpu_limits.STATIC_SHARED_BYTES:
        return (
            f"what it makes of the weights takes {factor_bytes(problem)} bytes of shared memory, "
            "more than 48 KiB"
        )
    return None


def possible_rows(problem: ConvProblem) -> list[int]:
    """Return rows per thread that cover the output with little waste and fit into registers."""
    height = problem.out_height
    even = {divide_up(height, divide_up(height, rows)) for rows in range(1, 9)}
    return sorted(r for r in even if registers(problem, r) <= MOST_REGISTERS)


def registers(problem: ConvProblem, rows: int) -> int:
    """Estimate the registers per thread of kernels 15, 16 and 19."""
    kh, kw = problem.kernel
    return (rows + kh - 1) * _row_products(kw) + 3 * rows + _OTHER_REGISTERS


def _row_products(kernel_w: int) -> int:
    """Return the products of a pair of outputs with a row of taps."""
    return 3 * (kernel_w // 2) + 1


def factor_bytes(problem: ConvProblem) -> int:
    """Return the bytes of transformed weights; each filter has whole words of 16 bytes."""
    kh, kw = problem.kernel
    return 4 * problem.filters * whole(kh * _row_products(kw), 4)


def _blocks(registers: int, most: int) -> int:
    """Return the blocks per multiprocessor that the registers allow, from 1 to `most`."""
    return max(1, min(most, gpu_limits.REGISTERS // (_THREADS * registers)))


def windows_of(problem: ConvProblem, rows: int) -> int:
    """Return the threads of a launch: one per pair of columns of a strip of rows of an image."""
    strips = divide_up(problem.out_height, rows)
    return problem.batch * strips * divide_up(problem.out_width, 2)


def whole(count: int, size: int) -> int:
    """Round `count` up to a multiple of `size`."""
    return divide_up(count, size) * size


def _plan(
    kernel: Code,
    problem: ConvProblem,
    layout: Layout,
    accumulate: bool,
    blocks: int,
    persistent: int = 0,
) -> Plan:
    """Return a plan of one launch, with `persistent` blocks per multiprocessor unless 0."""
    arguments = ("y", "x", "w", "bias", problem.batch)
    launch = Launch("convolve", (blocks, 1, 1), (_THREADS, 1, 1), arguments, 0, persistent)
    return Plan(kernel, defines(problem, layout, accumulate), (launch,))


KERNELS = (
    entry(
        "12_one_channel",
        "one input channel: its pixels stay in registers for all filters",
        OneChannel(),
        5,
    ),
    entry(
        "13_column_pairs", "one input channel, columns loaded and stored in pairs", ColumnPairs(), 4
    ),
    entry(
        "15_winograd",
        "one input channel, seven multiplications in place of ten (Winograd)",
        Winograd(),
        3,
    ),
)
