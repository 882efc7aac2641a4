"""Plans of the ladder's tensor-core kernels: strips of images in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...problem import ConvProblem
from .plan import Capability, Kernel, Launch, Plan, divide_up
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
# Tiles of pixels that a warp works on, by tiles of filters: what measured best.
_PIXEL_TILES = {1: 6, 2: 4, 3: 2, 4: 2}


@dataclass(frozen=True)
class Layout:
    """How a block works: the macros of 10_tf32.cu and 11_3xtf32.cu, and its shared memory."""

    quad: int
    filter_tiles: int
    strip_rows: int
    tiles: int
    blocks: int
    shared_bytes: int


def not_for_tensor_cores(problem: ConvProblem) -> str | None:
    """Why there is no layout for the problem, or `None`."""
    reason = not_plain(problem)
    if reason is not None:
        return reason
    if problem.channels == 1:
        return "it takes channels two at a time, and there is one"
    taps = math.prod(problem.kernel)
    if taps > _MOST_TAPS:
        return f"its loop over taps is unrolled, for at most {_MOST_TAPS}, not {taps}"
    nbytes, most = _shared_bytes(problem, _quad(problem), 1, 1), (_LEAST_SHARED_KIB - 1) << 10
    if nbytes > most:
        return (
            f"weights of 8 filters and input of one row take {nbytes} bytes of shared memory, "
            f"more than {most}"
        )
    return None


def choose_layout(problem: ConvProblem, capability: Capability) -> Layout:
    """The most filters, then the most rows at a time, two blocks to a processor if that can be.

    The problem must be one that `not_for_tensor_cores` has nothing against.
    """
    processor = _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10
    all_tiles = divide_up(problem.filters, 8)
    for blocks in (2, 1):
        limit = processor // blocks - 1024
        for most in (4, 3, 2, 1):
            filter_tiles = divide_up(all_tiles, divide_up(all_tiles, most))
            rows = _most_rows(problem, filter_tiles, limit)
            if rows >= min(problem.out_height, 4) or (blocks, most) == (1, 1):
                return _layout(problem, filter_tiles, rows, processor)
    raise AssertionError(f"{problem} does not fit")


def _most_rows(problem: ConvProblem, filter_tiles: int, limit: int) -> int:
    """Output rows whose input fits into shared memory beside the weights; 0 if none do."""
    quad = _quad(problem)
    for rows in range(problem.out_height, 0, -1):
        if _shared_bytes(problem, quad, filter_tiles, rows) <= limit:
            return rows
    return 0


def tensor_cores(
    kernel: Kernel, problem: ConvProblem, capability: Capability, accumulate: bool
) -> Plan:
    layout = choose_layout(problem, capability)
    defines = (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        ("QUAD", layout.quad),
        ("FILTER_TILES", layout.filter_tiles),
        ("STRIP_ROWS", layout.strip_rows),
        ("TILES", layout.tiles),
        ("WARPS", _WARPS),
        ("MIN_BLOCKS", layout.blocks),
    )
    units = problem.batch * divide_up(problem.out_height, layout.strip_rows)
    launch = Launch(
        "convolve",
        (units, divide_up(problem.filters, 8 * layout.filter_tiles), 1),
        (32 * _WARPS, 1, 1),
        ("y", "x", "w", "bias", problem.batch),
        layout.shared_bytes,
        layout.blocks,
    )
    return Plan(kernel.name, kernel.source, defines, (launch,))


def _layout(problem: ConvProblem, filter_tiles: int, rows: int, processor: int) -> Layout:
    """The layout with strips of about equal height, and as many blocks as fit on a processor."""
    quad = _quad(problem)
    rows = divide_up(problem.out_height, divide_up(problem.out_height, rows))
    nbytes = _shared_bytes(problem, quad, filter_tiles, rows)
    blocks = max(1, min(_MOST_BLOCKS, processor // (nbytes + 1024)))
    return Layout(quad, filter_tiles, rows, _PIXEL_TILES[filter_tiles], blocks, nbytes)


def _quad(problem: ConvProblem) -> int:
    """Channels in four values of k: what takes fewer steps."""
    return min((4, 2), key=lambda quad: math.prod(_steps(problem, quad)))


def _steps(problem: ConvProblem, quad: int) -> tuple[int, int]:
    """Groups of channels, and steps of eight values of k in each."""
    quads = divide_up(math.prod(problem.kernel), 4 // quad)
    return divide_up(problem.channels, quad), divide_up(quads, 2)


def _shared_bytes(problem: ConvProblem, quad: int, filter_tiles: int, rows: int) -> int:
    """The size of the struct Shared."""
    groups, steps = _steps(problem, quad)
    pixels = (rows + problem.kernel[0] - 1) * problem.width
    banks = 8 if quad == 4 else 16
    pitch = pixels + (banks - pixels) % 32
    return groups * steps * filter_tiles * 32 * 8 + groups * quad * pitch * 4
