"""Kernels for depthwise convolutions and groups of few channels, limited by memory bandwidth.
kernels/cuda/depthwise/depthwise.cuh and depthwise_fwd.cuh explain the algorithm."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Capability, Code, Defines, Family, Launch, Layout, Plan, divide_up, entry
from . import gemm_grid, implicit_gemm_fused, layer_macros

_MOST_TAPS = 15  # per axis
_KEPT_TAPS = 49  # whose weights a thread keeps in registers
_MOST_REACH = 64  # rows that a window spans
_MOST_STRIDE = 4  # for gradients: a thread has a column for each phase of the stride
_MOST_ROWS = 8
# Limits if groups have several planes: planes that a group writes, planes of a group that a block
# reads at a time, and values that a thread keeps in registers.
_MOST_OUT, _MOST_HELD, _FEW_OUT = 8, 8, 4
_MOST_KEPT = 112
# Preferred values: sums per thread, and threads per block and per multiprocessor.
_GOOD_KEPT, _GOOD_THREADS, _BUSY_THREADS = 32, 128, 512
_THREADS, _MOST_THREADS = 256, 512
# A block takes several small planes, until it has about this number of threads.
_PLANES_THREADS = 128
# Output heights computed without shared memory, as are all strided kernels. In 15 layers on an H200
# that took, in the median, 0.91 of the time at batch 32 (0.85 to 0.99), 0.95 at 256 (0.90 to 1.03)
# and 0.96 at 1 (0.84 to 1.11); for other heights 1.12, 1.10 and 1.02.
_DIRECT_HEIGHTS = range(8, 29)
_MOST_ITEMS = 2**32 - 1
# Maximum number of 16-byte vectors that a thread copies.
_VECTORS = 8
# Typical number of multiprocessors, and blocks of the gradient for w.
_PROCESSORS, _WEIGHT_BLOCKS = 132, 8 * 132
# Of a launch: microseconds, and per microsecond steps of shared memory and bytes of global memory.
_LAUNCH, _STEPS, _BYTES = 4.0, 32 * 132 * 1755 * 0.7, 2.2e6


@dataclass(frozen=True)
class Bands(Layout):
    """Rows per thread; a block has `strips` times as many rows of one group, or all rows of
    `planes` groups. With 0 planes the kernel reads without shared memory: `strips` is then per
    plane, and a block's threads may belong to several planes."""

    rows: int
    strips: int
    planes: int
    threads: int


@dataclass(frozen=True)
class _Shape:
    """Geometry of a kernel: planes of a group, heights and widths of inputs and outputs, columns
    per thread."""

    of_group: tuple[int, int]
    ins: tuple[int, int]
    outs: tuple[int, int]
    columns: int
    # Rows per thread are a multiple of this.
    step: int

    @property
    def units(self) -> int:
        """Threads along a row."""
        return divide_up(self.outs[1], self.columns)


