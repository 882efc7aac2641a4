"""Limiting factor of a CUDA kernel, from the GPU's counters: figures, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from . import ncu

# Stall reasons of a warp, by ncu's names.
STALLS = {
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory",
    "lg_throttle": "room in the queue to global memory",
    "mio_throttle": "room in the queue to shared memory",
    "math_pipe_throttle": "a free arithmetic unit",
    "barrier": "other warps",
    "wait": "the instruction before, a fixed time",
    "dispatch_stall": "the dispatcher",
    "no_instruction": "instructions to be fetched",
    "not_selected": "its turn",
}
STALL_METRICS = {
    name: f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS
}
# Resources that limit the blocks on a multiprocessor.
_RESOURCES = {
    "limit_registers": "the number of registers",
    "limit_shared": "shared memory",
    "limit_warps": "the block's size",
    "limit_blocks": "the number of blocks",
}
# Properties of a launch; these need no counters.
_OF_LAUNCH = {
    "threads": "launch__block_size",
    "blocks": "launch__grid_size",
    "registers": "launch__registers_per_thread",
    "static_shared": "launch__shared_mem_per_block_static",
    "dynamic_shared": "launch__shared_mem_per_block_dynamic",
    "waves": "launch__waves_per_multiprocessor",
    "limit_registers": "launch__occupancy_limit_registers",
    "limit_shared": "launch__occupancy_limit_shared_mem",
    "limit_warps": "launch__occupancy_limit_warps",
    "limit_blocks": "launch__occupancy_limit_blocks",
}
_COUNTED = {
    "ms": "gpu__time_duration.sum",
    "possible_warps": "sm__maximum_warps_per_active_cycle_pct",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "local_loads": "l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum",
    "local_stores": "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum",
    **STALL_METRICS,
}
_METRICS = {**_OF_LAUNCH, **_COUNTED}
METRICS = tuple(_METRICS.values())
# Per cent of its peak above which a unit counts as busy, and below which as idle.
_BUSY, _IDLE = 70, 25
# A warp's 32 adjacent floats are 4 sectors of 32 bytes.
_SECTORS, _MANY_SECTORS = 4, 8
_MANY_CONFLICTS, _MUCH_LOCAL = 0.3, 0.2


@dataclass(frozen=True)
class KernelLimits:
    """One function's figures, by the names above, of its longest launch, NaN if the GPU has no such
    counter; rates are in per cent of the peak. `share` (0 to 1) is its fraction of the total
    time."""

    name: str
    launches: int
    share: float
    figures: Mapping[str, float]

    @property
    def sectors_of_a_load(self) -> float:
        """32-byte sectors per load of a warp from global memory."""
        return self._ratio("sectors", "requests")

    @property
    def conflicts(self) -> float:
        """The fraction (0 to 1) of shared-memory accesses that are repeated due to bank
        conflicts."""
        return self._ratio("conflicts", "wavefronts")

    @property
    def local(self) -> float:
        """Accesses to local memory, to which registers are spilled, per load from global memory."""
        figures = self.figures
        local = figures["local_loads"] + figures["local_stores"]
        return local / figures["requests"] if figures["requests"] else 0.0

    def _ratio(self, part: str, whole: str) -> float:
        return self.figures[part] / self.figures[whole] if self.figures[whole] else 0.0

    @property
    def sentence(self) -> str:
        """Return the limiting factor as a sentence."""
        found = next((text for applies, text in _rules(self) if applies), None)
        return found or f"latency: warps wait mostly for {_longest_wait(self)}"


def of(rows: Iterable[ncu.Row]) -> list[KernelLimits]:
    """Return the limits per function from ncu's rows of launches; the slowest function first."""
    grouped: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        figures = {name: ncu.number(row, metric) for name, metric in _METRICS.items()}
        figures["ms"] /= 1e6
        grouped.setdefault(row["Kernel Name"].partition("(")[0], []).append(figures)
    times = {name: sum(each["ms"] for each in own) for name, own in grouped.items()}
    total = sum(times.values())
    found = [
        KernelLimits(name, len(own), times[name] / total, max(own, key=lambda each: each["ms"]))
        for name, own in grouped.items()
    ]
    return sorted(found, key=lambda each: -each.share)


