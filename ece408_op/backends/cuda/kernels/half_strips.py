"""Kernels that pack images in half precision for Hopper's tensor cores."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Capability, Code, Family, Launch, Layout, Plan, divide_up, entry
from . import gemm_grid, implicit_gemm_fused, implicit_gemm_prepacked, layer_macros
from .register_tiles import defines

_PROCESSOR_BYTES = gpu_limits.shared_bytes((9, 0))
_RECORD_BYTES = 16
# Maximum steps; their loop is unrolled.
_MOST_STEPS = 128
# Maximum groups of four warps per block, and per multiprocessor.
_MOST_GROUPS = 4
_MOST_BUSY = 8
_MOST_TILES = 4
_MOST_REGISTERS = 232
# Registers per thread: for each tile of filters, by parts; and for everything but these and pixels.
_TILE_REGISTERS = {1: 4, 2: 16}
_OTHER_REGISTERS = 20
# Typical multiply-adds per cycle and multiprocessor of a plain float32 kernel.
_FLOAT_RATE = 70
_PIXELS_AT_ONCE = 64
# Cost model, fitted to runs on an H200, in microseconds: a launch, an estimated cycle, and a weight
# per block; and the relative cost of pixels that are not held in registers.
_LAUNCH, _CYCLE, _WEIGHT, _NOT_HELD = 4, 1.1 / 1750, 0.8e-3, 2.5
# Relative cost of reading pixels only when they are needed, and of reading them twice.
_HELD_COSTS = {2: 0, 1: 0.12, 0: 0.3}


@dataclass(frozen=True)
class Strips(Layout):
    """Tiling of a block: rows and filters, warp groups, blocks per multiprocessor, and whether
    pixels are held in registers (2: they are loaded while the previous strip is computed)."""

    strip_rows: int
    filter_tiles: int
    filter_turns: int
    groups: int
    blocks: int
    held: int = 0


@dataclass(frozen=True)
class HalfStrips(Family):
    """Kernels that split every factor into `parts` half-precision numbers; 2 give float32
    accuracy."""

    parts: int
    spaced = True
    stores = True

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.groups != 1:
            return f"it computes groups 1 only, not {problem.groups}"
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        if steps(problem) > _MOST_STEPS:
            return (
                f"its loop over channels and taps is unrolled, for at most {_MOST_STEPS} steps, "
                f"not {steps(problem)}"
            )
        most = _PROCESSOR_BYTES - gpu_limits.RESERVED_SHARED_BYTES
        nbytes = shared_bytes(problem, self.parts, Strips(1, 1, 1, _MOST_GROUPS, 1))
        if nbytes > most:
            return (
                f"weights of 8 filters and input of one row take {nbytes} bytes of shared memory, "
                f"more than {most}"
            )
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Strips]:
        return _layouts(dataclasses.replace(problem, batch=1), self.parts)[:16]

    def holds(self, problem: ConvProblem) -> bool:
        return gemm_grid.halves_hold(problem, "forward")

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        """Return whether the estimate is lower than that of a kernel without tensor cores, and than
        `implicit_gemm_prepacked` and `implicit_gemm_fused`, or `implicit_gemm_prepacked_half`."""
        layout = self.layouts(problem, capability)[0]
        cycles = _cycles(problem, self.parts, layout)
        if not implicit_gemm_prepacked.Gemm(False).pays(problem, capability):
            products = math.prod(problem.y_shape[1:]) * math.prod(problem.w_shape[1:])
            return cycles < products / _FLOAT_RATE
        # Work per multiprocessor: images, or whole strips if there are few images.
        filters = 8 * layout.filter_tiles * layout.filter_turns
        strips = divide_up(problem.out_height, layout.strip_rows)
        strips *= divide_up(problem.filters, filters)
        cycles *= divide_up(problem.batch * strips, gemm_grid.PROCESSORS) / strips
        time = _CYCLE * cycles + _WEIGHT * filters * math.prod(problem.w_shape[1:])
        if not layout.held:
            time *= _NOT_HELD
        others = [implicit_gemm_prepacked.microseconds(problem, False, self.parts)]
        if self.parts == 2:
            others.append(implicit_gemm_fused.microseconds(problem, "forward"))
        return _LAUNCH + time < min(others)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Strips, accumulate: bool) -> Plan:
        nbytes = shared_bytes(problem, self.parts, layout)
        units = problem.batch * divide_up(problem.out_height, layout.strip_rows)
        sets = divide_up(problem.filters, 8 * layout.filter_tiles * layout.filter_turns)
        grid, block, read = (units, sets, 1), (128 * layout.groups, 1, 1), ("y", "x", "w", "bias")
        launch = Launch("convolve", grid, block, (*read, problem.batch), nbytes, layout.blocks)
        macros = (*defines(problem, layout, accumulate), ("SHARED_BYTES", nbytes))
        return Plan(kernel, (*macros, *layer_macros.window(problem)[2:]), (launch,))


@functools.lru_cache(maxsize=256)
def _layouts(problem: ConvProblem, parts: int) -> list[Strips]:
    """Return layouts that fit, in order of estimated time."""
    found = set()
    for in_block in _parts_of(divide_up(problem.filters, 8)):
        turns = divide_up(in_block, _MOST_TILES)
        for rows in _parts_of(problem.out_height):
            found |= set(_fitting(problem, parts, rows, divide_up(in_block, turns), turns))
    return sorted(found, key=lambda layout: (_cycles(problem, parts, layout), str(layout)))


def _parts_of(count: int) -> set[int]:
    """Return the sizes of the largest of nearly equal parts, for each number of parts."""
    return {divide_up(count, parts) for parts in range(1, count + 1)}


def _fitting(
    problem: ConvProblem, parts: int, rows: int, tiles: int, turns: int
) -> Iterator[Strips]:
    """Yield layouts that fit into shared memory and registers."""
    pixels = _strip_height(problem, rows) * _padded_width(problem)
    for groups in range(1, _MOST_GROUPS + 1):
        layout = Strips(rows, tiles, turns, groups, 1)
        room = _PROCESSOR_BYTES // (
            shared_bytes(problem, parts, layout) + gpu_limits.RESERVED_SHARED_BYTES
        )
        pixel_registers = divide_up(pixels, 128 * groups) * problem.channels
        for blocks in range(1, min(room, _MOST_BUSY // groups) + 1):
            registers = min(gpu_limits.REGISTERS // (1024 * groups * blocks) * 8, _MOST_REGISTERS)
            registers -= _OTHER_REGISTERS
            beside_sums = registers - _TILE_REGISTERS[parts] * tiles
            held = (pixel_registers <= registers - 12) + (pixel_registers <= beside_sums)
            if beside_sums >= _OTHER_REGISTERS:
                yield dataclasses.replace(layout, blocks=blocks, held=held)


def _cycles(problem: ConvProblem, parts: int, layout: Strips) -> float:
    """Estimate the cycles of a multiprocessor per image.

    The limit is shared memory: pixels and weights are read at 128 bytes per cycle. Other terms are
    fitted to times on an H200: blocks of a multiprocessor load in turn, and about four warp groups
    keep it busy.
    """
    columns = [8 * layout.filter_tiles * count for count in range(parts, 0, -1)]
    step = sum(max(n / 2, 16 + n / 4) for n in columns)
    strips = divide_up(problem.out_height, layout.strip_rows)
    filter_blocks = divide_up(problem.filters, 8 * layout.filter_tiles * layout.filter_turns)
    tiles = _tiles(problem, layout.strip_rows) * layout.filter_turns
    if layout.blocks == 1:
        tiles = divide_up(tiles, layout.groups) * layout.groups
    pixels = _strip_height(problem, layout.strip_rows) * _padded_width(problem)
    strip = tiles * (steps(problem) * step + 80) + 0.15 * parts * pixels * problem.channels
    cycles = strips * filter_blocks * (strip + (1000 if layout.blocks > 1 else 2000))
    cycles += 0.1 * math.prod(problem.y_shape[1:])
    busy = layout.groups * layout.blocks
    return cycles * (1 + 0.02 * abs(busy - 4) + 0.01 * layout.blocks + _HELD_COSTS[layout.held])


def shared_bytes(problem: ConvProblem, parts: int, layout: Strips) -> int:
    """The size of the struct Shared, which the source asserts."""
    filters = 8 * layout.filter_tiles * layout.filter_turns
    eights, part = _channel_blocks(problem)
    strip = (eights + (part > 0)) * parts * _records(problem, layout.strip_rows)
    weights = 2 * steps(problem) * parts * filters
    nbytes = _RECORD_BYTES * (strip + weights) + 12 * filters + 16 * layout.groups
    if parts == 1 and layout.filter_tiles > 2:  # results go through it
        nbytes += 2176 * layout.groups * layout.filter_tiles
    return divide_up(nbytes, 16) * 16


def steps(problem: ConvProblem) -> int:
    """Return the steps of 16 values of k."""
    eights, part = _channel_blocks(problem)
    (height, width) = problem.kernel
    units = eights * height * width
    if part:
        units += height * divide_up(width, 8 // part)
    return divide_up(units, 2)


def _channel_blocks(problem: ConvProblem) -> tuple[int, int]:
    """Return the blocks of eight channels, and the channels of records that hold several taps, or
    0."""
    rest = problem.channels % 8
    part = 8 if rest > 4 else 4 if rest > 2 else 2
    while 8 // part > problem.kernel[1]:
        part *= 2
    if rest == 0 or part == 8:
        return divide_up(problem.channels, 8), 0
    return problem.channels // 8, part


def _records(problem: ConvProblem, rows: int) -> int:
    """Return the records of a plane: its pixels, or up to the end of the last tile's last
    window."""
    (stride_h, stride_w), (dilate_h, dilate_w) = problem.stride, problem.dilate
    laid_w = _laid_width(problem)
    laid = divide_up(_strip_height(problem, rows), stride_h) * laid_w
    last = (problem.kernel[0] - 1) * dilate_h // stride_h * laid_w
    last += (problem.kernel[1] - 1) * dilate_w // stride_w
    read = (stride_h * stride_w - 1) * laid + _tiles(problem, rows) * _PIXELS_AT_ONCE + last
    return max(stride_h * stride_w * laid, read)


def _tiles(problem: ConvProblem, rows: int) -> int:
    pixels = (rows - 1) * _laid_width(problem) + problem.out_width
    return divide_up(pixels, _PIXELS_AT_ONCE)


def _strip_height(problem: ConvProblem, rows: int) -> int:
    return (rows - 1) * problem.stride[0] + (problem.kernel[0] - 1) * problem.dilate[0] + 1


def _laid_width(problem: ConvProblem) -> int:
    return divide_up(_padded_width(problem), problem.stride[1])


def _padded_width(problem: ConvProblem) -> int:
    return problem.width + 2 * problem.pad[1]


KERNELS = (
    entry(
        "17_half_wgmma",
        "half precision, as exact as TF32; a tap is a shift in shared memory",
        *(HalfStrips(1), 6, ("90a",), "tf32"),
    ),
    entry(
        "18_split_half",
        "17 at float32 accuracy: every factor in two halves",
        HalfStrips(2),
        8,
        ("90a",),
    ),
)