@dataclass(frozen=True)
class _Planes(Family):
    """Kernels whose threads compute columns of row bands, which blocks copy to shared memory. With
    `few`, groups have few output planes, else one channel and one filter."""

    few: bool = False
    # The planes of which a group has few; and whether a block may read the others in several steps.
    _few_of = ""
    _in_steps = True
    # Whether threads can read without shared memory.
    _direct = True
    _direction = "forward"

    @abstractmethod
    def _shape(self, problem: ConvProblem) -> _Shape:
        """Return the geometry of inputs and outputs."""

    @abstractmethod
    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        """Return the maximum number of input rows for this number of adjacent output rows."""

    @abstractmethod
    def _collects(self, shape: _Shape) -> bool:
        """Return whether a block also collects its outputs in shared memory."""

    @abstractmethod
    def _kept(self, problem: ConvProblem, rows: int) -> int:
        """Return the values that a thread keeps in registers: its sums for `rows` rows, and common
        values."""

    def _most_planes(self, of_group: tuple[int, int]) -> int:
        """Return the number of planes of a group that is limited."""
        return of_group[1]

    def _threads_of(self, shape: _Shape, items: int) -> int:
        """Return the threads for this number of items; an item is a column of a thread's rows."""
        return items

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        of_group = self._shape(problem).of_group
        if self.few == (of_group == (1, 1)) or self._most_planes(of_group) > _MOST_OUT:
            which = (
                f"of up to {_MOST_OUT} {self._few_of}"
                if self.few
                else "of one channel and one filter"
            )
            return (
                f"it computes groups {which} only, not "
                f"{problem.channels} channels and {problem.filters} filters in {problem.groups}"
            )
        kernel, reach = problem.kernel, _reach(problem)
        if max(kernel) > _MOST_TAPS or reach > _MOST_REACH:
            return (
                f"it computes kernels of at most {_MOST_TAPS}x{_MOST_TAPS} over {_MOST_REACH} "
                f"rows, not {kernel[0]}x{kernel[1]} over {reach}"
            )
        if self._shape(problem).step > _MOST_STRIDE or self._shape(problem).columns > _MOST_STRIDE:
            return f"it undoes strides of at most {_MOST_STRIDE}, not {problem.stride}"
        if next(self._layouts(problem), None) is None:
            return "a thread's rows do not fit into 48 KiB of shared memory and its registers"
        return None

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        return not self.few or (problem.groups > 1 and max(_of_group(problem)) <= _MOST_HELD)

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Bands]:
        return list(dict.fromkeys(self._layouts(problem)))

    def _layouts(self, problem: ConvProblem) -> Iterator[Bands]:
        ways = [self._without_shared_memory(problem), self._with_shared_memory(problem)]
        if problem.stride == (1, 1) and self._shape(problem).outs[0] not in _DIRECT_HEIGHTS:
            ways.reverse()
        return itertools.chain(*ways)

    def _without_shared_memory(self, problem: ConvProblem) -> Iterator[Bands]:
        shape = self._shape(problem)
        height = shape.outs[0]
        taps = math.prod(problem.kernel)
        if self.few or not self._direct or max(shape.columns, shape.step) > 1 or taps > _KEPT_TAPS:
            return
        counts = _row_counts(height, 1, lambda rows: divide_up(height, rows) * rows)
        # If windows hardly overlap, small strips read little twice.
        if _reach(problem) <= problem.stride[0] + 1:
            counts = sorted(counts, key=lambda rows: rows != 2)
        for rows in counts:
            layout = Bands(rows, divide_up(height, rows), 0, _THREADS // 2)
            # Thread indices are 32-bit integers.
            are_few = _blocks(problem, shape, layout) * layout.threads <= _MOST_ITEMS
            if are_few and self._kept(problem, rows) <= _MOST_KEPT:
                yield layout

    def _with_shared_memory(self, problem: ConvProblem) -> Iterator[Bands]:
        shape = self._shape(problem)
        height = shape.outs[0]

        def strips_of(rows: int, threads: int) -> int:
            """Return the strips per band, with bands as even as possible."""
            strips = divide_up(height, rows)
            at_once = max(1, threads // self._threads_of(shape, shape.units))
            return divide_up(strips, divide_up(strips, at_once))

        def computed(rows: int) -> int:
            of_band = rows * strips_of(rows, _THREADS)
            return divide_up(height, of_band) * of_band

        for rows in _row_counts(height, shape.step, computed):
            strips = divide_up(height, rows)
            of_group = self._threads_of(shape, strips * shape.units)
            if 2 * of_group <= _PLANES_THREADS:
                planes = min(problem.groups, _PLANES_THREADS // of_group)
                yield from self._fitting(problem, Bands(rows, strips, planes, 0))
                yield from self._fitting(problem, Bands(rows, strips, max(1, planes // 2), 0))
            for threads in (_THREADS, _THREADS // 2):
                yield from self._fitting(problem, Bands(rows, strips_of(rows, threads), 1, 0))
            yield from self._fitting(problem, Bands(rows, 1, 1, 0))

    def _fitting(self, problem: ConvProblem, layout: Bands) -> Iterator[Bands]:
        """Yield the layout with its thread count if its shared memory suffices."""
        if self._kept(problem, layout.rows) <= _MOST_KEPT:
            for _, threads in self._fits(problem, layout):
                yield dataclasses.replace(layout, threads=threads)
                return

    def _held(self, problem: ConvProblem, layout: Bands) -> int:
        """Return the planes of a group that a block reads at a time."""
        if layout.planes == 0:
            return 1
        return next(self._fits(problem, layout))[0]

    def _fits(self, problem: ConvProblem, layout: Bands) -> Iterator[tuple[int, int]]:
        """Yield the possible numbers of planes read at a time, each with its thread count, which is
        the layout's if it has one."""
        shape = self._shape(problem)
        group_in = shape.of_group[0]
        for held in range(min(group_in, _MOST_HELD), 0, -1):
            # Partial sums stay in registers between the steps.
            in_steps = self._in_steps and layout.planes == 1 and group_in % held == 0
            if held < group_in and not in_steps:
                continue
            pixels, rest = self._floats(problem, layout, held)
            copying = divide_up(pixels, 4 * _VECTORS)
            threads = layout.threads or self._thread_count(shape, layout, copying)
            others = self._other_floats(problem, layout, held, threads)
            nbytes = 4 * (pixels + rest + others)
            at_once = held == group_in or layout.strips * shape.units <= threads
            if nbytes <= gpu_limits.STATIC_SHARED_BYTES and threads <= _MOST_THREADS and at_once:
                yield held, threads

    def _floats(self, problem: ConvProblem, layout: Bands, held: int) -> tuple[int, int]:
        """Return the floats of pixels that a block reads at a time, and those of their border and
        of the outputs if they are collected in shared memory."""
        shape = self._shape(problem)
        height, width = shape.ins
        out_rows = min(layout.strips * layout.rows, shape.outs[0])
        whole = out_rows == shape.outs[0]
        in_rows = height if whole else min(height, self._in_rows(problem, out_rows))
        # Maximum overhang of windows at the ends of a row.
        margin = problem.pad[1] + (problem.kernel[1] - 1) * problem.dilate[1] + shape.columns
        around = (1 if whole else held) * (width + 3 * margin + 16)
        outputs = shape.of_group[1] * (layout.planes * out_rows * shape.outs[1] + 4)
        return layout.planes * held * in_rows * width, (
            around + outputs if self._collects(shape) else around
        )

    def _thread_count(self, shape: _Shape, layout: Bands, copying: int) -> int:
        """Return the threads per block, in whole warps, with at least enough threads for
        `copying`."""
        items = layout.planes * layout.strips * shape.units
        return _warps(max(items if layout.planes > 1 else min(items, _THREADS), copying))

    @abstractmethod
    def _other_floats(self, problem: ConvProblem, layout: Bands, held: int, threads: int) -> int:
        """Return the floats of shared memory other than pixels, with `held` planes of a group."""

    def _defines(
        self, problem: ConvProblem, layout: Bands, accumulate: bool, bias: bool = False
    ) -> Defines:
        of_group = (
            *zip(("GROUP_IN", "GROUP_OUT"), self._shape(problem).of_group),
            ("HELD", self._held(problem, layout)),
        )
        return (
            *layer_macros.sizes(problem, "groups", "height", "width"),
            *layer_macros.window(problem),
            *(of_group if self.few else ()),
            *layer_macros.output(bias, accumulate),
            *layout.defines,
        )


class _Gather(_Planes):
    """Kernels in which a thread sums the inputs of its outputs."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Bands]:
        layouts = super().layouts(problem, capability)
        if not self.few:
            return layouts
        every = {*layouts, *(each for layout in layouts for each in self._shared(problem, layout))}
        return sorted(every, key=partial(self._cost, problem))

    def _shared(self, problem: ConvProblem, layout: Bands) -> Iterator[Bands]:
        """Yield the layout with more threads, which divide the planes of each output."""
        items = layout.strips * self._shape(problem).units
        for shares in (2, 4, 8) if layout.planes == 1 and self._in_steps else ():
            wider = dataclasses.replace(layout, threads=_warps(shares * items))
            if next(self._fits(problem, wider), (0,))[0] >= shares:
                yield wider

    def _cost(self, problem: ConvProblem, layout: Bands) -> float:
        """Estimate the time of an output of one plane, in steps of shared memory and arithmetic. On
        an H200 the best estimate was within 20% of the fastest layout for 16 problems."""
        problem = dataclasses.replace(problem, batch=gemm_grid.nominal(problem.batch))
        shape, taps = self._shape(problem), math.prod(problem.kernel)
        outs, rows = shape.of_group[1], layout.rows
        columns, step = shape.columns, shape.step
        strided = problem.stride if step == columns == 1 else (1, 1)
        # A stride of 2 causes two-way bank conflicts.
        reads = ((rows // step - 1) * strided[0] + problem.kernel[0]) * (1 + (strided[1] > 1))
        reads *= problem.kernel[1] + columns - 1
        products = rows / step * taps * outs / 4
        items = layout.planes * layout.strips * shape.units
        shares = 1
        if self._in_steps and layout.planes == 1:
            shares = min(self._held(problem, layout), max(1, layout.threads // items))
        threads = layout.threads / shares
        computed = divide_up(shape.outs[0], rows * layout.strips) * rows * layout.strips
        vectors = _weights(outs, problem) // 4 * (rows // step if taps > _KEPT_TAPS else 1)
        cost = (reads + vectors + products) / (rows * columns)
        # Each share's sums are written and read once.
        cost += 2 * outs * (shares - 1) / shape.of_group[0]
        cost *= computed / shape.outs[0] * math.ceil(items / threads) * threads / items
        cost *= 1 + 0.2 * abs(math.log2(threads / _GOOD_THREADS))
        if self._in_steps:
            blocks = _blocks(problem, shape, layout)
            turns = divide_up(blocks, _PROCESSORS)
            cost *= turns * _PROCESSORS / blocks * max(1, _BUSY_THREADS / turns / layout.threads)
        return cost * max(1, rows * columns * outs / _GOOD_KEPT)

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        if super().pays(problem, capability):
            return True
        # A matrix product's tile of few planes is almost empty. Forward, images have other kernels.
        (ins, outs), direction = self._shape(problem).of_group, self._direction
        if math.prod(problem.kernel) == 1 or (direction == "forward" and ins <= _MOST_HELD):
            return False
        if direction != "forward" and capability[0] != 9:
            return True
        other = implicit_gemm_fused.Gemm(direction)
        least = other.other_microseconds(problem)
        if other.why_not(problem) is None:
            least = min(least, implicit_gemm_fused.microseconds(problem, direction))
        return self._microseconds(problem, capability) * max(1, outs / _FEW_OUT) < least

    def _microseconds(self, problem: ConvProblem, capability: Capability) -> float:
        """Estimate the time of the launch."""
        shape = self._shape(problem)
        cost = self._cost(problem, self.layouts(problem, capability)[0])
        steps = cost * problem.batch * problem.groups * shape.of_group[0] * math.prod(shape.outs)
        nbytes = 4 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
        return _LAUNCH + max(steps / _STEPS, nbytes / _BYTES)

    def _other_floats(self, problem: ConvProblem, layout: Bands, held: int, threads: int) -> int:
        shape, taps = self._shape(problem), math.prod(problem.kernel)
        if not self.few and taps <= _KEPT_TAPS:
            return 0
        outs, items = shape.of_group[1], layout.strips * shape.units
        is_shared = layout.planes == 1 and held > 1 and threads >= 2 * items
        sums = outs * layout.rows * shape.columns * items if is_shared else 0
        return layout.planes * held * _weights(outs, problem) + sums


class Forward(_Gather):
    """Kernels for y, from x."""

    stores = True
    _few_of = "filters"

    def _shape(self, problem: ConvProblem) -> _Shape:
        outs = problem.out_height, problem.out_width
        return _Shape(_of_group(problem), (problem.height, problem.width), outs, 1, 1)

    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        return (rows - 1) * problem.stride[0] + _reach(problem)

    def _collects(self, shape: _Shape) -> bool:
        return shape.outs[1] < 32

    def _kept(self, problem: ConvProblem, rows: int) -> int:
        return rows * _of_group(problem)[1]

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        blocks, arguments = _blocks(problem, self._shape(problem), layout), ("y", "x", "w", "bias")
        launch = Launch.line("convolve", blocks, layout.threads, (*arguments, problem.batch))
        macros = self._defines(problem, layout, accumulate, problem.bias)
        return Plan(kernel, macros, (launch,))


class BackwardData(_Gather):
    """Kernels for dx, from dy; a thread computes pixels of all stride phases."""

    _direction = "backward_data"
    _few_of = "channels"

    def _shape(self, problem: ConvProblem) -> _Shape:
        ins = problem.out_height, problem.out_width
        rows, columns = problem.stride
        of_group = _of_group(problem)[::-1]
        return _Shape(of_group, ins, (problem.height, problem.width), columns, rows)

    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        return (rows + _reach(problem) - 2) // problem.stride[0] + 1

    def _collects(self, shape: _Shape) -> bool:
        return shape.columns > 1 or shape.outs[1] < 32

    def _kept(self, problem: ConvProblem, rows: int) -> int:
        return rows * problem.stride[1] * _of_group(problem)[0]

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        blocks, arguments = _blocks(problem, self._shape(problem), layout), ("dx", "w", "dy")
        launch = Launch.line("backward_data", blocks, layout.threads, (*arguments, problem.batch))
        return Plan(kernel, self._defines(problem, layout, accumulate), (launch,))


class BackwardWeight(Forward):
    """Kernels for dw, from windows of x and dy; the images are split into slices whose sums are
    then added up."""

    stores = False
    _few_of = "channels and filters"
    _in_steps = False
    _direct = False

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        # Hopper's tensor cores are faster for larger groups, unless a stride increases what they
        # read.
        is_small = max(_of_group(problem)) <= 4 or problem.stride != (1, 1) or capability[0] != 9
        return _Planes.pays(self, problem, capability) and is_small

    def _most_planes(self, of_group: tuple[int, int]) -> int:
        return max(of_group)

    def _collects(self, shape: _Shape) -> bool:
        return True

    def _kept(self, problem: ConvProblem, rows: int) -> int:
        return _of_group(problem)[1] * (math.prod(problem.kernel) + rows)

    def _threads_of(self, shape: _Shape, items: int) -> int:
        return items * shape.of_group[0]

    def _thread_count(self, shape: _Shape, layout: Bands, copying: int) -> int:
        channels, items = shape.of_group[0], layout.strips * shape.units
        if channels == 1:
            return super()._thread_count(shape, layout, copying)
        if layout.planes > 1:
            return _warps(max(layout.planes * items * channels, copying))
        # Each channel has whole warps.
        items = min(items, _MOST_THREADS // channels)
        return channels * _warps(max(items, divide_up(copying, channels)))

    def _other_floats(self, problem: ConvProblem, layout: Bands, held: int, threads: int) -> int:
        sums = math.prod(problem.kernel) * _of_group(problem)[1]
        return max(problem.kernel[1] * threads, sums * threads // 32)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        weights = math.prod(problem.w_shape)
        groups = divide_up(problem.groups, layout.planes)
        units = problem.batch * divide_up(problem.out_height, layout.strips * layout.rows)
        each = divide_up(units, max(1, divide_up(_WEIGHT_BLOCKS, groups)))
        slices = divide_up(units, each)
        parts = "workspace" if slices > 1 else "dw"
        arguments = ("dw", parts, "x", "dy", problem.batch, slices)
        launch = Launch.line("backward_weight", groups * slices, layout.threads, (*arguments, each))
        add = Launch.line("reduce", divide_up(weights, 128), 128, arguments)
        return Plan(
            kernel,
            self._defines(problem, layout, accumulate),
            (launch, add) if slices > 1 else (launch,),
            workspace_bytes=4 * slices * weights if slices > 1 else 0,
        )


def _of_group(problem: ConvProblem) -> tuple[int, int]:
    """Return the channels and filters per group."""
    return problem.channels // problem.groups, problem.filters // problem.groups


def _weights(outs: int, problem: ConvProblem) -> int:
    """Return the floats of a plane's weights in shared memory: each row of taps, or each tap, takes
    whole vectors of four."""
    rows, columns = problem.kernel
    aligned = (outs, divide_up(columns, 4) * 4) if outs <= 2 else (divide_up(outs, 4) * 4, columns)
    return rows * math.prod(aligned)


def _reach(problem: ConvProblem) -> int:
    """Return the rows that a window spans."""
    return (problem.kernel[0] - 1) * problem.dilate[0] + 1


def _row_counts(height: int, step: int, computed: Callable[[int], int]) -> list[int]:
    """Return candidate rows per thread, multiples of `step`: first those with the fewest `computed`
    rows and, among these, the largest."""
    most = max(step, min(_MOST_ROWS, divide_up(height, step) * step))
    counts = range(step, most + 1, step)
    few = [rows for rows in counts if rows >= min(4, most)] or [most]
    ordered = sorted(few, key=lambda rows: (computed(rows), -rows))
    return [*ordered, *sorted(set(counts) - set(few), reverse=True)]


def _warps(threads: int) -> int:
    """Round up to whole warps."""
    return divide_up(threads, 32) * 32


def _blocks(problem: ConvProblem, shape: _Shape, layout: Bands) -> int:
    groups = problem.batch * problem.groups
    if layout.planes == 0:
        return divide_up(groups * layout.strips * shape.units, layout.threads)
    return divide_up(groups, layout.planes) * divide_up(shape.outs[0], layout.strips * layout.rows)


_entry = partial(entry, rank=0, source="depthwise/{}.cu")
KERNELS = (
    _entry(
        "depthwise",
        "groups of one channel: planes in shared memory, columns in registers",
        Forward(),
    ),
    _entry("depthwise_backward_data", "the gradient for x of these", BackwardData()),
    _entry("depthwise_backward_weight", "the gradient for w of these", BackwardWeight()),
    _entry(
        "grouped",
        "groups of few filters: as depthwise, with all filters of a group in a thread",
        Forward(few=True),
    ),
    _entry(
        "grouped_backward_data",
        "the gradient for x of groups of few channels, images among them",
        BackwardData(few=True),
    ),
    _entry(
        "grouped_backward_weight",
        "the gradient for w of groups of few channels and filters",
        BackwardWeight(few=True),
    ),
)
