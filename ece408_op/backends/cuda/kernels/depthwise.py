"""The depthwise kernels: groups of one channel and one filter, at the memory's speed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import ConvProblem
from .. import limits
from ..plan import Capability, Code, Defines, Family, Launch, Layout, Plan, divide_up, entry

_MOST_TAPS = 7  # of an axis
_MOST_REACH = 64  # rows from a window's first to its last
_MOST_STRIDE = 4  # that is undone: a thread has a column for each remainder
_MOST_ROWS = 8
_THREADS, _MOST_THREADS = 256, 512
# Of small planes a block takes several, until it has about as many threads.
_PLANES_THREADS = 128
# Vectors of 16 bytes that a thread copies at most.
_VECTORS = 8
# Blocks that the gradient for w is cut into, for 132 processors.
_WEIGHT_BLOCKS = 8 * 132


@dataclass(frozen=True)
class Bands(Layout):
    """Rows of a thread, of which a block has `strips` times as many in one plane, or `planes` whole
    planes, and its threads."""

    rows: int
    strips: int
    planes: int
    threads: int


@dataclass(frozen=True)
class _Shape:
    """What a kernel reads and writes: heights, widths, and columns of a thread."""

    ins: tuple[int, int]
    outs: tuple[int, int]
    columns: int
    # A thread's rows are a multiple of this.
    step: int

    @property
    def units(self) -> int:
        """Threads along a row."""
        return divide_up(self.outs[1], self.columns)


class _Depthwise(Family):
    """Threads take columns of bands of rows that blocks copy into shared memory."""

    @abstractmethod
    def _shape(self, problem: ConvProblem) -> _Shape:
        """Of what the threads read and write."""

    @abstractmethod
    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        """Rows that so many neighbouring rows of outputs read, at most."""

    @abstractmethod
    def _collects(self, shape: _Shape) -> bool:
        """Whether a block has its outputs in shared memory, too."""

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        if not problem.groups == problem.channels == problem.filters:
            return (
                "it computes groups of one channel and one filter only, not "
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
            return "a thread's rows do not fit into 48 KiB of shared memory"
        return None

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Bands]:
        return list(dict.fromkeys(self._layouts(problem)))

    def _layouts(self, problem: ConvProblem) -> Iterator[Bands]:
        shape = self._shape(problem)
        height = shape.outs[0]
        for rows in _row_counts(height, shape.step):
            strips = divide_up(height, rows)
            items = strips * shape.units
            if 2 * items <= _PLANES_THREADS:
                planes = min(problem.channels, _PLANES_THREADS // items)
                yield from self._fitting(problem, Bands(rows, strips, planes, 0))
                yield from self._fitting(problem, Bands(rows, strips, max(1, planes // 2), 0))
            for threads in (_THREADS, _THREADS // 2):
                # As even bands as there can be.
                bands = divide_up(strips, max(1, threads // shape.units))
                yield from self._fitting(problem, Bands(rows, divide_up(strips, bands), 1, 0))
            yield from self._fitting(problem, Bands(rows, 1, 1, 0))

    def _fitting(self, problem: ConvProblem, layout: Bands) -> Iterator[Bands]:
        """The layout with its threads, if there is shared memory for it."""
        shape = self._shape(problem)
        height, width = shape.ins
        out_rows = layout.strips * layout.rows
        whole = out_rows >= shape.outs[0]
        in_rows = height if whole else min(height, self._in_rows(problem, out_rows))
        in_floats = layout.planes * in_rows * width
        out_floats = layout.planes * min(out_rows, shape.outs[0]) * shape.outs[1]
        items = layout.planes * layout.strips * shape.units
        copied = divide_up(in_floats, 4 * _VECTORS)
        threads = max(items if layout.planes > 1 else min(items, _THREADS), copied)
        threads = divide_up(threads, 32) * 32
        # At most what windows reach over the ends of a row.
        margin = problem.pad[1] + (problem.kernel[1] - 1) * problem.dilate[1] + shape.columns
        floats = in_floats + width + 3 * margin + 16
        floats += out_floats if self._collects(shape) else 0
        nbytes = 4 * (floats + self._other_floats(problem, threads))
        if nbytes <= limits.STATIC_SHARED_BYTES and threads <= _MOST_THREADS:
            yield Bands(layout.rows, layout.strips, layout.planes, threads)

    def _other_floats(self, problem: ConvProblem, threads: int) -> int:
        return 0


class Forward(_Depthwise):
    """y from x."""

    def _shape(self, problem: ConvProblem) -> _Shape:
        outs = problem.out_height, problem.out_width
        return _Shape((problem.height, problem.width), outs, 1, 1)

    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        return (rows - 1) * problem.stride[0] + _reach(problem)

    def _collects(self, shape: _Shape) -> bool:
        return shape.outs[1] < 32

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        launch = Launch(
            "convolve",
            (_blocks(self._shape(problem), layout, problem.batch * problem.channels), 1, 1),
            (layout.threads, 1, 1),
            ("y", "x", "w", "bias", problem.batch),
        )
        bias = (("BIAS", 1),) if problem.bias else ()
        return Plan(kernel, (*_defines(problem, layout, accumulate), *bias), (launch,))


class BackwardData(_Depthwise):
    """dx from dy; a thread has pixels of all remainders by the strides."""

    def _shape(self, problem: ConvProblem) -> _Shape:
        ins = problem.out_height, problem.out_width
        rows, columns = problem.stride
        return _Shape(ins, (problem.height, problem.width), columns, rows)

    def _in_rows(self, problem: ConvProblem, rows: int) -> int:
        return (rows + _reach(problem) - 2) // problem.stride[0] + 1

    def _collects(self, shape: _Shape) -> bool:
        return shape.columns > 1 or shape.outs[1] < 32

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        launch = Launch(
            "backward_data",
            (_blocks(self._shape(problem), layout, problem.batch * problem.channels), 1, 1),
            (layout.threads, 1, 1),
            ("dx", "w", "dy", problem.batch),
        )
        return Plan(kernel, _defines(problem, layout, accumulate), (launch,))


class BackwardWeight(Forward):
    """dw from the windows of x and dy, in one slice of the images or in several, which are then
    added up."""

    def _collects(self, shape: _Shape) -> bool:
        return True

    def _other_floats(self, problem: ConvProblem, threads: int) -> int:
        return max(problem.kernel[1] * threads, math.prod(problem.kernel) * threads // 32)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Bands, accumulate: bool) -> Plan:
        weights = math.prod(problem.w_shape)
        groups = divide_up(problem.channels, layout.planes)
        units = problem.batch * divide_up(problem.out_height, layout.strips * layout.rows)
        each = divide_up(units, max(1, divide_up(_WEIGHT_BLOCKS, groups)))
        slices = divide_up(units, each)
        parts = "workspace" if slices > 1 else "dw"
        launch = Launch(
            "backward_weight",
            (groups * slices, 1, 1),
            (layout.threads, 1, 1),
            ("dw", parts, "x", "dy", problem.batch, slices, each),
        )
        add = Launch(
            "reduce",
            (divide_up(weights, 128), 1, 1),
            (128, 1, 1),
            ("dw", "workspace", "x", "dy", problem.batch, slices),
        )
        return Plan(
            kernel,
            _defines(problem, layout, accumulate),
            (launch, add) if slices > 1 else (launch,),
            workspace_bytes=4 * slices * weights if slices > 1 else 0,
        )


def _reach(problem: ConvProblem) -> int:
    """Rows from a window's first to its last."""
    return (problem.kernel[0] - 1) * problem.dilate[0] + 1


