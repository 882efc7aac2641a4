"""Gradient for w as a matrix product on Hopper's tensor cores, at float32 or TF32 accuracy.

kernels/cuda/gemm/implicit_gemm_prepacked_backward_weight.cu explains the algorithm; this module
chooses the tiling.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ..kernel_plan import Capability, Code, Family, Launch, Layout, Plan, divide_up, entry
from . import gemm_grid
from .gemm_grid import (
    MEMORY_RATE,
    MOST_STAGES,
    PROCESSORS,
    RECORD_BYTES,
    ROWS,
    SHARED_BYTES,
    STEP,
    THREADS,
    Product,
)

# Maxima: positions per thread that packs planes, taps of a row per step, memory for sums.
_MOST_TURNS = 8
_MOST_ROW_TAPS = 5
# Maximum number of layouts to choose from.
_MOST_LAYOUTS = 16
# Positions of a chunk (the first one for short sums), and the maximum registers of its values: the
# compiler spills more.
_CHUNKS, _MOST_REGISTERS = (gemm_grid.SHORT_STEP, 48, 64, 80, 96, 112), 200
_SUM_BYTES = 64 << 20
# Cost model, fitted to about 300 runs on an H200 with a root mean square error of 10%. Cycles: of
# an instruction by its columns, and of starting a copy; of a chunk besides its instructions, by
# whether warp groups have their own rows (2) or take turns (1), and of a tile; bytes copied to
# shared memory per cycle.
_INSTRUCTIONS, _COPY_CYCLES = {16: 11.5, 32: 18.5, 64: 40}, 18
_CHUNK_CYCLES, _TILE_CYCLES = {1: 350, 2: 490}, 1700
_COPIED_BYTES = 60
# Start and end of the launches in microseconds; and per microsecond: cycles and bytes of memory.
_LAUNCHES, _CYCLES, _BYTES = 12, 1755, 3e6


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: channels of four warps, taps of a row per step, whether the two groups of four warps
    have their own filters (2) or take turns (1), shared-memory stages (per group if they take
    turns), positions per stage, and threads that pack a strip of 8 channels of an image."""

    columns: int
    taps: int
    row_groups: int
    stages: int
    chunk: int
    plane_threads: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.row_groups

    @property
    def chunk_groups(self) -> int:
        """Warp groups with chunks of their own."""
        return 2 // self.row_groups


@dataclass(frozen=True)
class Gemm(Family):
    """The gradient for w: the forward product's grid, summed over its positions; one of `parts`
    makes it as exact as TF32."""

    parts: int = 2

    def why_not(self, problem: ConvProblem) -> str | None:
        refused = gemm_grid.refused(problem, self.parts)
        if refused is not None:
            return refused
        if not _fitting(self._product(problem)):
            return f"a tile of one row of taps does not fit into {SHARED_BYTES} bytes"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        found = _ordered(self._product(problem), gemm_grid.nominal(problem.batch))
        # Tensor cores sum a chunk.
        is_short = self.parts > 1 and gemm_grid.is_short(problem, "backward_weight")
        found = tuple(each for each in found if is_short == (each.chunk == _CHUNKS[0]))
        return list(found[:_MOST_LAYOUTS])

    def holds(self, problem: ConvProblem) -> bool:
        return gemm_grid.halves_hold(problem, "backward_weight")

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return gemm_grid.is_dense_product(problem, self._product(problem))

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        made = self._product(problem)
        splits = estimate(made, layout, problem.batch)[1]
        parts = splits * layout.chunk_groups
        units = sum(_units(made, layout))
        items = math.prod(_tiles(made, layout)) * splits
        strips = _strips(made, layout)
        planes = ("find_largest", "lay_out_planes") if strips > 1 else ("lay_out_planes",)
        nbytes, batch = shared_bytes(made, layout), problem.batch
        laid_out, read = batch * units * strips, ("workspace", "x", "dy", batch)
        multiplied = ("workspace", batch, splits)
        sums = problem.filters * divide_up(problem.w_shape[1], _added(problem))
        launches = (
            *(Launch.line(each, laid_out, layout.plane_threads, read) for each in planes),
            Launch.line("multiply_positions", items, THREADS, multiplied, nbytes, 1),
            Launch.line("add_up", sums, 256, ("dw", "x", "dy", "workspace", batch, parts)),
        )
        defines = gemm_grid.defines(problem, made, accumulate, bias=False)
        macros = (*defines, *layout.defines, ("SHARED_BYTES", nbytes))
        nbytes = _workspace_bytes(made, layout, problem.batch, parts)
        return Plan(kernel, macros, launches, workspace_bytes=nbytes)

    def _product(self, problem: ConvProblem) -> Product:
        return gemm_grid.product(problem, False, self.parts)


