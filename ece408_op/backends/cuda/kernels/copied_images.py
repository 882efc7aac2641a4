"""Plans of the kernels for one input channel whose images Hopper's copy engine moves as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Callable, NamedTuple

from ....problem import ConvProblem
from ..plan import Capability, Kernel, Launch, Plan, Tunables, divide_up
from .one_channel import (
    ALL_REGISTERS,
    MOST_REGISTERS,
    factor_bytes,
    no_fewer_products,
    possible_rows,
    registers,
    whole,
    windows_of,
)
from .register_tiles import shape_defines
from .runtime_shapes import output_defines

# Shared memory of a processor by the major compute capability, the least of all GPUs that have the
# copy engine, and what each block takes for itself.
_PROCESSOR_SHARED_BYTES = {9: 228 << 10, 10: 228 << 10}
_LEAST_SHARED_BYTES, _BLOCK_SHARED_BYTES = 100 << 10, 1 << 10
# How fast they are, about, with groups of so many filters and room for so many groups.
_GROUPS = {(1, 3): 0.9, (1, 4): 0.9, (2, 3): 0.97, (2, 4): 1.0, (3, 3): 0.98, (3, 4): 0.98}
# Images from which on blocks of whole images are enough for all processors.
_MANY_IMAGES = 512
# Elements of a line of memory.
_LINE = 32
# Registers that kernel 19 leaves a thread that does not compute.
_MOVER_REGISTERS = 24
# What a thread can have at most.
_MOST_OF_A_THREAD = 248


class Moved(NamedTuple):
    """How 16 and 19 are laid out: rows of a thread, images of a block, filters whose outputs leave
    together, room for how many such groups, and blocks that a processor is to hold."""

    rows: int
    images: int
    group: int
    stages: int
    blocks: int


class _Movers(NamedTuple):
    """What sets 16 and 19 apart: warps of a block that do not compute, of which those that do are
    a multiple, and whether these get the others' registers."""

    warps: int
    hand_over: bool


_COPY_ENGINE = _Movers(1, False)
_MORE_REGISTERS = _Movers(4, True)


def not_for_copies(problem: ConvProblem) -> str | None:
    """`no_fewer_products`, and what the copy engine or a block of 16 does not take."""
    return _why_not(problem, _COPY_ENGINE)


def not_for_more_registers(problem: ConvProblem) -> str | None:
    """`no_fewer_products`, and what the copy engine or a block of 19 does not take."""
    return _why_not(problem, _MORE_REGISTERS)


def _why_not(problem: ConvProblem, movers: _Movers) -> str | None:
    reason = no_fewer_products(problem)
    if reason is not None:
        return reason
    planes = (problem.height * problem.width, problem.out_height * problem.out_width)
    if problem.out_width % 2 or planes[0] % 4 or planes[1] % 4:
        return (
            "it moves images and outputs in pieces of 16 bytes, not of "
            f"{problem.height}x{problem.width} and {problem.out_height}x{problem.out_width}"
        )
    if next(_moved(problem, movers), None) is None:
        return (
            f"an image of {problem.height}x{problem.width} takes more threads, registers or shared "
            "memory than a block has"
        )
    return None


def prefers_copies(problem: ConvProblem, _: Capability) -> bool:
    """Whether 16, or 19, is the fastest: it gives each block whole images."""
    return problem.batch >= _MANY_IMAGES


def copy_engine(
    kernel: Kernel,
    problem: ConvProblem,
    capability: Capability,
    accumulate: bool,
    tunables: Tunables = (),
) -> Plan:
    return _copies(kernel, problem, capability, accumulate, tunables, _COPY_ENGINE)


def more_registers(
    kernel: Kernel,
    problem: ConvProblem,
    capability: Capability,
    accumulate: bool,
    tunables: Tunables = (),
) -> Plan:
    return _copies(kernel, problem, capability, accumulate, tunables, _MORE_REGISTERS)


