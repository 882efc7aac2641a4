"""Implicit matrix products on tensor cores at float32 accuracy, in one launch:
`implicit_gemm_fused` with Hopper's wgmma, `implicit_gemm_sm80` with mma.sync, from Ampere on.

kernels/cuda/gemm/implicit_gemm_fused.cu explains the algorithm; this module chooses the tiling.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ... import DIRECTIONS
from .. import gpu_limits
from ..kernel_plan import (
    ARCHITECTURES,
    Capability,
    Code,
    Defines,
    Family,
    Kernel,
    Launch,
    Layout,
    Plan,
    divide_up,
    entry,
)
from . import (
    gemm_grid,
    implicit_gemm_prepacked,
    implicit_gemm_prepacked_backward_weight,
    layer_macros,
)

_THREADS = 256
# Typical number of multiprocessors; only the work partition depends on it.
_PROCESSORS = 132
# Registers per thread: for everything but values in flight and sums; in addition, by parts per
# number, if warps hold their operands in registers; and the maximum.
_OTHER_REGISTERS, _REGISTERS_OF_WARPS, _MOST_REGISTERS = 37, {2: 20, 3: 28}, 255
# Buffer through which warps write results.
_RESULT_BYTES = 8 * 16 * 40 * 4
# Maximum memory for the partial sums of splits.
_SUM_BYTES = 64 << 20
# With fewer rows, columns or values of k, tensor cores multiply mostly padding.
_LEAST_SIZE = 16
# Maximum number of layouts to choose from.
_MOST_LAYOUTS = 24
# Cluster sizes that CUDA allows, and the number of clusters that an H200 holds at a time with one
# block per multiprocessor. A cluster needs adjacent multiprocessors, so some stay unused.
_CLUSTERS = {1: _PROCESSORS, 2: 64, 4: 28, 8: 14}

# Correction factor: forward, for many images, layouts with several row tiles take longer than the
# estimate. On 36 layers at batch 32 on an H200, choosing between `implicit_gemm_prepacked` and this
# kernel costs 1% over the faster one with the factor (at most 19%), and 9% without (at most 37%).
_ROWS, _MANY, _SEVERAL_ROWS = 64, 8, 1.35


@dataclass(frozen=True)
class _Costs:
    """Cost model in microseconds, fitted to about 1500 runs on an H200: a launch; a slab's latency,
    its instructions per number that a thread converts (more with several taps or strided columns)
    and per column; a tile, and each of its sums that a thread writes; a cluster's sums; the second
    launch; and memory bytes per microsecond."""

    launch: float
    latency: float
    value: float
    tap_value: float
    strided_value: float
    column: float
    tile: float
    sum: float
    cluster: float
    second: float
    bytes: float


_COSTS = {
    "forward": _Costs(3.74, 0.48, 0.044, 0.0034, 0.0066, 0.0077, 1.69, 0.0025, 1.4, 1.6, 1.9e6),
    "backward_data": _Costs(
        *(4.04, 0.31, 0.038, 0.01, 0.017, 0.0024, 1.34, 0.0195, 0.82, 1.28, 2.2e6)
    ),
    "backward_weight": _Costs(
        *(2.35, 0.91, 0.041, 0.0082, 0.0, 0.0083, 2.57, 0.017, 4.0, 0.95, 1.5e6)
    ),
}


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: values of k per step, columns of four warps, whether the two groups of four warps
    have their own rows (2) or columns (1), blocks per tile (cluster), and blocks per
    multiprocessor."""

    depth: int
    columns: int
    row_groups: int
    cluster: int
    blocks: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns."""
        return 64 * self.row_groups, self.columns * 2 // self.row_groups

    @property
    def values(self) -> int:
        """Numbers per thread in flight to shared memory."""
        return sum(self.tile) * self.depth // _THREADS


@dataclass(frozen=True)
class Gemm(Family):
    """One direction; with `by_warps` it uses mma.sync and no clusters."""

    direction: str
    by_warps: bool = False
    spaced = True

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        is_plain = problem.kernel == (1, 1) and problem.pad == (0, 0)
        if self.direction == "backward_data" and problem.stride != (1, 1) and not is_plain:
            return "of the gradient for x it computes strides for 1x1 without padding only"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        return list(_ordered(self, problem, gpu_limits.shared_bytes(capability))[:_MOST_LAYOUTS])

    def parts(self, problem: ConvProblem) -> int:
        """Return the parts per number: three if sums are too short for two to be as exact as
        float32."""
        return 2 if gemm_grid.halves_hold(problem, self.direction) else 3

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        if self.by_warps:
            few = min(self._sizes(problem, problem.batch)) < _LEAST_SIZE
            return gpu_limits.sums_at_full_rate(capability) and not few
        return microseconds(problem, self.direction) < self.other_microseconds(problem)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        splits = self.splits(problem, layout, problem.batch)
        rows, columns, _ = self._sizes(problem, problem.batch)
        # A gradient has no bias, and a product without splits no workspace: these arguments are
        # unused.
        names = {
            "forward": ("y", "w", "x", "bias"),
            "backward_data": ("dx", "w", "dy", "w"),
            "backward_weight": ("dw", "dy", "x", "x"),
        }[self.direction]
        partial = "workspace" if splits > 1 else names[0]
        parts = self.parts(problem)
        nbytes = shared_bytes(layout, parts)
        arguments = (*names, partial, problem.batch, splits)
        blocks = self.clusters(problem, layout, problem.batch) * layout.cluster * splits
        # The number of resident clusters is no multiple of the cluster size.
        sizes = (nbytes, layout.blocks if layout.cluster == 1 else 0)
        launches = [Launch.line("multiply_tiles", blocks, _THREADS, arguments, *sizes)]
        elements = problem.groups * rows * columns
        if splits > 1:
            launches.append(Launch.line("add_up", divide_up(elements, 256), 256, arguments))
        return Plan(
            kernel,
            (
                *self._defines(problem, accumulate),
                *layout.defines,
                *((("PARTS", parts),) if parts > 2 else ()),
                ("SHARED_BYTES", nbytes),
            ),
            tuple(launches),
            workspace_bytes=4 * splits * elements if splits > 1 else 0,
        )

    def _defines(self, problem: ConvProblem, accumulate: bool) -> Defines:
        return (
            *layer_macros.sizes(problem, "channels", "height", "width", "filters", "groups"),
            *layer_macros.window(problem),
            *layer_macros.output(problem.bias and self.direction == "forward", accumulate),
        )

    def by_lines(self, problem: ConvProblem) -> tuple[bool, bool]:
        """Return whether rows, and columns, are contiguous in memory: the weights' channels, pixels
        and, for the gradient for w, planes of one pixel are."""
        if self.direction == "backward_weight":
            outs = problem.out_height * problem.out_width
            return outs == 1, problem.height * problem.width == 1
        return self.direction == "backward_data", True

    def _sizes(self, problem: ConvProblem, batch: int) -> tuple[int, int, int]:
        """Return a group's product: rows, columns, and values of k."""
        group_in, group_out = problem.channels // problem.groups, problem.filters // problem.groups
        taps = math.prod(problem.kernel)
        outputs = batch * problem.out_height * problem.out_width
        if self.direction == "forward":
            return group_out, outputs, group_in * taps
        if self.direction == "backward_weight":
            return group_out, group_in * taps, outputs
        is_single = problem.kernel == (1, 1) and problem.pad == (0, 0)
        pixels = batch * problem.height * problem.width
        return group_in, outputs if is_single else pixels, group_out * taps

    def _tiles(self, problem: ConvProblem, layout: Blocks, batch: int) -> tuple[int, int]:
        sizes = self._sizes(problem, batch)
        rows, columns = (divide_up(size, of_tile) for size, of_tile in zip(sizes, layout.tile))
        return rows, columns

    def clusters(self, problem: ConvProblem, layout: Blocks, batch: int) -> int:
        """Return the number of clusters without splits."""
        return math.prod(self._tiles(problem, layout, batch)) * problem.groups

    def splits(self, problem: ConvProblem, layout: Blocks, batch: int) -> int:
        """Return the number of clusters that compute one tile."""
        rows, columns, depth = self._sizes(problem, batch)
        if layout.cluster > 1:
            return 1
        slabs = divide_up(depth, layout.depth)
        most = max(1, min(slabs // 2, _SUM_BYTES // (4 * problem.groups * rows * columns)))
        # All values ceil(most / n): every number up to sqrt(most), and those for n up to there.
        root = math.isqrt(most)
        counts = {*range(1, root + 1), *(divide_up(most, by) for by in range(1, root + 2))}
        return min(
            sorted(counts), key=lambda count: self._microseconds(problem, layout, batch, count)
        )

    def microseconds(self, problem: ConvProblem, layout: Blocks, batch: int) -> float:
        """Estimate the time of the launches."""
        splits = self.splits(problem, layout, batch)
        return self._microseconds(problem, layout, batch, splits)

    def _microseconds(self, problem: ConvProblem, layout: Blocks, batch: int, splits: int) -> float:
        costs = _COSTS[self.direction]
        rows, columns, depth = self._sizes(problem, batch)
        clusters = self.clusters(problem, layout, batch) * splits
        turns = divide_up(clusters, _CLUSTERS[layout.cluster] * layout.blocks)
        at_once = min(layout.blocks, divide_up(clusters, _CLUSTERS[layout.cluster]))
        slabs = divide_up(divide_up(depth, layout.depth), layout.cluster * splits)
        of_value = costs.value + (costs.tap_value if math.prod(problem.kernel) > 1 else 0)
        work = layout.values * of_value + layout.columns * costs.column
        if problem.stride[1] > 1:
            work += layout.tile[1] * layout.depth // _THREADS * costs.strided_value
        slab = max(costs.latency + work, at_once * work)
        tile = costs.tile + costs.sum * math.prod(layout.tile) / _THREADS * at_once
        arrays = 4 * (math.prod(problem.x_shape[1:]) + math.prod(problem.y_shape[1:])) * batch
        time = turns * (slabs * slab + tile) + (costs.cluster if layout.cluster > 1 else 0)
        time = costs.launch + max(time, arrays / costs.bytes)
        if splits > 1:
            sums = 8 * splits * problem.groups * rows * columns
            time += costs.second + sums / costs.bytes
        return time

    def depths(self, problem: ConvProblem) -> tuple[int, ...]:
        """Return candidate values of k per step, which tensor cores sum up."""
        if not gemm_grid.is_short(problem, self.direction):
            return 64, 32
        if self.parts(problem) == 2:
            return (gemm_grid.SHORT_STEP,)
        # Windows at an image's edge contribute fewer terms to a gradient for w.
        return (16,) if self.direction == "backward_weight" else (gemm_grid.SHORT_STEP, 16)

    def other_microseconds(self, problem: ConvProblem) -> float:
        """Estimate the time of the kernel with prepacked operands; infinite if it is not exact
        enough."""
        if not gemm_grid.halves_hold(problem, self.direction):
            return math.inf
        if self.direction == "backward_weight":
            return implicit_gemm_prepacked_backward_weight.microseconds(problem)
        return implicit_gemm_prepacked.microseconds(problem, self.direction == "backward_data")


def microseconds(problem: ConvProblem, direction: str) -> float:
    """Estimate the time of `implicit_gemm_fused` or of one of its gradients."""
    family = Gemm(direction)
    layout = family.layouts(problem, (9, 0))[0]
    time = family.microseconds(problem, layout, problem.batch)
    if direction == "forward" and problem.filters > _ROWS and problem.batch >= _MANY:
        time *= _SEVERAL_ROWS
    return time


# Cached: networks have hundreds of layers and query each several times.
@functools.lru_cache(maxsize=1024)
def _ordered(family: Gemm, problem: ConvProblem, all_shared_bytes: int) -> tuple[Blocks, ...]:
    """Return layouts in order of estimated time."""
    batch = gemm_grid.nominal(problem.batch)
    how = family.depths(problem), family.parts(problem), family.by_lines(problem), family.by_warps
    fitting = (
        each
        for each in _fitting(*how, all_shared_bytes)
        if each.cluster == 1
        or family.clusters(problem, each, batch) * each.cluster <= _PROCESSORS * each.blocks
    )
    return tuple(sorted(fitting, key=lambda each: family.microseconds(problem, each, batch)))


@functools.lru_cache(maxsize=64)
def _fitting(
    depths: tuple[int, ...],
    parts: int,
    by_lines: tuple[bool, bool],
    by_warps: bool,
    all_shared_bytes: int,
) -> tuple[Blocks, ...]:
    """Return layouts that fit into shared memory and registers. If rows or columns of the product
    are contiguous in memory, a thread has at least 8 values along them."""
    sizes = depths, (128, 64, 32, 16), (1, 2), (1,) if by_warps else tuple(_CLUSTERS), (1, 2, 3)
    other = _OTHER_REGISTERS + (_REGISTERS_OF_WARPS[parts] if by_warps else 0)
    every = (Blocks(*each) for each in itertools.product(*sizes))
    return tuple(
        each
        for each in every
        if each.blocks * (shared_bytes(each, parts) + gpu_limits.RESERVED_SHARED_BYTES)
        <= all_shared_bytes
        and each.values + each.columns + other <= registers(each)
        and all(
            lines * each.depth // _THREADS >= 8
            for lines, neighbours in zip(each.tile, by_lines)
            if neighbours
        )
        and each.tile[1] <= _THREADS
        and each.tile[1] * each.depth >= 2 * _THREADS
    )


def registers(layout: Blocks) -> int:
    """Return the maximum registers per thread."""
    return min(gpu_limits.REGISTERS // _THREADS // layout.blocks, _MOST_REGISTERS)


def shared_bytes(layout: Blocks, parts: int = 2) -> int:
    """The size of the struct Shared, which the source asserts."""
    rows, columns = layout.tile
    factors = 4 if parts == 2 else 0
    lines = sum(
        2 * parts * layout.depth * (count + 1) + factors * count for count in (rows, columns)
    )
    sums = 4 * rows * (columns + 8) if layout.cluster > 1 else _RESULT_BYTES
    return 2 * lines + sums


def _entry(summary: str, family: Gemm, rank: int) -> Kernel:
    by_warps = (("BY_WARPS", 1),) if family.by_warps else ()
    name = "implicit_gemm_sm80" if family.by_warps else "implicit_gemm_fused"
    name += "" if family.direction == "forward" else f"_{family.direction}"
    macros = (*by_warps, ("DIRECTION", DIRECTIONS.index(family.direction)))
    architectures = ARCHITECTURES[1:] if family.by_warps else ("90a",)
    source = "gemm/implicit_gemm_fused.cu"
    return entry(name, summary, family, rank, architectures, source=source, macros=macros)


KERNELS = (
    _entry(
        "a matrix product on tensor cores, at float32 accuracy, that splits numbers on their way",
        *(Gemm("forward"), 9),
    ),
    _entry("the gradient for x in this way", Gemm("backward_data"), 10),
    _entry("the gradient for w in this way", Gemm("backward_weight"), 10),
    _entry("the same by mma.sync, for GPUs that are not Hopper's", Gemm("forward", True), 13),
    _entry("the gradient for x like that", Gemm("backward_data", True), 12),
    _entry("the gradient for w like that", Gemm("backward_weight", True), 12),
)
