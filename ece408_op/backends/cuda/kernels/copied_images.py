"""Kernels for one input channel in which Hopper's copy engine (TMA) moves whole images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Capability, Code, Family, Launch, Layout, Plan, divide_up, entry
from .one_channel import (
    MOST_REGISTERS,
    factor_bytes,
    no_winograd,
    possible_rows,
    registers,
    whole,
    windows_of,
)
from .register_tiles import defines

_ARCHITECTURES = ("90", "100", "120")
# Relative speed on an H200, by (filters per group, stages for groups of outputs).
_GROUPS = {(1, 3): 0.9, (1, 4): 0.9, (2, 3): 0.97, (2, 4): 1.0, (3, 3): 0.98, (3, 4): 0.98}
# Batch size from which blocks of whole images occupy all multiprocessors.
_MANY_IMAGES = 512
# Floats per memory line.
_LINE = 32
# Registers per thread of the warps of kernel 19 that only move data.
_MOVER_REGISTERS = 24
# Maximum registers per thread.
_MOST_OF_A_THREAD = 248


@dataclass(frozen=True)
class Moved(Layout):
    """Layout of kernels 16 and 19: rows per thread, images per block, filters whose outputs are
    stored together, buffers (stages) for such groups, blocks per multiprocessor, and buffers for
    images."""

    rows: int
    images: int
    group: int
    stages: int
    blocks: int
    buffers: int = 1


@dataclass(frozen=True)
class CopiedImages(Family):
    """One launch of persistent blocks. `warps` warps of a block move images and outputs; the
    others, a multiple of that number, compute. With `hand_over` the moving warps pass their
    registers on to them."""

    warps: int
    hand_over: bool

    def why_not(self, problem: ConvProblem) -> str | None:
        reason = no_winograd(problem)
        if reason is not None:
            return reason
        planes = (problem.height * problem.width, problem.out_height * problem.out_width)
        if problem.out_width % 2 or planes[0] % 4 or planes[1] % 4:
            return (
                "it moves images and outputs in vectors of 16 bytes, not of "
                f"{problem.height}x{problem.width} and {problem.out_height}x{problem.out_width}"
            )
        if next(self._fitting(problem, gpu_limits.LEAST_SHARED_BYTES), None) is None:
            return (
                f"an image of {problem.height}x{problem.width} takes more threads, registers or "
                "shared memory than a block has"
            )
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Moved]:
        shared = gpu_limits.shared_bytes(capability)
        fitting = self._fitting(problem, shared)
        best = sorted(fitting, key=lambda tile: self._busy(problem, tile), reverse=True)[:15]
        return [replace(tile, buffers=_buffers(problem, tile, shared)) for tile in best]

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        # Each block computes whole images.
        return problem.batch >= _MANY_IMAGES

    def activates(self, accumulate: bool) -> bool:
        # The copy engine accumulates in memory, so there is no place for an epilogue.
        return not accumulate

    def plan(self, kernel: Code, problem: ConvProblem, layout: Moved, accumulate: bool) -> Plan:
        nbytes = _shared_bytes(problem, layout, layout.buffers)
        units = divide_up(problem.batch, layout.images) * (problem.filters // layout.group)
        sizes, arguments = (nbytes, layout.blocks), ("y", "x", "w", "bias", problem.batch)
        threads = self._threads(problem, layout)
        launch = Launch.line("convolve", units, threads, arguments, *sizes)
        macros = (*defines(problem, layout, accumulate), ("SHARED_BYTES", nbytes))
        if self.hand_over:
            macros += (("REGISTERS", self._handed_over(problem, layout)),)
        return Plan(kernel, macros, (launch,))

    def _busy(self, problem: ConvProblem, tile: Moved) -> float:
        """Estimate a tile's speed: computing threads per multiprocessor, times the fraction of
        useful work; more rows need fewer weight loads; groups count as measured."""
        threads = self._threads(problem, tile) - 32 * self.warps
        windows = tile.images * windows_of(problem, tile.rows) // problem.batch
        useful = windows / threads * problem.out_height / whole(problem.out_height, tile.rows)
        rows = tile.rows / (tile.rows + 2)
        group = _GROUPS[tile.group, tile.stages]
        # The moving warp of each block takes issue slots from the computing ones.
        movers_share = threads / (threads + 32)
        return min(tile.blocks * threads, 384) * useful * rows * group * movers_share

    def _fitting(self, problem: ConvProblem, shared: int) -> Iterator[Moved]:
        """Yield all tiles whose blocks fit into this much shared memory per multiprocessor."""
        groups = [group for group in (1, 2, 3) if problem.filters % group == 0]
        tiles = itertools.product(possible_rows(problem), (1, 2, 4, 8), groups, (3, 4))
        for rows, images, group, stages in tiles:
            tile = Moved(rows, images, group, stages, 1)
            nbytes = _shared_bytes(problem, tile, 1) + gpu_limits.RESERVED_SHARED_BYTES
            most = min(self._blocks_by_registers(problem, tile), shared // nbytes)
            if self._threads(problem, tile) <= gpu_limits.THREADS and most >= 1:
                yield replace(tile, blocks=min(most, 8))

    def _blocks_by_registers(self, problem: ConvProblem, tile: Moved) -> int:
        """Return the number of blocks per multiprocessor that the registers allow."""
        threads = self._threads(problem, tile)
        needed = whole(registers(problem, tile.rows), 8)
        if not self.hand_over:
            # Registers are allocated to groups of four warps.
            return 32 * (gpu_limits.REGISTERS // (32 * needed) // 4 * 4) // threads
        fit = (
            blocks
            for blocks in range(1, 9)
            if self._handed_over(problem, replace(tile, blocks=blocks)) >= needed
        )
        return max(fit, default=0)

    def _handed_over(self, problem: ConvProblem, tile: Moved) -> int:
        """Return the registers per computing thread of kernel 19: the initial registers of all the
        block's warps, redistributed. 0 if the initial allocation exceeds what a thread can use."""
        warps = self._threads(problem, tile) // 32
        at_first = gpu_limits.REGISTERS // (32 * warps * tile.blocks) // 8 * 8
        if at_first > MOST_REGISTERS:
            return 0
        left = at_first * warps - _MOVER_REGISTERS * self.warps
        return min(left // (warps - self.warps) // 8 * 8, _MOST_OF_A_THREAD)

    def _threads(self, problem: ConvProblem, tile: Moved) -> int:
        """Return the threads per block: the computing ones, and the moving warps before them."""
        windows = tile.images * windows_of(problem, tile.rows) // problem.batch
        return whole(windows, 32 * self.warps) + 32 * self.warps


def _buffers(problem: ConvProblem, tile: Moved, shared: int) -> int:
    """Return the number of image buffers of a block: two if all blocks still fit."""
    nbytes = _shared_bytes(problem, tile, 2) + gpu_limits.RESERVED_SHARED_BYTES
    return 2 if tile.blocks * nbytes <= shared else 1


def _shared_bytes(problem: ConvProblem, tile: Moved, buffers: int) -> int:
    """Shared memory of a block: outputs, which may start anywhere in a line, images, factors,
    barriers."""
    room = whole(tile.group * problem.out_height * problem.out_width, _LINE) + _LINE
    pixels = problem.height * problem.width
    elements = tile.images * (tile.stages * room + buffers * pixels)
    barriers = 16 * (buffers + tile.stages)
    return whole(4 * elements + factor_bytes(problem) + barriers, 128)


KERNELS = (
    entry(
        "16_copy_engine",
        "15 with images and outputs moved by Hopper's copy engine",
        *(CopiedImages(1, hand_over=False), 1, _ARCHITECTURES),
    ),
    entry(
        "19_more_registers",
        "16 with registers handed over to the warps that compute",
        *(CopiedImages(4, hand_over=True), 2, ("90a",)),
    ),
)
