"""Plans of the ladder's tensor-core kernels: strips of images in shared memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ..plan import Capability, Defines, Kernel, Launch, Plan, divide_up
from .register_tiles import shape_defines
from .runtime_shapes import not_plain, output_defines

# Shared memory in KiB that a processor has, of which each block takes 1 KiB for itself.
_SHARED_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}
_LEAST_SHARED_KIB = 100
# The loop over taps is unrolled.
_MOST_TAPS = 64
# One warp for each scheduler: registers are dealt out evenly.
_WARPS = 4
_MOST_BLOCKS = 4
# wgmma's are warps by the four, and few registers each.
_WGMMA_WARPS = 16
# Where tensor cores are the faster choice: reads of each pixel at most, steps of k at least.
_MOST_READS = 2.7
_LEAST_WGMMA_STEPS = 16
# Bytes of weights for each step of 8 k values and 8 filters; wgmma has both parts in memory.
_WEIGHT_BYTES = 256
_WGMMA_WEIGHT_BYTES = 512
# Tiles of pixels that a warp works on, by tiles of filters: what measured best.
_PIXEL_TILES = {1: 6, 2: 4, 3: 2, 4: 2}


@dataclass(frozen=True)
class Layout:
    """How a block works: its macros, blocks for each processor, and its shared memory."""

    quad: int
    filter_tiles: int
    strip_rows: int
    blocks: int
    shared_bytes: int


def not_for_tensor_cores(problem: ConvProblem) -> str | None:
    """Why there is no layout for the problem, or `None`."""
    return _rejection(problem, _WEIGHT_BYTES, _LEAST_SHARED_KIB)


def not_for_wgmma(problem: ConvProblem) -> str | None:
    """Why there is no layout for the problem on Hopper, or `None`."""
    return _rejection(problem, _WGMMA_WEIGHT_BYTES, _SHARED_KIB[(9, 0)])


def _rejection(problem: ConvProblem, weight_bytes: int, shared_kib: int) -> str | None:
    reason = not_plain(problem)
    if reason is not None:
        return reason
    if problem.channels == 1:
        return "it takes channels two at a time, and there is one"
    taps = math.prod(problem.kernel)
    if taps > _MOST_TAPS:
        return f"its loop over taps is unrolled, for at most {_MOST_TAPS}, not {taps}"
    nbytes, most = _shared_bytes(problem, weight_bytes, 1, 1), (shared_kib - 1) << 10
    if nbytes > most:
        return (
            f"weights of 8 filters and input of one row take {nbytes} bytes of shared memory, "
            f"more than {most}"
        )
    return None


def choose_layout(problem: ConvProblem, capability: Capability, weight_bytes: int) -> Layout:
    """The most filters, then the most rows at a time, two blocks to a processor if that can be.

    The problem must be one that is not rejected.
    """
    processor = _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10
    all_tiles = divide_up(problem.filters, 8)
    for blocks in (2, 1):
        limit = processor // blocks - 1024
        for most in (4, 3, 2, 1):
            filter_tiles = divide_up(all_tiles, divide_up(all_tiles, most))
            rows = _most_rows(problem, weight_bytes, filter_tiles, limit)
            if rows >= min(problem.out_height, 4) or (blocks, most) == (1, 1):
                return _layout(problem, weight_bytes, filter_tiles, rows, processor)
    raise AssertionError(f"{problem} does not fit")


def _most_rows(problem: ConvProblem, weight_bytes: int, filter_tiles: int, limit: int) -> int:
    """Output rows whose input fits into shared memory beside the weights; 0 if none do."""
    for rows in range(problem.out_height, 0, -1):
        if _shared_bytes(problem, weight_bytes, filter_tiles, rows) <= limit:
            return rows
    return 0


def _layout(
    problem: ConvProblem, weight_bytes: int, filter_tiles: int, rows: int, processor: int
) -> Layout:
    """The layout with strips of about equal height, and as many blocks as fit on a processor."""
    rows = divide_up(problem.out_height, divide_up(problem.out_height, rows))
    nbytes = _shared_bytes(problem, weight_bytes, filter_tiles, rows)
    blocks = max(1, min(_MOST_BLOCKS, processor // (nbytes + 1024)))
    return Layout(_quad(problem), filter_tiles, rows, blocks, nbytes)


def prefers_tf32(problem: ConvProblem, capability: Capability) -> bool:
    """Whether 10_tf32 is faster than the kernels at float32 accuracy: it has their layout."""
    return prefers_3xtf32(problem, capability)


def prefers_3xtf32(problem: ConvProblem, capability: Capability) -> bool:
    """Whether 11_3xtf32 is faster than 6_register_tiles, as measured."""
    layout = choose_layout(problem, capability, _WEIGHT_BYTES)
    return layout.blocks > 1 and _reads(problem, layout) <= _MOST_READS


def prefers_wgmma(problem: ConvProblem, capability: Capability) -> bool:
    """Whether 14_wgmma is faster than 11_3xtf32 and 6_register_tiles, as measured."""
    layout = choose_layout(problem, capability, _WGMMA_WEIGHT_BYTES)
    steps = math.prod(_steps(problem, layout.quad))
    few_reads = _reads(problem, layout) <= _MOST_READS
    return layout.blocks > 1 and few_reads and steps >= _LEAST_WGMMA_STEPS


def _reads(problem: ConvProblem, layout: Layout) -> float:
    """How often each pixel is read: for every block of filters, and again in a strip's halo."""
    blocks = divide_up(problem.filters, 8 * layout.filter_tiles)
    return blocks * (layout.strip_rows + problem.kernel[0] - 1) / layout.strip_rows