def columns(kernel: KernelLimits) -> dict[str, str]:
    """Return the formatted figures by title."""
    f = kernel.figures
    return {
        "ms": f"{f['ms']:.3f}",
        "threads": f"{f['threads']:.0f}",
        "registers": f"{f['registers']:.0f}",
        "shared B": f"{f['static_shared'] + f['dynamic_shared']:.0f}",
        "warps %": f"{f['warps']:.0f} of {f['possible_warps']:.0f}",
        "memory %": f"{f['memory']:.0f}",
        "FMA %": f"{f['fma']:.0f}",
        "tensor %": f"{f['tensor']:.0f}",
        "conflicts": f"{kernel.conflicts:.0%}",
        "sectors/load": f"{kernel.sectors_of_a_load:.1f}",
        "local/load": f"{kernel.local:.2f}",
    }


def _rules(kernel: KernelLimits) -> Iterator[tuple[bool, str]]:
    """Yield limiting factors as sentences, each with whether it applies; the first such one
    counts."""
    f = kernel.figures
    yield f["waves"] < 0.5, f"too few blocks: {f['blocks']:.0f} leave most of the GPU idle"
    moved = (f["read"] + f["written"]) / 1e9
    yield (
        f["memory"] >= _BUSY,
        f"memory bandwidth: it moves {moved:.2f} GB at {f['memory']:.0f} % of the peak rate",
    )
    for name, unit in (("fma", "multiply-adds (FMA)"), ("tensor", "tensor cores")):
        yield f[name] >= _BUSY, f"arithmetic: {unit} are at {f[name]:.0f} % of their peak rate"
    yield (
        kernel.local >= _MUCH_LOCAL,
        f"register spills: {kernel.local:.1f} accesses to local memory for each load from "
        f"global memory, with {f['registers']:.0f} registers a thread",
    )
    sectors = kernel.sectors_of_a_load
    yield (
        sectors >= _MANY_SECTORS and f["l1"] >= _IDLE,
        f"uncoalesced loads: a warp's load takes {sectors:.0f} sectors of 32 bytes, where "
        f"{_SECTORS} hold 32 neighbouring floats",
    )
    yield (
        kernel.conflicts >= _MANY_CONFLICTS and f["shared"] >= _IDLE,
        f"bank conflicts: {kernel.conflicts:.0%} of accesses to shared memory are repeats",
    )
    yield (
        f["shared"] >= _BUSY,
        f"shared memory, at {f['shared']:.0f} % of its peak rate: keep more in registers",
    )
    yield (
        f["l1"] >= _BUSY,
        f"the L1 cache, at {f['l1']:.0f} % of its peak rate: keep more in registers or shared "
        "memory, or load more at once",
    )
    yield (
        f["issue"] >= _BUSY,
        f"instruction issue, at {f['issue']:.0f} % of its peak rate, and multiply-adds at "
        f"{f['fma']:.0f} %: the other instructions compute addresses or move data",
    )
    limits = {name: f[name] for name in _RESOURCES if not math.isnan(f[name])}
    least = min(limits, key=lambda name: limits[name], default="")
    yield (
        bool(limits) and not f["possible_warps"] > 2 * _IDLE,
        f"low occupancy: {_RESOURCES.get(least)} allows {f['possible_warps']:.0f} % of a "
        f"multiprocessor's warps, and they wait mostly for {_longest_wait(kernel)}",
    )


def _longest_wait(kernel: KernelLimits) -> str:
    known = {name: kernel.figures[name] for name in STALLS if not math.isnan(kernel.figures[name])}
    return STALLS[max(known, key=lambda name: known[name])] if known else "what no counter tells"
