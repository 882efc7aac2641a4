"""1x1 convolutions of few channels, and gradients for x of few filters, in plain float32
arithmetic. kernels/cuda/gemm/pointwise_simt.cu explains the algorithm; this module chooses the
tiling."""

from __future__ import annotations

import functools
import itertools
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
from . import gemm_grid, layer_macros

# Typical number of multiprocessors; only the work partition depends on it.
_PROCESSORS = 132
# Slabs in shared memory.
_STAGES = 3
# Rows and pixels per thread, and the limits of its sums (rows x pixels).
_ROWS, _PIXELS, _LEAST_SUMS, _MOST_SUMS = (4, 8, 16), (1, 2, 4, 8), 8, 64
_WARPS = (1, 2, 4, 8, 16)
# Maximum warps per multiprocessor, by registers.
_MOST_BUSY = 32
# Registers per thread besides sums and their operands.
_OTHER_REGISTERS = 40
_MOST_LAYOUTS = 16
# Cost model, fitted to about 600 runs on an H100; the chosen layouts take 3% longer than the best
# (at most 11%). Instructions per channel: for each pixel, for each four rows, and in addition; and
# per written sum.
_PIXEL, _FOUR_ROWS, _CHANNEL, _WRITTEN = 0.85, 1.6, 7.1, 2.3
# Cycles of a slab's barrier, of a tile, until the first numbers arrive, and of a weight.
_BARRIER, _TILE, _FIRST, _WEIGHTS = 800, 260, 6000, 54
# Bytes per cycle and multiprocessor, of memory and of the cache; and the fraction of the shorter of
# computing and moving that is not hidden.
_BYTES, _CACHED, _ON_TOP = 11.7, 13.7, 0.35


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: warps, each with its own rows; rows and pixels per thread; blocks per
    multiprocessor."""

    warps: int
    rows: int
    pixels: int
    blocks: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and pixels."""
        return self.warps * self.rows, 32 * self.pixels


@dataclass(frozen=True)
class ShortSums(Family):
    """Kernels of one direction."""

    direction: str
    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        reason = refused(problem)
        if reason is not None:
            return reason
        ins, _ = self._sizes(problem)
        if not _fitting(ins, 1, gpu_limits.LEAST_SHARED_BYTES):
            return f"weights for {ins} channels do not fit into shared memory"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        pixels = problem.height * problem.width * gemm_grid.nominal(problem.batch)
        room = gpu_limits.shared_bytes(capability)
        return list(_ordered(*self._sizes(problem), pixels, room)[:_MOST_LAYOUTS])

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return not gemm_grid.halves_hold(problem, self.direction)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        forward = self.direction == "forward"
        ins, outs = self._sizes(problem)
        pixels = problem.batch * problem.height * problem.width
        rows, tile = layout.tile
        nbytes = shared_bytes(ins, layout)
        # A gradient has no bias: the argument is unused.
        names = ("y", "x", "w", "bias") if forward else ("dx", "dy", "w", "w")
        launch = Launch(
            "multiply_pixels",
            (divide_up(pixels, tile), divide_up(outs, rows), 1),
            (layout.warps * 32, 1, 1),
            (*names, problem.batch),
            nbytes,
            layout.blocks,
        )
        macros = (
            *layer_macros.sizes(problem, "channels", "height", "width", "filters"),
            *layer_macros.output(problem.bias and forward, accumulate),
            *layout.defines,
            ("SHARED_BYTES", nbytes),
        )
        return Plan(kernel, macros, (launch,))

    def _sizes(self, problem: ConvProblem) -> tuple[int, int]:
        """Return the input and output channels."""
        sizes = problem.channels, problem.filters
        return sizes if self.direction == "forward" else sizes[::-1]


def refused(problem: ConvProblem) -> str | None:
    """Return why a problem is not a 1x1 convolution of all pixels in float32, or `None`."""
    if problem.dtype != "float32":
        return f"it computes float32 only, not {problem.dtype}"
    if (problem.kernel, problem.stride, problem.pad) != ((1, 1), (1, 1), (0, 0)):
        return "it computes 1x1 kernels without strides and padding only"
    return None if problem.groups == 1 else f"it computes groups 1 only, not {problem.groups}"


