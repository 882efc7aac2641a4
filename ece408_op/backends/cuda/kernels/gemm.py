"""Convolutions as matrix products on Hopper's tensor cores, at float32 accuracy.

kernels/cuda/gemm.cuh says how; here is the arithmetic of its grids, and how products are cut up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import limits
from ..plan import Capability, Code, Defines, Family, Launch, Layout, Plan, divide_up, entry

_SHARED_BYTES = limits.shared_bytes((9, 0)) - limits.RESERVED_SHARED_BYTES
_RECORD_BYTES = 16
_THREADS = 384
# A GPU's, as a rule: only how work is divided depends on it.
PROCESSORS = 132
_MOST_STAGES = 8
# Through which warps write what they have multiplied.
_RESULT_BYTES = 8 * 16 * 40 * 4
# Of the gradient for w: positions of a thread that lays out planes, taps of a row at once, memory
# for sums: each at most.
_MOST_TURNS = 8
_MOST_ROW_TAPS = 5
# Taps that the sources' tables have room for.
_MOST_TAPS = 1024
_WEIGHT_SUM_BYTES = 64 << 20
# Products, zeros included, for each that is needed, up to which the tensor cores are faster.
_MOST_ZEROS = 24
# Channels of a group up to which the taps of a row may be channels as well.
_FEW_CHANNELS = 8
# Of the tensor cores' tiles: rows, and values of k.
_ROWS, _STEP = 64, 16
# Cycles that a block takes for a tile besides multiplying, and a launch for its beginning and end.
_TILE_CYCLES = 2500
_LAUNCH_CYCLES = 3500
# What a group of warps does not multiply in: it waits for a tap's sums.
_PROMOTION_CYCLES = 150
# Bytes that the GPU's L2 cache and its memory give a processor in a cycle, about.
_CACHE_RATE, _MEMORY_RATE = 26, 18


@dataclass(frozen=True)
class Axis:
    """One axis of a grid, as the macros of gemm.cuh have it. `taps` has, for each remainder, the
    taps' places in the grid; `all_taps` are their places when remainders are channels."""

    grid: int
    in_first: int
    in_step: int
    out_first: int
    out_step: int
    valid: int
    last: int
    taps: tuple[tuple[int, ...], ...]
    all_taps: tuple[int, ...]