def tensor_cores(
    kernel: Kernel, problem: ConvProblem, capability: Capability, accumulate: bool
) -> Plan:
    layout = choose_layout(problem, capability, _WEIGHT_BYTES)
    tiles = (("TILES", _PIXEL_TILES[layout.filter_tiles]),)
    return _plan(kernel, problem, accumulate, layout, _WARPS, tiles)


def wgmma(kernel: Kernel, problem: ConvProblem, capability: Capability, accumulate: bool) -> Plan:
    layout = choose_layout(problem, capability, _WGMMA_WEIGHT_BYTES)
    # One, two or four, which divide its warps.
    layout = dataclasses.replace(layout, blocks=1 << (layout.blocks.bit_length() - 1))
    return _plan(kernel, problem, accumulate, layout, _WGMMA_WARPS // layout.blocks, ())


def _plan(
    kernel: Kernel,
    problem: ConvProblem,
    accumulate: bool,
    layout: Layout,
    warps: int,
    extra: Defines,
) -> Plan:
    defines = (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        ("QUAD", layout.quad),
        ("FILTER_TILES", layout.filter_tiles),
        ("STRIP_ROWS", layout.strip_rows),
        ("WARPS", warps),
        ("MIN_BLOCKS", layout.blocks),
        *extra,
    )
    units = problem.batch * divide_up(problem.out_height, layout.strip_rows)
    launch = Launch(
        "convolve",
        (units, divide_up(problem.filters, 8 * layout.filter_tiles), 1),
        (32 * warps, 1, 1),
        ("y", "x", "w", "bias", problem.batch),
        layout.shared_bytes,
        layout.blocks,
    )
    return Plan(kernel, defines, (launch,))


def _quad(problem: ConvProblem) -> int:
    """Channels in four values of k: what takes fewer steps."""
    return min((4, 2), key=lambda quad: math.prod(_steps(problem, quad)))


def _steps(problem: ConvProblem, quad: int) -> tuple[int, int]:
    """Groups of channels, and steps of eight values of k in each."""
    quads = divide_up(math.prod(problem.kernel), 4 // quad)
    return divide_up(problem.channels, quad), divide_up(quads, 2)


def _shared_bytes(problem: ConvProblem, weight_bytes: int, filter_tiles: int, rows: int) -> int:
    """The size of the struct Shared."""
    quad = _quad(problem)
    groups, steps = _steps(problem, quad)
    pixels = (rows + problem.kernel[0] - 1) * problem.width
    banks = 8 if quad == 4 else 16
    pitch = pixels + (banks - pixels) % 32
    return groups * steps * filter_tiles * weight_bytes + groups * quad * pitch * 4