def _added(problem: ConvProblem) -> int:
    """Return the channels per block of `add_up`, whose sums are in shared memory."""
    return 64 if math.prod(problem.kernel) <= 128 else 8


def _row_taps(made: Product) -> int:
    """Return the maximum number of taps in a row of one pair."""
    return max(len({column for _, column in taps}) for _, taps in made.pairs)


def _tap_span(made: Product, taps: int) -> int:
    """Return the maximum distance between the first and the last of `taps` taps of a row."""
    rows = (sorted({column for _, column in each}) for _, each in made.pairs)
    return max(row[i] - row[i // taps * taps] for row in rows for i in range(len(row)))


def _image_positions(made: Product) -> int:
    """Return x's positions per image, in whole steps."""
    return divide_up(made.positions, STEP) * STEP


def _dy_positions(made: Product) -> int:
    """Return dy's positions, up to the last non-zero one."""
    down, across = made.axes
    return divide_up((down.valid - 1) * across.grid + across.valid, STEP) * STEP


@functools.lru_cache(maxsize=1024)
def _ordered(made: Product, batch: int) -> tuple[Blocks, ...]:
    """Return layouts in order of estimated time."""
    return tuple(sorted(_fitting(made), key=lambda each: estimate(made, each, batch)[0]))


@functools.lru_cache(maxsize=1024)
def _fitting(made: Product) -> tuple[Blocks, ...]:
    positions = _image_positions(made)
    threads = max(64, min(512, divide_up(positions, 32) * 32))
    found = []
    for columns, taps, row_groups in itertools.product(
        (16, 32, 64), range(1, _MOST_ROW_TAPS + 1), (1, 2)
    ):
        # More columns than the product has.
        wide = columns > max(STEP, divide_up(made.depth, STEP) * STEP)
        if wide or taps > _row_taps(made) or (row_groups == 2 and made.rows <= ROWS):
            continue
        for chunk in _CHUNKS:
            # Per thread: its sums, those of two taps, and dy.
            registers = columns // 2 * (taps + 2) + chunk // 2
            one = Blocks(columns, taps, row_groups, 1, chunk, threads)
            stages = min(MOST_STAGES // one.chunk_groups, SHARED_BYTES // shared_bytes(made, one))
            if registers <= _MOST_REGISTERS and stages >= 2:
                found.append(dataclasses.replace(one, stages=stages))
    return tuple(found)


def _strips(made: Product, layout: Blocks) -> int:
    """Return the strips of an image's planes that are packed separately."""
    turns = min(_MOST_TURNS, divide_up(_image_positions(made), layout.plane_threads))
    return divide_up(_image_positions(made), layout.plane_threads * turns)


def shared_bytes(made: Product, layout: Blocks) -> int:
    """The size of the struct Shared of implicit_gemm_prepacked_backward_weight.cu."""
    span = layout.chunk + _tap_span(made, layout.taps)
    stage = made.number_bytes * (layout.rows * layout.chunk + layout.columns * span) + 16
    stage += 4 * (layout.rows + layout.columns)
    return divide_up(layout.chunk_groups * layout.stages * stage, RECORD_BYTES) * RECORD_BYTES


def _tiles(made: Product, layout: Blocks) -> tuple[int, int, int, int]:
    """Return the tiles of rows and of columns, groups of taps, and sets."""
    groups = 0
    for _, taps in made.pairs:
        rows, columns = ({tap[axis] for tap in taps} for axis in range(2))
        groups += len(rows) * divide_up(len(columns), layout.taps)
    tiles = divide_up(made.rows, layout.rows), divide_up(made.depth, layout.columns)
    return (*tiles, groups, made.sets)


def _units(made: Product, layout: Blocks) -> tuple[int, int]:
    """Return the units of 8 channels of dy, and of x in all phases."""
    row_tiles, column_tiles, _, sets = _tiles(made, layout)
    rows, columns = row_tiles * layout.rows // 8, column_tiles * layout.columns // 8
    return sets * rows, sets * len(made.pairs) * columns


def _part_bytes(made: Product, layout: Blocks) -> int:
    """Return the bytes of the sums of one part of the positions."""
    row_tiles, column_tiles, _, sets = _tiles(made, layout)
    return 4 * sets * row_tiles * layout.rows * made.taps * column_tiles * layout.columns


def _workspace_bytes(made: Product, layout: Blocks, batch: int, parts: int) -> int:
    """The size of `Workspace` in the source."""
    rows, columns = _units(made, layout)
    dy_length = batch * _dy_positions(made) + layout.chunk
    last = max(row for _, taps in made.pairs for row, _ in taps) * made.axes[1].grid
    last += max(column for _, taps in made.pairs for _, column in taps)
    x_length = batch * _image_positions(made) + layout.chunk + last
    x_length += _tap_span(made, layout.taps)
    records = made.parts * RECORD_BYTES * (rows * dy_length + columns * x_length)
    factors = 4 * 8 * batch * (rows + columns) * (1 + _strips(made, layout))
    return records + factors + parts * _part_bytes(made, layout)


def estimate(made: Product, layout: Blocks, batch: int) -> tuple[float, int]:
    """Estimate the cycles of the product, and choose the number of parts of the positions."""
    items = math.prod(_tiles(made, layout))
    chunks = batch * divide_up(_dy_positions(made), layout.chunk)
    copies = made.parts * (layout.rows + layout.columns) / 8 + 2
    span = layout.chunk + _tap_span(made, layout.taps)
    moved = made.number_bytes * (layout.rows * layout.chunk + layout.columns * span)
    brought = max(copies * _COPY_CYCLES, moved / _COPIED_BYTES)
    # Cycles of a tap.
    multiplied = made.products * layout.chunk / STEP * _INSTRUCTIONS[layout.columns]
    multiplied *= layout.row_groups
    mean_taps, most_taps = made.taps / _tiles(made, layout)[2], min(layout.taps, _row_taps(made))
    of_part = _part_bytes(made, layout) * layout.chunk_groups
    best: tuple[float, int] | None = None
    most = max(1, min(chunks // 4, _SUM_BYTES // int(of_part)))
    for splits in sorted({divide_up(most, parts) for parts in range(1, most + 1)}):
        blocks = divide_up(items * splits, PROCESSORS)
        # With one item per block, the block with the most taps determines the time.
        taps = most_taps if blocks == 1 else mean_taps
        chunk = max(taps * multiplied + _CHUNK_CYCLES[layout.row_groups], brought)
        cycles = blocks * (divide_up(chunks, splits) * chunk + _TILE_CYCLES)
        cycles += 2 * splits * of_part / PROCESSORS / MEMORY_RATE
        if best is None or cycles < best[0]:
            best = cycles, splits
    assert best is not None
    return best


def microseconds(problem: ConvProblem) -> float:
    """Estimate the time of all launches; infinite if the kernel does not compute the problem or
    does not pay."""
    made, family = gemm_grid.product(problem, False), Gemm()
    if family.why_not(problem) is not None or not family.pays(problem, (9, 0)):
        return math.inf
    layout = family.layouts(problem, (9, 0))[0]
    cycles, splits = estimate(made, layout, problem.batch)
    arrays = 4 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
    if _strips(made, layout) > 1:
        arrays *= 2
    parts = splits * layout.chunk_groups
    workspace = _workspace_bytes(made, layout, problem.batch, parts)
    multiplied = max(cycles / _CYCLES, workspace / _BYTES)
    return _LAUNCHES + (arrays + workspace) / _BYTES + multiplied


_entry = functools.partial(
    entry, architectures=("90a",), source="gemm/implicit_gemm_prepacked_backward_weight.cu"
)
KERNELS = (
    _entry("implicit_gemm_prepacked_backward_weight", "the gradient for w of these", Gemm(), 11),
    _entry(
        "implicit_gemm_prepacked_half_backward_weight",
        "the gradient for w like implicit_gemm_prepacked_half's for x",
        *(Gemm(parts=1), 9),
        precision="tf32",
        macros=(("PARTS", 1),),
    ),
)