def _copies(
    kernel: Kernel,
    problem: ConvProblem,
    capability: Capability,
    accumulate: bool,
    tunables: Tunables,
    movers: _Movers,
) -> Plan:
    tile = Moved(**dict(tunables)) if tunables else _best_moved(problem, capability, movers)[0]
    buffers = _buffers(problem, tile, _processor_shared(capability))
    defines = (
        *shape_defines(problem),
        *output_defines(problem, accumulate),
        *(("ROWS", tile.rows), ("IMAGES", tile.images), ("BUFFERS", buffers)),
        *(("GROUP", tile.group), ("STAGES", tile.stages), ("MIN_BLOCKS", tile.blocks)),
    )
    if movers.hand_over:
        defines += (("REGISTERS", _handed_over(problem, tile, movers)),)
    launch = Launch(
        "convolve",
        (divide_up(problem.batch, tile.images) * (problem.filters // tile.group), 1, 1),
        (_moved_threads(problem, tile, movers), 1, 1),
        ("y", "x", "w", "bias", problem.batch),
        _moved_bytes(problem, tile, buffers),
        tile.blocks,
    )
    return Plan(kernel, defines, (launch,))


def copy_engine_choices(problem: ConvProblem, capability: Capability) -> Iterator[Tunables]:
    """Tunables of `copy_engine`."""
    return _moved_choices(problem, capability, _COPY_ENGINE)


def more_registers_choices(problem: ConvProblem, capability: Capability) -> Iterator[Tunables]:
    """Tunables of `more_registers`."""
    return _moved_choices(problem, capability, _MORE_REGISTERS)


def _moved_choices(
    problem: ConvProblem, capability: Capability, movers: _Movers
) -> Iterator[Tunables]:
    for tile in _best_moved(problem, capability, movers)[:15]:
        yield tuple(tile._asdict().items())


def _best_moved(problem: ConvProblem, capability: Capability, movers: _Movers) -> list[Moved]:
    """All tiles of kernels 16 and 19, the most promising first."""
    tiles = _moved(problem, movers, _processor_shared(capability))
    return sorted(tiles, key=_busy(problem, movers), reverse=True)


def _processor_shared(capability: Capability) -> int:
    """Bytes of shared memory that a processor has."""
    return _PROCESSOR_SHARED_BYTES.get(capability[0], _LEAST_SHARED_BYTES)


def _busy(problem: ConvProblem, movers: _Movers) -> Callable[[Moved], float]:
    """How good a tile is: threads that compute on a processor, less what they compute for nothing;
    rather more rows, which take fewer loads of the weights, and groups as measured."""

    def busy(tile: Moved) -> float:
        windows = tile.images * windows_of(problem, tile.rows) // problem.batch
        threads = _moved_threads(problem, tile, movers) - 32 * movers.warps
        useful = windows / threads * problem.out_height / whole(problem.out_height, tile.rows)
        rows = tile.rows / (tile.rows + 2)
        group = _GROUPS[tile.group, tile.stages]
        # Each block has a warp that moves, which takes a turn from those that compute.
        movers_share = threads / (threads + 32)
        return min(tile.blocks * threads, 384) * useful * rows * group * movers_share

    return busy


def _moved(
    problem: ConvProblem, movers: _Movers, shared: int = _LEAST_SHARED_BYTES
) -> Iterator[Moved]:
    """All tiles whose blocks a processor with so much shared memory can hold."""
    groups = [group for group in (1, 2, 3) if problem.filters % group == 0]
    layouts = itertools.product(possible_rows(problem), (1, 2, 4, 8), groups, (3, 4))
    for rows, images, group, stages in layouts:
        tile = Moved(rows, images, group, stages, 1)
        threads = _moved_threads(problem, tile, movers)
        nbytes = _moved_bytes(problem, tile, 1) + _BLOCK_SHARED_BYTES
        most = min(_blocks_by_registers(problem, tile, movers), shared // nbytes)
        if threads <= 1024 and most >= 1:
            yield tile._replace(blocks=min(most, 8))


def _blocks_by_registers(problem: ConvProblem, tile: Moved, movers: _Movers) -> int:
    """Blocks that a processor's registers suffice for."""
    threads = _moved_threads(problem, tile, movers)
    needed = whole(registers(problem, tile.rows), 8)
    if not movers.hand_over:
        # Registers are given to warps by fours.
        return 32 * (ALL_REGISTERS // (32 * needed) // 4 * 4) // threads
    fit = (
        blocks
        for blocks in range(1, 9)
        if _handed_over(problem, tile._replace(blocks=blocks), movers) >= needed
    )
    return max(fit, default=0)


def _handed_over(problem: ConvProblem, tile: Moved, movers: _Movers) -> int:
    """Registers of a thread of 19 that computes: what the block's warps begin with, which is all
    that they may have, shared out anew. 0 where that is more than any of them has a use for."""
    warps = _moved_threads(problem, tile, movers) // 32
    at_first = ALL_REGISTERS // (32 * warps * tile.blocks) // 8 * 8
    if at_first > MOST_REGISTERS:
        return 0
    left = at_first * warps - _MOVER_REGISTERS * movers.warps
    return min(left // (warps - movers.warps) // 8 * 8, _MOST_OF_A_THREAD)


def _moved_threads(problem: ConvProblem, tile: Moved, movers: _Movers) -> int:
    """Threads of a block: those that compute, and the warps before them."""
    windows = tile.images * windows_of(problem, tile.rows) // problem.batch
    return whole(windows, 32 * movers.warps) + 32 * movers.warps


def _buffers(problem: ConvProblem, tile: Moved, shared: int) -> int:
    """Units whose images a block has room for: two, if all blocks still fit."""
    nbytes = _moved_bytes(problem, tile, 2) + _BLOCK_SHARED_BYTES
    return 2 if tile.blocks * nbytes <= shared else 1


def _moved_bytes(problem: ConvProblem, tile: Moved, buffers: int) -> int:
    """Shared memory of a block: outputs starting anywhere in a line, images, factors, barriers."""
    room = whole(tile.group * problem.out_height * problem.out_width, _LINE) + _LINE
    pixels = problem.height * problem.width
    elements = tile.images * (tile.stages * room + buffers * pixels)
    barriers = 16 * (buffers + tile.stages)
    return whole(4 * elements + factor_bytes(problem) + barriers, 128)