def _row_counts(height: int, step: int) -> list[int]:
    """Rows of a thread worth measuring, all multiples of `step`: first those that leave the fewest
    rows over, of these the most."""
    most = max(step, min(_MOST_ROWS, divide_up(height, step) * step))
    counts = range(step, most + 1, step)
    few = [rows for rows in counts if rows >= min(4, most)] or [most]

    def left_over(rows: int) -> int:
        return divide_up(height, rows) * rows - height

    ordered = sorted(few, key=lambda rows: (left_over(rows), -rows))
    return [*ordered, *sorted(set(counts) - set(few), reverse=True)]


def _blocks(shape: _Shape, layout: Bands, planes: int) -> int:
    return divide_up(planes, layout.planes) * divide_up(shape.outs[0], layout.strips * layout.rows)


def _defines(problem: ConvProblem, layout: Bands, accumulate: bool) -> Defines:
    sizes = [(name.upper(), getattr(problem, name)) for name in ("channels", "height", "width")]
    pairs = [
        (f"{name.upper()}_{axis}", value)
        for name in ("kernel", "stride", "pad", "dilate")
        for axis, value in zip("HW", getattr(problem, name))
    ]
    return (*sizes, *pairs, *((("ACCUMULATE", 1),) if accumulate else ()), *layout.defines)


KERNELS = (
    entry(
        "depthwise",
        "groups of one channel: planes in shared memory, columns in registers",
        Forward(),
        rank=0,
    ),
    entry(
        "depthwise_backward_data",
        "the gradient for x of these",
        BackwardData(),
        rank=0,
        direction="backward_data",
    ),
    entry(
        "depthwise_backward_weight",
        "the gradient for w of these",
        BackwardWeight(),
        rank=0,
        direction="backward_weight",
    ),
)