def forward_axis(size: int, out: int, kernel: int, stride: int, pad: int, dilate: int) -> Axis:
    """Grids of every stride-th pixel: a tap is so many of their rows away."""
    reach = (kernel - 1) * dilate
    taps = tuple(
        tuple(tap // stride for tap in range(0, reach + 1, dilate) if tap % stride == remainder)
        for remainder in range(stride)
    )
    grid = _grid(divide_up(size + pad, stride), pad // stride, out + reach // stride, out)
    return Axis(grid, -pad, stride, 0, 1, out, 0, taps, tuple(range(reach // stride + 1)))


def backward_axis(size: int, out: int, kernel: int, stride: int, pad: int, dilate: int) -> Axis:
    """A grid of dy: of dx, every stride-th pixel is a product with the taps that reach it."""
    reach = (kernel - 1) * dilate
    zeros = max(0, reach // stride - pad // stride)
    last = pad // stride + zeros
    taps = tuple(
        tuple(
            last - tap // stride for tap in range(0, reach + 1, dilate) if tap % stride == remainder
        )
        for remainder in range(stride)
    )
    first = -(pad % stride)
    valid = divide_up(size - first, stride)
    grid = _grid(zeros + out, zeros, valid + last, valid)
    all_taps = tuple(range(last - reach // stride, last + 1))
    return Axis(grid, -zeros, 1, first, stride, valid, last, taps, all_taps)


def _grid(pixels: int, zeros: int, seen: int, valid: int) -> int:
    """The length of an axis: zeros at the beginning of a row serve the end of the row before."""
    return max(pixels, seen - zeros, valid)


@dataclass(frozen=True)
class Product:
    """What the kernel computes of a problem, however it is cut up: its axes, sets of groups,
    whether remainders are channels (forward) or rows (backward), whether the taps of a row are
    channels, and the taps of each pair of a job and a phase, with that pair's remainders."""

    backward: bool
    axes: tuple[Axis, Axis]
    sets: int
    folded: bool
    folded_taps: bool
    pairs: tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...]
    depth: int
    rows: int

    @property
    def phases(self) -> int:
        return 1 if self.backward else len(self.pairs)

    @property
    def jobs(self) -> int:
        return len(self.pairs) if self.backward else 1

    @property
    def positions(self) -> int:
        """Of an image."""
        return self.axes[0].grid * self.axes[1].grid

    @property
    def taps(self) -> int:
        return sum(len(taps) for _, taps in self.pairs)

    @property
    def halo(self) -> int:
        """Positions beyond a tile that taps see, in fours."""
        width = self.axes[1].grid
        last = max(row * width + column for _, taps in self.pairs for row, column in taps)
        return divide_up(last, 4) * 4


def product(problem: ConvProblem, backward: bool) -> Product:
    """The cheapest way to make a product of an image of the problem."""
    return _cheapest(dataclasses.replace(problem, batch=1, bias=False), backward)


@functools.lru_cache(maxsize=1024)
def _cheapest(problem: ConvProblem, backward: bool) -> Product:
    ways = (_product(problem, backward, *way) for way in _ways(problem, backward))
    # Folded taps make more to lay out.
    return min(ways, key=lambda made: _products(made) * (1.15 if made.folded_taps else 1))


def _ways(problem: ConvProblem, backward: bool) -> Iterator[tuple[int, bool, bool]]:
    """Sets of groups; whether to fold remainders, and a row's taps, which pays for few channels."""
    sets = (count for count in range(1, problem.groups + 1) if problem.groups % count == 0)
    strided = math.prod(problem.stride) > 1
    few = not backward and problem.channels // problem.groups <= _FEW_CHANNELS
    for count, folded, taps in itertools.product(sets, (False, True), (False, True)):
        if folded <= strided and taps <= (few and folded == strided):
            yield count, folded, taps


def _product(
    problem: ConvProblem, backward: bool, sets: int, folded: bool, folded_taps: bool
) -> Product:
    make = backward_axis if backward else forward_axis
    sizes = zip(
        (problem.height, problem.width),
        (problem.out_height, problem.out_width),
        *(problem.kernel, problem.stride, problem.pad, problem.dilate),
    )
    rows, columns = (make(*each) for each in sizes)
    fold = math.prod(problem.stride) if folded else 1
    if folded_taps:
        # Columns need no zeros between rows: a channel has the pixel of its own tap.
        reach = (problem.kernel[1] - 1) * problem.dilate[1]
        fold *= reach // problem.stride[1] + 1
        columns = dataclasses.replace(columns, grid=columns.valid, taps=((0,),), all_taps=(0,))
    if folded:
        pairs = [((0, 0), tuple(itertools.product(rows.all_taps, columns.all_taps)))]
    else:
        remainders = itertools.product(*(range(stride) for stride in problem.stride))
        pairs = [
            ((down, across), tuple(itertools.product(rows.taps[down], columns.taps[across])))
            for down, across in remainders
        ]
        if not backward:
            pairs = [each for each in pairs if each[1]]
    depth, outs = problem.channels // sets, problem.filters // sets
    if backward:
        depth, outs = outs, depth * fold
    else:
        depth *= fold
    return Product(backward, (rows, columns), sets, folded, folded_taps, tuple(pairs), depth, outs)


def _products(made: Product) -> int:
    """What the tensor cores multiply for an image, zeros included."""
    depth, rows = divide_up(made.depth, _STEP) * _STEP, divide_up(made.rows, _ROWS) * _ROWS
    return made.positions * made.sets * made.taps * depth * rows


@dataclass(frozen=True)
class Blocks(Layout):
    """How blocks work: channels at once, positions of four warps, whether the two groups of four
    warps have rows of their own (2), and stages of pixels and weights in shared memory."""

    depth: int
    columns: int
    row_groups: int
    pixel_stages: int
    weight_stages: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return _ROWS * self.row_groups

    @property
    def tile(self) -> int:
        """Its positions."""
        return self.columns * 2 // self.row_groups


@dataclass(frozen=True)
class Gemm(Family):
    """Forward, or with `backward` the gradient for x."""

    backward: bool

    def why_not(self, problem: ConvProblem) -> str | None:
        refused = _refused(problem)
        if refused is not None:
            return refused
        made = product(problem, self.backward)
        if not _fitting(made):
            return (
                f"what the taps of a tile see takes {made.halo} pixels beyond it, more than fit "
                f"into {_SHARED_BYTES} bytes of shared memory"
            )
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        made = product(problem, self.backward)
        batch = _nominal(problem.batch)
        return sorted(_fitting(made), key=lambda each: estimate(made, each, batch)[0])

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return _is_dense(problem, product(problem, self.backward))

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        made = product(problem, self.backward)
        splits = estimate(made, layout, problem.batch)[1]
        tiles, length = _length(made, layout, problem.batch)
        slabs = divide_up(made.depth, layout.depth)
        row_tiles = divide_up(made.rows, layout.rows)
        rows = made.sets * row_tiles * layout.rows
        x, y = ("dy", "dx") if self.backward else ("x", "y")
        # A gradient has no bias: the argument is not read.
        bias = "w" if self.backward else "bias"
        arrays = (y, x, "w", bias, "workspace", problem.batch, splits)
        launches = [
            Launch(
                "lay_out",
                (rows + divide_up(length, 256) * made.sets * made.phases * slabs, 1, 1),
                (256, 1, 1),
                ("workspace", x, "w", problem.batch),
            ),
            Launch(
                "multiply_tiles",
                (row_tiles * made.sets * made.jobs * tiles * splits, 1, 1),
                (_THREADS, 1, 1),
                arrays,
                shared_bytes(made, layout),
                1,
            ),
        ]
        if splits > 1:
            positions = problem.batch * made.positions
            launches.append(
                Launch(
                    "add_up",
                    (divide_up(positions, 256), made.sets * made.rows, made.jobs),
                    (256, 1, 1),
                    arrays,
                )
            )
        has_bias = problem.bias and not self.backward
        defines = (*_defines(problem, made, accumulate, has_bias), *layout.defines)
        macros = (*defines, ("HALO", made.halo), ("SHARED_BYTES", shared_bytes(made, layout)))
        nbytes = _workspace_bytes(made, layout, problem.batch, splits)
        return Plan(kernel, macros, tuple(launches), workspace_bytes=nbytes)


def _refused(problem: ConvProblem) -> str | None:
    """What neither direction computes."""
    if problem.dtype != "float32":
        return f"it computes float32 only, not {problem.dtype}"
    taps = math.prod(problem.kernel)
    return f"it has room for {_MOST_TAPS} taps, not {taps}" if taps > _MOST_TAPS else None


def _nominal(batch: int) -> int:
    """The batch that layouts are chosen for: macros, and so compiles, are for one of three."""
    return 1 if batch < 4 else 8 if batch < 16 else 64


def is_dense(problem: ConvProblem) -> bool:
    """Whether the forward pass is worth it: see `_is_dense`."""
    return _is_dense(problem, product(problem, False))


def _is_dense(problem: ConvProblem, made: Product) -> bool:
    """Whether few zeros are multiplied: groups of a channel or two have kernels of their own."""
    needed = math.prod(problem.y_shape[1:]) * math.prod(problem.w_shape[1:])
    return _products(made) <= _MOST_ZEROS * needed


@functools.lru_cache(maxsize=1024)
def _fitting(made: Product) -> tuple[Blocks, ...]:
    """Layouts whose stages fit into shared memory, with as many stages as do."""
    deepest = divide_up(made.depth, _STEP) * _STEP
    found = []
    for depth, columns, row_groups in itertools.product((64, 48, 32, 16), (128, 64, 32), (1, 2)):
        if (depth > deepest and depth > _STEP) or (row_groups == 2 and made.rows <= _ROWS):
            continue
        for pixel_stages in (4, 3, 2):
            least = Blocks(depth, columns, row_groups, pixel_stages, 0)
            room = _SHARED_BYTES - shared_bytes(made, least)
            stages = min(_MOST_STAGES, room // (least.rows * depth * 4 + 16))
            if stages >= 2:
                found.append(Blocks(depth, columns, row_groups, pixel_stages, stages))
                break
    return tuple(found)


def shared_bytes(made: Product, layout: Blocks) -> int:
    """The size of the struct Shared, which the source asserts."""
    span = layout.tile + made.halo
    pixels = layout.pixel_stages * span * (4 * layout.depth + 4)
    weights = layout.weight_stages * layout.rows * 4 * layout.depth
    barriers = 16 * (layout.pixel_stages + layout.weight_stages)
    total = pixels + weights + _RESULT_BYTES + barriers
    return divide_up(total, _RECORD_BYTES) * _RECORD_BYTES


def _length(made: Product, layout: Blocks, batch: int) -> tuple[int, int]:
    """Tiles, and positions of a plane."""
    tiles = divide_up(batch * made.positions, layout.tile)
    return tiles, tiles * layout.tile + made.halo


def estimate(made: Product, layout: Blocks, batch: int) -> tuple[float, int]:
    """About how many cycles the product takes, and in how many parts of the channels."""
    tiles, _ = _length(made, layout, batch)
    slabs = divide_up(made.depth, layout.depth)
    row_tiles = divide_up(made.rows, layout.rows) * made.sets
    items = tiles * row_tiles * made.jobs
    # Of an instruction of 64 rows: products, or what it reads of shared memory.
    instruction = max(layout.columns / 2, 16 + layout.columns / 4)
    tap = _both_busy(layout.depth / _STEP * 3 * instruction)
    pixels = (layout.tile + made.halo) * (4 * layout.depth + 4)
    of_weights = layout.rows * layout.depth * 4
    most = max(1, min(made.phases * slabs, 64))
    best: tuple[float, int] | None = None
    for splits in sorted({divide_up(most, parts) for parts in range(1, most + 1)}):
        taps = made.taps / made.jobs * slabs / splits
        loads = divide_up(made.phases * slabs, splits)
        moved = (loads * pixels + taps * of_weights) / _CACHE_RATE
        blocks = divide_up(items * splits, PROCESSORS)
        cycles = _LAUNCH_CYCLES + blocks * (max(taps * tap, moved) + _TILE_CYCLES)
        if splits > 1:
            sums = items * layout.rows * layout.tile * 4 * splits * 2
            cycles += _LAUNCH_CYCLES + sums / PROCESSORS / _MEMORY_RATE
        if best is None or cycles < best[0]:
            best = cycles, splits
    assert best is not None
    return best


def _both_busy(cycles: float) -> float:
    """What two groups of warps take for so many cycles of the tensor cores each: one waits for its
    sums while the other multiplies."""
    return max(2 * cycles, cycles + _PROMOTION_CYCLES)


def cycles(problem: ConvProblem, backward: bool) -> float:
    """About how many cycles all launches take."""
    made = product(problem, backward)
    layout = Gemm(backward).layouts(problem, (9, 0))[0]
    multiplied, splits = estimate(made, layout, problem.batch)
    arrays = 4 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
    workspace = _workspace_bytes(made, layout, problem.batch, splits)
    return multiplied + (arrays + 2 * workspace) / PROCESSORS / _MEMORY_RATE + _LAUNCH_CYCLES


def _workspace_bytes(made: Product, layout: Blocks, batch: int, splits: int) -> int:
    """As `Workspace` of the source has it."""
    tiles, length = _length(made, layout, batch)
    slabs = divide_up(made.depth, layout.depth)
    rows = made.sets * divide_up(made.rows, layout.rows) * layout.rows
    planes = made.sets * made.phases * slabs
    weights = made.taps * slabs * rows * layout.depth * 4 + rows * 4
    pixels = planes * length * (4 * layout.depth + 4)
    sums = splits * made.jobs * rows * tiles * layout.tile * 4 if splits > 1 else 0
    return weights + pixels + sums


def _defines(problem: ConvProblem, made: Product, accumulate: bool, bias: bool) -> Defines:
    sizes = {
        "IN": (problem.channels, problem.height, problem.width),
        "OUT": (problem.filters, problem.out_height, problem.out_width),
    }
    if made.backward:
        sizes = {"IN": sizes["OUT"], "OUT": sizes["IN"]}
    layer = [
        (f"{name}_{axis}", value)
        for name, values in sizes.items()
        for axis, value in zip(("CHANNELS", "H", "W"), values)
    ]
    pairs = [
        (f"{name.upper()}_{axis}", value)
        for name in ("kernel", "stride", "pad", "dilate")
        for axis, value in zip("HW", getattr(problem, name))
    ]
    grid = [
        (f"{name.upper()}_{letter}", getattr(axis, name))
        for letter, axis in zip("HW", made.axes)
        for name in ("grid", "in_first", "in_step", "out_first", "out_step", "valid", "last")
    ]
    return (
        *(*layer, *pairs, ("GROUPS", problem.groups), *grid),
        *(("SETS", made.sets), ("FOLD", int(made.folded))),
        ("FOLD_TAPS", int(made.folded_taps)),
        *((("BIAS", 1),) if bias else ()),
        *((("ACCUMULATE", 1),) if accumulate else ()),
    )


@dataclass(frozen=True)
class WeightBlocks(Layout):
    """How blocks of the gradient for w work: channels of four warps, taps of a row at once, whether
    the two groups of four warps have filters of their own (2) or take turns (1), stages in shared
    memory, their positions, and threads that lay out a strip of 8 channels of an image."""

    columns: int
    taps: int
    row_groups: int
    stages: int
    chunk: int
    plane_threads: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return _ROWS * self.row_groups


@dataclass(frozen=True)
class GemmWeight(Family):
    """The gradient for w: the forward product's grid, summed over its positions."""

    def why_not(self, problem: ConvProblem) -> str | None:
        refused = _refused(problem)
        if refused is not None:
            return refused
        if not _weight_layouts(product(problem, False)):
            return f"a tile of one row of taps does not fit into {_SHARED_BYTES} bytes"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[WeightBlocks]:
        made, batch = product(problem, False), _nominal(problem.batch)
        return sorted(_weight_layouts(made), key=lambda each: weight_estimate(made, each, batch)[0])

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return _is_dense(problem, product(problem, False))

    def plan(
        self, kernel: Code, problem: ConvProblem, layout: WeightBlocks, accumulate: bool
    ) -> Plan:
        made = product(problem, False)
        splits = weight_estimate(made, layout, problem.batch)[1]
        parts = splits * 2 // layout.row_groups
        units = sum(_weight_units(made, layout))
        items = math.prod(_weight_tiles(made, layout)) * splits
        strips = _strips(made, layout)
        planes = ("find_largest", "lay_out_planes") if strips > 1 else ("lay_out_planes",)
        launches = (
            *(
                Launch(
                    function,
                    (problem.batch * units * strips, 1, 1),
                    (layout.plane_threads, 1, 1),
                    ("workspace", "x", "dy", problem.batch),
                )
                for function in planes
            ),
            Launch(
                "multiply_positions",
                (items, 1, 1),
                (_THREADS, 1, 1),
                ("workspace", problem.batch, splits),
                _weight_shared_bytes(made, layout),
                1,
            ),
            Launch(
                "add_up",
                (problem.filters * divide_up(problem.w_shape[1], _added(problem)), 1, 1),
                (256, 1, 1),
                ("dw", "x", "dy", "workspace", problem.batch, parts),
            ),
        )
        macros = (
            *(*_defines(problem, made, accumulate, bias=False), *layout.defines),
            ("SHARED_BYTES", _weight_shared_bytes(made, layout)),
        )
        nbytes = _weight_workspace_bytes(made, layout, problem.batch, parts)
        return Plan(kernel, macros, launches, workspace_bytes=nbytes)


def _added(problem: ConvProblem) -> int:
    """Channels of a block of `add_up`, whose sums are in shared memory."""
    return 64 if math.prod(problem.kernel) <= 128 else 8


def _row_taps(made: Product) -> int:
    """The most taps in a row of one pair."""
    return max(len({column for _, column in taps}) for _, taps in made.pairs)


def _tap_span(made: Product, taps: int) -> int:
    """How far apart the first and the last of `taps` taps of a row are, at most."""
    rows = (sorted({column for _, column in each}) for _, each in made.pairs)
    return max(row[i] - row[i // taps * taps] for row in rows for i in range(len(row)))


def _image_positions(made: Product) -> int:
    """An image's positions, in whole steps."""
    return divide_up(made.positions, _STEP) * _STEP


@functools.lru_cache(maxsize=1024)
def _weight_layouts(made: Product) -> tuple[WeightBlocks, ...]:
    positions = _image_positions(made)
    threads = max(64, min(512, divide_up(positions, 32) * 32))
    found = []
    for columns, taps, row_groups in itertools.product(
        (16, 32, 64, 128), range(1, _MOST_ROW_TAPS + 1), (1, 2)
    ):
        # More than are there; or of registers.
        wide = columns > max(_STEP, divide_up(made.depth, _STEP) * _STEP) or columns * taps > 192
        if wide or taps > _row_taps(made) or (row_groups == 2 and made.rows <= _ROWS):
            continue
        chunk = min(
            (48, 64) if columns * taps > 96 else (48, 64, 80, 96),
            key=lambda size: (divide_up(positions, size) * size, -size),
        )
        one = WeightBlocks(columns, taps, row_groups, 1, chunk, threads)
        stages = min(_MOST_STAGES, _SHARED_BYTES // _weight_shared_bytes(made, one))
        if stages >= 2:
            found.append(dataclasses.replace(one, stages=stages))
    return tuple(found)


def _strips(made: Product, layout: WeightBlocks) -> int:
    """Strips of an image's planes that are laid out one by one."""
    turns = min(_MOST_TURNS, divide_up(_image_positions(made), layout.plane_threads))
    return divide_up(_image_positions(made), layout.plane_threads * turns)


def _weight_shared_bytes(made: Product, layout: WeightBlocks) -> int:
    """The size of the struct Shared of gemm_backward_weight.cu."""
    span = layout.chunk + _tap_span(made, layout.taps)
    stage = 4 * (layout.rows * layout.chunk + layout.columns * span) + 16
    return divide_up(layout.stages * stage, _RECORD_BYTES) * _RECORD_BYTES


def _weight_tiles(made: Product, layout: WeightBlocks) -> tuple[int, int, int, int]:
    """Tiles of rows and of columns, groups of taps, sets."""
    groups = 0
    for _, taps in made.pairs:
        rows, columns = ({tap[axis] for tap in taps} for axis in range(2))
        groups += len(rows) * divide_up(len(columns), layout.taps)
    tiles = divide_up(made.rows, layout.rows), divide_up(made.depth, layout.columns)
    return (*tiles, groups, made.sets)


def _weight_units(made: Product, layout: WeightBlocks) -> tuple[int, int]:
    """Units of 8 channels of dy, and of x in all phases."""
    row_tiles, column_tiles, _, sets = _weight_tiles(made, layout)
    rows, columns = row_tiles * layout.rows // 8, column_tiles * layout.columns // 8
    return sets * rows, sets * len(made.pairs) * columns


def _weight_part_bytes(made: Product, layout: WeightBlocks) -> int:
    """The sums of a part of the positions."""
    row_tiles, column_tiles, _, sets = _weight_tiles(made, layout)
    return 4 * sets * row_tiles * layout.rows * made.taps * column_tiles * layout.columns


def _weight_workspace_bytes(made: Product, layout: WeightBlocks, batch: int, parts: int) -> int:
    """As `Workspace` of the source has it."""
    rows, columns = _weight_units(made, layout)
    dy_length = batch * _image_positions(made) + layout.chunk
    last = max(row for _, taps in made.pairs for row, _ in taps) * made.axes[1].grid
    last += max(column for _, taps in made.pairs for _, column in taps)
    x_length = dy_length + last + _tap_span(made, layout.taps)
    records = 2 * _RECORD_BYTES * (rows * dy_length + columns * x_length)
    factors = 4 * 8 * batch * (rows + columns) * (1 + _strips(made, layout))
    return records + factors + parts * _weight_part_bytes(made, layout)


def weight_estimate(made: Product, layout: WeightBlocks, batch: int) -> tuple[float, int]:
    """About how many cycles the product takes, and in how many parts of the positions."""
    items = math.prod(_weight_tiles(made, layout))
    chunks = batch * divide_up(_image_positions(made), layout.chunk)
    steps = layout.chunk / _STEP
    # Filters are in registers; of an instruction products, or what it reads of shared memory.
    instruction = max(layout.columns / 2, 8 + layout.columns / 4)
    taps = sum(len(each) for _, each in made.pairs) / _weight_tiles(made, layout)[2]
    multiplied = taps * _both_busy(3 * steps * instruction) + 32 * steps
    multiplied *= layout.row_groups / 2
    moved = 4 * layout.chunk * (layout.rows + layout.columns) / _CACHE_RATE
    of_part = _weight_part_bytes(made, layout) * 2 / layout.row_groups
    best: tuple[float, int] | None = None
    most = max(1, min(chunks // 4, _WEIGHT_SUM_BYTES // int(of_part)))
    for splits in sorted({divide_up(most, parts) for parts in range(1, most + 1)}):
        blocks = divide_up(items * splits, PROCESSORS)
        cycles = blocks * (divide_up(chunks, splits) * max(multiplied, moved) + _TILE_CYCLES)
        cycles += 2 * splits * of_part / PROCESSORS / _MEMORY_RATE
        if best is None or cycles < best[0]:
            best = cycles, splits
    assert best is not None
    return best


KERNELS = (
    entry(
        "gemm",
        "groups of several channels: a matrix product on tensor cores, at float32 accuracy",
        Gemm(backward=False),
        rank=8,
        architectures=("90a",),
    ),
    entry(
        "gemm_backward_data",
        "the gradient for x of these",
        Gemm(backward=True),
        rank=11,
        architectures=("90a",),
        direction="backward_data",
    ),
    entry(
        "gemm_backward_weight",
        "the gradient for w of these",
        GemmWeight(),
        rank=11,
        architectures=("90a",),
        direction="backward_weight",
    ),
)
