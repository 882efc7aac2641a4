"""Plans of the ladder's tensor-core kernels: strips of images in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...problem import ConvProblem
from .plan import Capability, Kernel, Launch, Plan, divide_up
from .register_tiles import shape_defines
from .runtime_shapes import not_plain, output_defines

# What a block can have on every architecture from sm_80 on.
_SHARED_BYTES = 99 << 10
# The loop over taps is unrolled.
_MOST_TAPS = 64
_MOST_WARPS = 6
_BLOCKS_PER_PROCESSOR = 2
# Tiles of pixels that a warp works on, by tiles of filters.
_PIXEL_TILES = {1: 6, 2: 4, 3: 3, 4: 2}


@dataclass(frozen=True)
class Layout:
    """How a block works: the macros of 10_tf32.cu and 11_3xtf32.cu, and its shared memory."""

    quad: int
    filter_tiles: int
    strip_rows: int
    tiles: int
    warps: int
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
    if choose_layout(problem) is None:
        nbytes = _shared_bytes(problem, _quad(problem), 1, 1)
        return (
            f"weights of 8 filters and input of one row take {nbytes} bytes of shared memory, "
            f"more than {_SHARED_BYTES}"
        )
    return None


def choose_layout(problem: ConvProblem) -> Layout | None:
    """The most filters, then the most rows at a time that fit into shared memory."""
    quad = _quad(problem)
    all_tiles = divide_up(problem.filters, 8)
    for most in (4, 3, 2, 1):
        filter_tiles = divide_up(all_tiles, divide_up(all_tiles, most))
        for rows in range(problem.out_height, 0, -1):
            nbytes = _shared_bytes(problem, quad, filter_tiles, rows)
            if nbytes <= _SHARED_BYTES:
                return _layout(problem, quad, filter_tiles, rows)
    return None


def tensor_cores(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    layout = choose_layout(problem)
    assert layout is not None
    defines = (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        ("QUAD", layout.quad),
        ("FILTER_TILES", layout.filter_tiles),
        ("STRIP_ROWS", layout.strip_rows),
        ("TILES", layout.tiles),
        ("WARPS", layout.warps),
        ("MIN_BLOCKS", _BLOCKS_PER_PROCESSOR),
    )
    units = problem.batch * divide_up(problem.out_height, layout.strip_rows)
    launch = Launch(
        "convolve",
        (units, divide_up(problem.filters, 8 * layout.filter_tiles), 1),
        (32 * layout.warps, 1, 1),
        ("y", "x", "w", "bias", problem.batch),
        layout.shared_bytes,
        _BLOCKS_PER_PROCESSOR,
    )
    return Plan(kernel.name, kernel.source, defines, (launch,))


def _layout(problem: ConvProblem, quad: int, filter_tiles: int, rows: int) -> Layout:
    """The layout with strips of about equal height, and warps that share them evenly."""
    strips = divide_up(problem.out_height, rows)
    rows = divide_up(problem.out_height, strips)
    tiles = _PIXEL_TILES[filter_tiles]
    work = divide_up(divide_up(rows * problem.out_width, 16), tiles)
    rounds = divide_up(work, _MOST_WARPS)
    warps = max(2, divide_up(work, rounds))
    nbytes = _shared_bytes(problem, quad, filter_tiles, rows)
    return Layout(quad, filter_tiles, rows, tiles, warps, nbytes)


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
