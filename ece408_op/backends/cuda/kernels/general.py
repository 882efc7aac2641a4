"""Plans of the general kernels: every problem, forward and backward, in every precision."""

from __future__ import annotations

import math

from ....problem import ITEM_BYTES, ConvProblem
from ..plan import Capability, Defines, Kernel, Launch, Plan, divide_up

_TYPES = {
    "float16": ("__half", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}
_PER_COLUMN = 4
# Pixels whose products a block of backward_weight adds up, at least.
_SLICE_PIXELS = 2048
_WORKSPACE_BYTES = 32 << 20
_BIAS_THREADS = 256
_BIAS_ELEMENTS = 1 << 16


def everything(problem: ConvProblem) -> str | None:
    """No reason against any problem."""
    return None


def forward(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    rows, group_columns = problem.filters // problem.groups, 1 << 30
    tile = _tile(rows, group_columns)
    columns = problem.batch * problem.out_height * problem.out_width
    launch = _launch("convolve", problem, tile, rows, columns, ("y", "x", "w", "bias"))
    defines = (*_defines(problem, accumulate, tile), *((("BIAS", 1),) if problem.bias else ()))
    return Plan(kernel, defines, (launch,))


def backward_data(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    rows = problem.channels // problem.groups
    tile = _tile(rows, 1 << 30)
    columns = problem.batch * problem.height * problem.width
    launch = _launch("backward_data", problem, tile, rows, columns, ("dx", "w", "dy"))
    return Plan(kernel, _defines(problem, accumulate, tile), (launch,))


def backward_weight(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    rows, columns = problem.filters // problem.groups, math.prod(problem.w_shape[1:])
    tile = _tile(rows, columns)
    weights = math.prod(problem.w_shape)
    sum_bytes = max(4, ITEM_BYTES[problem.dtype])
    pixels = problem.batch * problem.out_height * problem.out_width
    most = max(1, _WORKSPACE_BYTES // (weights * sum_bytes))
    depth = max(_SLICE_PIXELS, divide_up(pixels, most))
    slices = divide_up(pixels, depth)
    arguments = ("workspace", "x", "dy")
    launch = _launch("backward_weight", problem, tile, rows, columns, arguments, slices, (depth,))
    reduce = Launch(
        "reduce", (divide_up(weights, 256), 1, 1), (256, 1, 1), ("dw", "workspace", slices)
    )
    return Plan(
        kernel,
        _defines(problem, accumulate, tile),
        (launch, reduce),
        workspace_bytes=slices * weights * sum_bytes,
    )


def backward_bias(kernel: Kernel, problem: ConvProblem, _: Capability, accumulate: bool) -> Plan:
    pixels = problem.out_height * problem.out_width
    most = max(1, _WORKSPACE_BYTES // (8 * problem.filters))
    images = max(1, _BIAS_ELEMENTS // pixels, divide_up(problem.batch, most))
    slices = divide_up(problem.batch, images)
    add = Launch(
        "backward_bias",
        (problem.filters * slices, 1, 1),
        (_BIAS_THREADS, 1, 1),
        ("workspace", "dy", problem.batch, images),
    )
    reduce = Launch(
        "reduce",
        (divide_up(problem.filters, 256), 1, 1),
        (256, 1, 1),
        ("dbias", "workspace", slices),
    )
    return Plan(
        kernel,
        (*_defines(problem, accumulate, (4, 64, 4)), ("BIAS_THREADS", _BIAS_THREADS)),
        (add, reduce),
        workspace_bytes=8 * slices * problem.filters,
    )


def _tile(rows: int, columns: int) -> tuple[int, int, int]:
    """Threads along rows and columns, and rows of each thread, for a product of that size."""
    per_row = 1 if rows == 1 else 4
    if rows > 32:
        return 16, 16, per_row
    return 4 if rows > 4 else 1, 64 if columns > 64 else 16, per_row


def _launch(
    function: str,
    problem: ConvProblem,
    tile: tuple[int, int, int],
    rows: int,
    columns: int,
    arrays: tuple[str, ...],
    slices: int = 1,
    numbers: tuple[int, ...] = (),
) -> Launch:
    threads_r, threads_c, per_row = tile
    blocks = divide_up(rows, threads_r * per_row) * divide_up(columns, threads_c * _PER_COLUMN)
    return Launch(
        function,
        (blocks * problem.groups * slices, 1, 1),
        # A warp at least, whatever the tile.
        (threads_r * threads_c, 1, 1),
        (*arrays, problem.batch, *numbers),
    )


def _defines(problem: ConvProblem, accumulate: bool, tile: tuple[int, int, int]) -> Defines:
    element, total = _TYPES[problem.dtype]
    axes = [(name.upper(), getattr(problem, name)) for name in ("channels", "height", "width")]
    pairs = [
        (f"{name.upper()}_{axis}", value)
        for name in ("kernel", "stride", "pad", "dilate")
        for axis, value in zip("HW", getattr(problem, name))
    ]
    return (
        *(("ELEMENT", element), ("SUM", total), *axes, ("FILTERS", problem.filters), *pairs),
        ("GROUPS", problem.groups),
        *((("ACCUMULATE", 1),) if accumulate else ()),
        *(("THREADS_R", tile[0]), ("THREADS_C", tile[1]), ("PER_ROW", tile[2])),
    )
