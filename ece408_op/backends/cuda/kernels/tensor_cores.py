"""Ladder kernels on tensor cores in TF32, with strips of images in shared memory."""

from __future__ import annotations

import functools
import math
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
from .register_tiles import defines
from .runtime_shapes import not_plain

# Maximum taps; their loop is unrolled.
_MOST_TAPS = 64
# One warp per scheduler: registers are allocated evenly.
_WARPS = 4
_MOST_BLOCKS = 4
# Tensor cores are faster than 6_register_tiles up to this number of reads per pixel.
_MOST_READS = 2.7
# Bytes of weights per step of 8 values of k and 8 filters.
_WEIGHT_BYTES = 256
# Tiles of pixels per warp, by tiles of filters; the fastest ones measured.
_PIXEL_TILES = {1: 6, 2: 4, 3: 2, 4: 2}


@dataclass(frozen=True)
class Strips(Layout):
    """Tiling: `strip_rows` rows of outputs by `filter_tiles` tiles of 8 filters per block; `quad`
    channels in four values of k; `tiles` tiles of pixels per warp; `warps` warps; `blocks` blocks
    per multiprocessor."""

    quad: int
    filter_tiles: int
    strip_rows: int
    tiles: int
    blocks: int
    warps: int = _WARPS


class TensorCores(Family):
    """Persistent blocks that load the weights once and loop over strips of images."""

    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        reason = not_plain(problem)
        if reason is not None:
            return reason
        if problem.channels == 1:
            return "it takes channels two at a time, and there is one"
        taps = math.prod(problem.kernel)
        if taps > _MOST_TAPS:
            return f"its loop over taps is unrolled, for at most {_MOST_TAPS}, not {taps}"
        nbytes = _shared_bytes(problem, 1, 1)
        most = gpu_limits.LEAST_SHARED_BYTES - gpu_limits.RESERVED_SHARED_BYTES
        if nbytes > most:
            return (
                f"weights of 8 filters and input of one row take {nbytes} bytes of shared memory, "
                f"more than {most}"
            )
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> tuple[Strips]:
        """Return the layout with the most filters, then the most rows, with two blocks per
        multiprocessor if possible."""
        processor = gpu_limits.shared_bytes(capability)
        all_tiles = divide_up(problem.filters, 8)
        for blocks in (2, 1):
            limit = processor // blocks - gpu_limits.RESERVED_SHARED_BYTES
            for most in (4, 3, 2, 1):
                filter_tiles = divide_up(all_tiles, divide_up(all_tiles, most))
                rows = _most_rows(problem, filter_tiles, limit)
                if rows >= min(problem.out_height, 4) or (blocks, most) == (1, 1):
                    return (_strips(problem, filter_tiles, rows, processor),)
        raise AssertionError(f"{problem} does not fit")

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        (layout,) = self.layouts(problem, capability)
        return layout.blocks > 1 and _reads(problem, layout) <= _MOST_READS

    def plan(self, kernel: Code, problem: ConvProblem, layout: Strips, accumulate: bool) -> Plan:
        units = problem.batch * divide_up(problem.out_height, layout.strip_rows)
        nbytes = _shared_bytes(problem, layout.filter_tiles, layout.strip_rows)
        grid = (units, divide_up(problem.filters, 8 * layout.filter_tiles), 1)
        block, read = (32 * layout.warps, 1, 1), ("y", "x", "w", "bias")
        launch = Launch("convolve", grid, block, (*read, problem.batch), nbytes, layout.blocks)
        macros = (*defines(problem, layout, accumulate), ("SHARED_BYTES", nbytes))
        return Plan(kernel, macros, (launch,))


def _most_rows(problem: ConvProblem, filter_tiles: int, limit: int) -> int:
    """Return the output rows whose input fits into shared memory beside the weights; 0 if none
    do."""
    for rows in range(problem.out_height, 0, -1):
        if _shared_bytes(problem, filter_tiles, rows) <= limit:
            return rows
    return 0


def _strips(problem: ConvProblem, filter_tiles: int, rows: int, processor: int) -> Strips:
    """Return the layout with strips of about equal height and the most blocks that fit."""
    rows = divide_up(problem.out_height, divide_up(problem.out_height, rows))
    nbytes = _shared_bytes(problem, filter_tiles, rows) + gpu_limits.RESERVED_SHARED_BYTES
    blocks = max(1, min(_MOST_BLOCKS, processor // nbytes))
    return Strips(_quad(problem), filter_tiles, rows, _PIXEL_TILES[filter_tiles], blocks)


def _reads(problem: ConvProblem, layout: Strips) -> float:
    """Return the reads per pixel: one per block of filters, and more in a strip's halo."""
    blocks = divide_up(problem.filters, 8 * layout.filter_tiles)
    return blocks * (layout.strip_rows + problem.kernel[0] - 1) / layout.strip_rows


def _quad(problem: ConvProblem) -> int:
    """Return the channels in four values of k that need the fewest steps."""
    return min((4, 2), key=lambda quad: math.prod(_steps(problem, quad)))


def _steps(problem: ConvProblem, quad: int) -> tuple[int, int]:
    """Return the groups of channels, and the steps of eight values of k in each."""
    quads = divide_up(math.prod(problem.kernel), 4 // quad)
    return divide_up(problem.channels, quad), divide_up(quads, 2)


def _shared_bytes(problem: ConvProblem, filter_tiles: int, rows: int) -> int:
    """The size of the struct Shared, which the source asserts."""
    quad = _quad(problem)
    groups, steps = _steps(problem, quad)
    pixels = (rows + problem.kernel[0] - 1) * problem.width
    banks = 8 if quad == 4 else 16
    pitch = pixels + (banks - pixels) % 32
    return groups * steps * filter_tiles * _WEIGHT_BYTES + groups * quad * pitch * 4


_entry = functools.partial(entry, architectures=ARCHITECTURES[1:])
KERNELS = (
    _entry(
        "10_tf32",
        "tensor cores in TF32, images in shared memory",
        TensorCores(),
        11,
        precision="tf32",
    ),
    _entry(
        "11_3xtf32",
        "tensor cores at float32 accuracy: three TF32 products for one",
        TensorCores(),
        12,
    ),
)
