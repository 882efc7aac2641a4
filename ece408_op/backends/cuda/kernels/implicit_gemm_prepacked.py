"""Matrix products with prepacked operands on Hopper's tensor cores, at float32 or TF32 accuracy:
forward pass and gradient for x.

kernels/cuda/gemm/implicit_gemm_prepacked.cu explains the algorithm; this module chooses the tiling.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ..kernel_plan import Apart, Capability, Code, Family, Launch, Layout, Plan, divide_up, entry
from . import gemm_grid
from .gemm_grid import (
    CACHE_RATE,
    MEMORY_RATE,
    MOST_STAGES,
    PROCESSORS,
    RECORD_BYTES,
    ROWS,
    SHARED_BYTES,
    STEP,
    THREADS,
    TILE_CYCLES,
    Product,
)

# Buffer through which warps write results.
_RESULT_BYTES = 8 * 16 * 40 * 4
# Maximum rows of `add_up`: CUDA's grid limit.
_MOST_ROWS = 65535
# Cost model, fitted to about 600 runs on an H200: start and end of the launches in microseconds;
# and per microsecond: cycles, bytes of packed weights, of packed pixels, and of results.
_LAUNCHES, _CYCLES = 6.5, 1756
_WEIGHTS, _LAID_OUT, _WRITTEN = 0.8e6, 3.9e6, 3.45e6
# Cycles of an additional launch.
_LAUNCH_CYCLES = 3500
# Overhead in cycles of a tap (besides multiplying) and of a load (besides moving bytes).
_TAP_CYCLES, _LOAD_CYCLES = 400, 700
# Relative cost of loads with only two stages, and of the first load.
_FEW_STAGES, _FIRST_LOAD = 0.4, 3.2


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: channels per step, positions of four warps, row groups (2 if the two groups of four
    warps have their own rows), and shared-memory stages of pixels and of weights."""

    depth: int
    columns: int
    row_groups: int
    pixel_stages: int
    weight_stages: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return ROWS * self.row_groups

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return self.columns * 2 // self.row_groups


@dataclass(frozen=True)
class Gemm(Family):
    """The forward pass, or with `backward` the gradient for x; one of `parts` makes it as exact as
    TF32."""

    backward: bool
    parts: int = 2
    spaced = True
    prelude = True
    stores = True

    def why_not(self, problem: ConvProblem) -> str | None:
        refused = gemm_grid.refused(problem, self.parts)
        if refused is not None:
            return refused
        made = self._product(problem)
        if not _fitting(made):
            return (
                f"what the taps of a tile see takes {made.halo} pixels beyond it, more than fit "
                f"into {SHARED_BYTES} bytes of shared memory"
            )
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        found = _ordered(self._product(problem), gemm_grid.nominal(problem.batch))
        is_short = self.parts > 1 and gemm_grid.is_short(problem, self._direction)
        return [each for each in found if each.depth <= gemm_grid.SHORT_STEP or not is_short]

    def holds(self, problem: ConvProblem) -> bool:
        return gemm_grid.halves_hold(problem, self._direction)

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return gemm_grid.is_dense_product(problem, self._product(problem))

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        made = self._product(problem)
        splits = estimate(made, layout, problem.batch)[1]
        if made.sets * made.rows > _MOST_ROWS:
            splits = 1
        tiles, length = _length(made, layout, problem.batch)
        slabs = divide_up(made.depth, layout.depth)
        row_tiles = divide_up(made.rows, layout.rows)
        rows = _all_rows(made, layout)
        x, y = ("dy", "dx") if self.backward else ("x", "y")
        # A gradient has no bias: the argument is unused.
        bias = "w" if self.backward else "bias"
        pixel_blocks = divide_up(length, 256) * made.sets * made.phases * slabs
        shared = shared_bytes(made, layout)

        def launches(prepared: str, rows: int) -> tuple[Launch, ...]:
            """Return the launches that read packed weights from `prepared`; they also pack `rows`
            rows."""
            memory = (prepared, "workspace")
            arrays = (y, x, "w", bias, *memory, problem.batch, splits)
            blocks, read = row_tiles * made.sets * made.jobs * tiles * splits, (*memory, x, "w")
            found = [
                Launch.line("lay_out", rows + pixel_blocks, 256, (*read, problem.batch, rows)),
                Launch.line("multiply_tiles", blocks, THREADS, arrays, shared, 1),
            ]
            if splits > 1:
                positions = problem.batch * made.positions
                grid = (divide_up(positions, 256), made.sets * made.rows, made.jobs)
                found.append(Launch("add_up", grid, (256, 1, 1), arrays))
            return tuple(found)

        has_bias = problem.bias and not self.backward
        defines = (*gemm_grid.defines(problem, made, accumulate, has_bias), *layout.defines)
        macros = (*defines, ("HALO", made.halo), ("SHARED_BYTES", shared))
        nbytes = _workspace_bytes(made, layout, problem.batch, splits)
        of_weights = _weight_bytes(made, layout)
        alone = ("y", "y", "w", "w", problem.batch, rows)
        apart = Apart(
            of_weights,
            Plan(kernel, macros, (Launch.line("lay_out", rows, 256, alone),)),
            Plan(kernel, macros, launches("prepared", 0), workspace_bytes=nbytes - of_weights),
        )
        whole = launches("workspace", rows)
        return Plan(kernel, macros, whole, workspace_bytes=nbytes, apart=apart)

    @property
    def _direction(self) -> str:
        return "backward_data" if self.backward else "forward"

    def _product(self, problem: ConvProblem) -> Product:
        return gemm_grid.product(problem, self.backward, self.parts)


