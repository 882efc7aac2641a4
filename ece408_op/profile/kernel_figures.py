"""Rates of our own kernels on a GPU, computed from a recording without hardware counters.

Operations and bytes are those of the convolution itself: two per multiply-add, each input read once
and each output written once. Additional work of a kernel lowers its rate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.cuda.kernels import catalog
from ..backends.cuda.staged.staging import covered
from ..files import markdown
from .activities import KERNEL, OP_CALL, Activity, in_order
from .gpu_ceilings import GpuCeilings
from .layers import catalog_name
from .occupancy import Limits, occupancy


@dataclass(frozen=True)
class FunctionFigure:
    """One function on the GPU: launches in all calls, and time per launch. `threads` per block,
    `registers` and `local_bytes` (the stack and spilled registers) per thread, `shared_bytes`,
    static and dynamic, per block; `occupancy` is from 0 to 1."""

    name: str
    launches: int
    threads: int
    registers: int
    shared_bytes: int
    local_bytes: int
    occupancy: float


@dataclass(frozen=True)
class Figure:
    """One layer's kernel in one direction: milliseconds in which any of its functions ran, the
    resulting rates, and the minimum time at this GPU's measured ceilings."""

    layer: str
    direction: str
    kernel: str
    problem: str
    calls: int
    milliseconds: float
    gflops: float
    gbs: float
    compute_floor_ms: float
    memory_floor_ms: float
    functions: tuple[FunctionFigure, ...]

    @property
    def floor_share(self) -> float:
        """The fraction of the time (0 to 1) that the GPU would need at its ceilings."""
        return max(self.compute_floor_ms, self.memory_floor_ms) / self.milliseconds


def figures(
    activities: Sequence[Activity], ceilings: GpuCeilings, limits_of: Callable[[int], Limits]
) -> list[Figure]:
    """Return a figure for each layer, direction, kernel and problem that ran on a GPU, in order of
    appearance; times are means over the calls. `limits_of` returns a GPU's limits by its number."""
    by_call: dict[tuple[str, ...], list[tuple[Activity, list[Activity]]]] = {}
    kernels = in_order(k for k in activities if k.kind == KERNEL and "layer" in k.details)
    starts = [kernel.start_ns for kernel in kernels]
    for call in activities:
        if call.kind == OP_CALL:
            first, end = (bisect.bisect_left(starts, at) for at in (call.start_ns, call.end_ns))
            within = [k for k in kernels[first:end] if k.details["layer"] == call.details["layer"]]
            if within:
                what = ("layer", "direction", "kernel", "problem")
                key = tuple(call.details[name] for name in what)
                by_call.setdefault(key, []).append((call, within))
    return [_figure(key, calls, ceilings, limits_of) for key, calls in by_call.items()]


def _figure(
    key: tuple[str, ...],
    calls: list[tuple[Activity, list[Activity]]],
    ceilings: GpuCeilings,
    limits_of: Callable[[int], Limits],
) -> Figure:
    layer, direction, kernel, problem = key
    busy_ns = [covered((k.start_ns, k.end_ns) for k in within) for _, within in calls]
    ms = sum(busy_ns) / len(busy_ns) / 1e6
    work = calls[0][0].details
    return Figure(
        layer,
        direction,
        kernel,
        problem,
        len(calls),
        ms,
        gflops=work["flops"] / ms / 1e6,
        gbs=work["bytes"] / ms / 1e6,
        compute_floor_ms=work["flops"] / ceilings.gflops(_precision(kernel)) / 1e6,
        memory_floor_ms=work["bytes"] / ceilings.copy_gbs / 1e6,
        functions=_functions([k for _, within in calls for k in within], limits_of),
    )


def _precision(kernel: str) -> str:
    """Return the precision of the kernel in the log of op times (of the first, if several); a
    profile of another version may name kernels that no longer exist."""
    found = catalog.find(catalog_name(kernel).split("+")[0])
    return "float32" if found is None else found.precision


def _functions(
    kernels: list[Activity], limits_of: Callable[[int], Limits]
) -> tuple[FunctionFigure, ...]:
    by_name: dict[str, list[Activity]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    return tuple(
        _function(name, len(launches), launches[0].details, limits_of)
        for name, launches in by_name.items()
    )


def _function(
    name: str, launches: int, of: Mapping[str, Any], limits_of: Callable[[int], Limits]
) -> FunctionFigure:
    block = of["block"]
    return FunctionFigure(
        name,
        launches,
        threads=block[0] * block[1] * block[2],
        registers=of["registers"],
        shared_bytes=of["static_shared"] + of["dynamic_shared"],
        local_bytes=of["local"],
        occupancy=occupancy(of, limits_of(of["device"])),
    )


def table(found: Sequence[Figure], ceilings: GpuCeilings) -> str:
    """Return a table of the figures: a line per layer's kernel, then one per function."""
    rows = [("layer", "direction", "kernel", "ms", "GFLOP/s", "GB/s", "floor ms", "of floor")]
    rows += [
        (
            f.layer or "-",
            f.direction,
            f.kernel,
            f"{f.milliseconds:.3f}",
            f"{f.gflops:.0f}",
            f"{f.gbs:.0f}",
            f"{max(f.compute_floor_ms, f.memory_floor_ms):.3f}",
            f"{f.floor_share:.0%}",
        )
        for f in found
    ]
    needs = [("function", "threads", "registers", "shared bytes", "local bytes", "occupancy")]
    needs += dict.fromkeys(
        (
            f.name,
            str(f.threads),
            str(f.registers),
            str(f.shared_bytes),
            str(f.local_bytes),
            f"{f.occupancy:.0%}",
        )
        for figure in found
        for f in figure.functions
    )
    lines = [*markdown.aligned(rows, range(3)), "", *markdown.aligned(needs, range(1))]
    return "\n".join([str(ceilings), *lines])