# Cached: networks have hundreds of layers and query each several times.
@functools.lru_cache(maxsize=1024)
def _ordered(ins: int, outs: int, pixels: int, room: int) -> tuple[Blocks, ...]:
    """Return layouts in order of estimated time."""
    fitting = _fitting(ins, outs, room)
    return tuple(sorted(fitting, key=lambda each: cycles(ins, outs, pixels, each)))


@functools.lru_cache(maxsize=1024)
def _fitting(ins: int, outs: int, room: int) -> tuple[Blocks, ...]:
    """Return layouts with the most blocks that fit into shared memory and registers."""
    return tuple(_every(ins, outs, room))


def _every(ins: int, outs: int, room: int) -> Iterator[Blocks]:
    for rows, pixels in itertools.product(_ROWS, _PIXELS):
        if not _LEAST_SUMS <= rows * pixels <= _MOST_SUMS or rows > divide_up(outs, 4) * 4:
            continue
        # All warps of one block, or nearly equal parts of them.
        needed = divide_up(outs, rows)
        registers = rows * pixels + rows + pixels + _OTHER_REGISTERS
        for warps in sorted({divide_up(needed, divide_up(needed, most)) for most in _WARPS}):
            nbytes = shared_bytes(ins, Blocks(warps, rows, pixels, 1))
            blocks = min(
                room // (nbytes + gpu_limits.RESERVED_SHARED_BYTES),
                gpu_limits.REGISTERS // (divide_up(registers, 8) * 8 * 32 * warps),
                _MOST_BUSY // warps,
            )
            if blocks:
                yield Blocks(warps, rows, pixels, blocks)


def cycles(ins: int, outs: int, pixels: int, layout: Blocks) -> float:
    """Estimate the cycles of the product."""
    rows, tile = layout.tile
    tiles = divide_up(pixels, tile) * divide_up(outs, rows)
    turns = divide_up(tiles, _PROCESSORS * layout.blocks)
    busy = min(layout.blocks, divide_up(tiles, _PROCESSORS)) * layout.warps
    # Per warp; a multiprocessor issues four warps per cycle, and a single warp waits for its
    # results.
    of_channel = layout.pixels * (layout.rows + _PIXEL) + layout.rows / 4 * _FOUR_ROWS + _CHANNEL
    work = _padded(ins) * of_channel + _WRITTEN * layout.rows * layout.pixels
    waits = _padded(ins) / _slab(ins) * _BARRIER + _TILE
    computing = turns * max(work * busy / 4, work + waits)
    # Blocks of other rows read the same pixels.
    read = ins * divide_up(outs, rows)
    bytes_of = 4 * pixels / _PROCESSORS
    moving = bytes_of * max((ins + outs) / _BYTES, (read + outs) / _CACHED)
    first = _FIRST + _WEIGHTS * ins * layout.rows / 32
    return first + max(computing, moving) + _ON_TOP * min(computing, moving)


def _slab(ins: int) -> int:
    """Return the channels per step."""
    return min(16, divide_up(ins, 4) * 4)


def _padded(ins: int) -> int:
    """Return the channels in whole slabs."""
    return divide_up(ins, _slab(ins)) * _slab(ins)


def shared_bytes(ins: int, layout: Blocks) -> int:
    """The size of the struct Shared, which the source asserts."""
    rows, tile = layout.tile
    return 4 * (_padded(ins) * (rows + 4) + _STAGES * _slab(ins) * tile)


_entry = functools.partial(entry, architectures=ARCHITECTURES[1:], source="gemm/pointwise_simt.cu")
KERNELS = (
    _entry(
        "pointwise_simt",
        "1x1 kernels and few channels, in float32 arithmetic at the memory's speed",
        *(ShortSums("forward"), 8),
        macros=(("DIRECTION", 0),),
    ),
    _entry(
        "pointwise_simt_backward_data",
        "the gradient for x of 1x1 kernels and few filters in this way",
        *(ShortSums("backward_data"), 9),
        macros=(("DIRECTION", 1),),
    ),
)