@functools.lru_cache(maxsize=1024)
def _ordered(made: Product, batch: int) -> tuple[Blocks, ...]:
    """Return layouts in order of estimated time."""
    return tuple(sorted(_fitting(made), key=lambda each: estimate(made, each, batch)[0]))


@functools.lru_cache(maxsize=1024)
def _fitting(made: Product) -> tuple[Blocks, ...]:
    """Return layouts with the maximum number of stages that fit into shared memory."""
    deepest = divide_up(made.depth, STEP) * STEP
    found = []
    for depth, columns, row_groups in itertools.product((64, 48, 32, 16), (128, 64, 32), (1, 2)):
        if (depth > deepest and depth > STEP) or (row_groups == 2 and made.rows <= ROWS):
            continue
        for pixel_stages in (4, 3, 2):
            least = Blocks(depth, columns, row_groups, pixel_stages, 0)
            room = SHARED_BYTES - shared_bytes(made, least)
            stages = min(MOST_STAGES, room // (least.rows * depth * made.number_bytes + 16))
            if stages >= 2:
                found.append(Blocks(depth, columns, row_groups, pixel_stages, stages))
                break
    return tuple(found)


def shared_bytes(made: Product, layout: Blocks) -> int:
    """The size of the struct Shared, which the source asserts."""
    span = layout.tile + made.halo
    pixels = layout.pixel_stages * span * (made.number_bytes * layout.depth + 4)
    weights = layout.weight_stages * layout.rows * made.number_bytes * layout.depth
    barriers = 16 * (layout.pixel_stages + layout.weight_stages)
    total = pixels + weights + _RESULT_BYTES + barriers
    return divide_up(total, RECORD_BYTES) * RECORD_BYTES


def _length(made: Product, layout: Blocks, batch: int) -> tuple[int, int]:
    """Return the number of tiles, and the positions of a plane."""
    tiles = divide_up(batch * made.positions, layout.tile)
    return tiles, tiles * layout.tile + made.halo


def estimate(made: Product, layout: Blocks, batch: int) -> tuple[float, int]:
    """Estimate the cycles of the product, and choose the number of channel splits."""
    tiles, _ = _length(made, layout, batch)
    slabs = divide_up(made.depth, layout.depth)
    row_tiles = divide_up(made.rows, layout.rows) * made.sets
    items = tiles * row_tiles * made.jobs
    # An instruction of 64 rows is limited by its products or by its shared-memory reads.
    instruction = max(layout.columns / 2, 16 + layout.columns / 4)
    tap = gemm_grid.both_busy(layout.depth / STEP * made.products * instruction) + _TAP_CYCLES
    pixels = (layout.tile + made.halo) * (made.number_bytes * layout.depth + 4)
    of_weights = layout.rows * layout.depth * made.number_bytes
    written = max(TILE_CYCLES, layout.rows * layout.tile * 4 / MEMORY_RATE)
    most = max(1, min(made.phases * slabs, 64))
    best: tuple[float, int] | None = None
    for splits in sorted({divide_up(most, parts) for parts in range(1, most + 1)}):
        taps = made.taps / made.jobs * slabs / splits
        loads = divide_up(made.phases * slabs, splits)
        moved = (loads * pixels + taps * of_weights) / CACHE_RATE
        if layout.weight_stages <= 2:
            moved *= 1 + _FEW_STAGES
        blocks = divide_up(items * splits, PROCESSORS)
        cycles = blocks * (max(taps * tap, moved + loads * _LOAD_CYCLES) + written)
        cycles += _FIRST_LOAD * (pixels + of_weights) / CACHE_RATE
        if splits > 1:
            sums = items * layout.rows * layout.tile * 4 * splits * 2
            cycles += _LAUNCH_CYCLES + sums / PROCESSORS / MEMORY_RATE
        if best is None or cycles < best[0]:
            best = cycles, splits
    assert best is not None
    return best


def microseconds(problem: ConvProblem, backward: bool, parts: int = 2) -> float:
    """Estimate the time of all launches; infinite if the kernel does not compute the problem or
    does not pay."""
    made, family = gemm_grid.product(problem, backward, parts), Gemm(backward, parts)
    if family.why_not(problem) is not None or not family.pays(problem, (9, 0)):
        return math.inf
    layout = family.layouts(problem, (9, 0))[0]
    cycles, splits = estimate(made, layout, problem.batch)
    read, written = (4 * math.prod(shape) for shape in (problem.x_shape, problem.y_shape))
    if backward:
        read, written = written, read
    else:
        # Rows that no tap reads are not loaded.
        read = int(read * min(1, problem.kernel[0] / problem.stride[0]))
    workspace = _workspace_bytes(made, layout, problem.batch, splits)
    multiplied = cycles / _CYCLES + written / _WRITTEN
    multiplied = max(multiplied, (workspace + written) / _WRITTEN)
    weights = 4 * math.prod(problem.w_shape)
    return _LAUNCHES + weights / _WEIGHTS + (read + workspace) / _LAID_OUT + multiplied


def _workspace_bytes(made: Product, layout: Blocks, batch: int, splits: int) -> int:
    """The size of `Workspace` in the source."""
    tiles, length = _length(made, layout, batch)
    planes = made.sets * made.phases * divide_up(made.depth, layout.depth)
    pixels = planes * length * (made.number_bytes * layout.depth + 4)
    rows = _all_rows(made, layout)
    sums = splits * made.jobs * rows * tiles * layout.tile * 4 if splits > 1 else 0
    return _weight_bytes(made, layout) + pixels + sums


def _weight_bytes(made: Product, layout: Blocks) -> int:
    """The part of the workspace for weights."""
    slabs, rows = divide_up(made.depth, layout.depth), _all_rows(made, layout)
    return made.taps * slabs * rows * layout.depth * made.number_bytes + rows * 4


def _all_rows(made: Product, layout: Blocks) -> int:
    return made.sets * divide_up(made.rows, layout.rows) * layout.rows


_entry = functools.partial(entry, architectures=("90a",), source="gemm/implicit_gemm_prepacked.cu")
_half = functools.partial(_entry, precision="tf32")
KERNELS = (
    _entry(
        "implicit_gemm_prepacked",
        "groups of several channels: a matrix product on tensor cores, at float32 accuracy",
        *(Gemm(backward=False), 10),
    ),
    _entry(
        "implicit_gemm_prepacked_backward_data",
        "the gradient for x of these",
        *(Gemm(backward=True), 11),
        macros=(("BACKWARD", 1),),
    ),
    _half(
        "implicit_gemm_prepacked_half",
        "implicit_gemm_prepacked with a third of the products, as exact as TF32",
        *(Gemm(backward=False, parts=1), 7),
        macros=(("PARTS", 1),),
    ),
    _half(
        "implicit_gemm_prepacked_half_backward_data",
        "the gradient for x like that",
        *(Gemm(backward=True, parts=1), 9),
        macros=(("BACKWARD", 1), ("PARTS", 1)),
    ),
)
