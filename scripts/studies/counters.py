"""What the GPU's own counters say of the kernel chosen for each shape: where the time goes.

Nsight Compute (ncu) runs `counted_runs` and reads the counters of the launches between its marks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ece408_op.course.comparison import reason
from ece408_op.errors import GpuFailed
from ece408_op.files import markdown
from ece408_op.profile import ncu
from ece408_op.profile.kernel_limits import STALL_METRICS, STALLS

_METRICS = {
    "ms": "gpu__time_duration.sum",
    "clock_ghz": "sm__cycles_elapsed.avg.per_second",
    "dram": "fbpa__dram_sectors.avg.pct_of_peak_sustained_elapsed",
    "read_gb": "dram__bytes_read.sum",
    "written_gb": "dram__bytes_write.sum",
    "to_l2": "lts__xbar2lts_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    **STALL_METRICS,
}
_SHARES = ("dram", "to_l2", "issue", "fma", "tensor", "shared")
_SCALES = {"ms": 1e-6, "clock_ghz": 1e-9, "read_gb": 1e-9, "written_gb": 1e-9}


@dataclass(frozen=True)
class Counted:
    """One kernel on one shape: the milliseconds that the GPU takes at least to read the inputs and
    write the outputs, and figures by the names in `_METRICS`, NaN where ncu has none."""

    shape: str
    precision: str
    kernel: str
    floor_ms: float
    figures: dict[str, float]


def measure(
    shapes: list[str], precisions: list[str], directions: list[str], gpu: int
) -> list[Counted]:
    """The counters of each shape's kernels, of one launch each: the longest of a kernel's.

    Raises what `ncu.find` and `ncu.run` raise, and `GpuFailed` when `counted_runs` fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("counted_runs.py")), str(gpu)]
    command += [" ".join(shapes), ",".join(precisions), ",".join(directions)]
    between_marks = ("--profile-from-start", "off")
    result, launches = ncu.run(command, ncu.find(), _METRICS.values(), *between_marks)
    if result.returncode:
        raise GpuFailed(f"ncu ends with {result.returncode} and says: {reason(result)}")
    return parse(result.stdout, launches)


def parse(ran: str, launches: Sequence[ncu.Row]) -> list[Counted]:
    """What `counted_runs` printed, with the rows of its launches, in the same order."""
    found = []
    for run in json.loads(ran.splitlines()[-1]):
        count = run.pop("launches")
        own, launches = launches[:count], launches[count:]
        figures = [
            {name: ncu.number(row, _METRICS[name]) * _SCALES.get(name, 1) for name in _METRICS}
            for row in own
        ]
        found.append(Counted(**run, figures=max(figures, key=lambda each: each["ms"])))
    return found


def table(rows: list[Counted]) -> str:
    """As Markdown."""
    about = (
        "Of one launch, with nothing in the caches before. The floor is what a copy of as many "
        "bytes takes on this GPU as the layer's inputs and outputs have. Shares are of what a unit "
        "can do at most; of waiting, what a warp spends most of its time on, in cycles for each "
        "instruction that it issues."
    )
    head = ["shape", "kernel", "ms", "floor ms", "share", "GHz", "read GB", "written GB", "DRAM"]
    head += ["way to L2", "issue", "FMA", "tensor", "shared memory", "conflicts", "warps"]
    head += ["registers", "waits for"]
    table = markdown.table(head, map(_cells, rows), right=range(2, len(head) - 1))
    return f"{about}\n\n{table}"


def _cells(row: Counted) -> list[str]:
    f = row.figures
    return [
        *(
            f"{row.shape} {row.precision}",
            row.kernel,
            f"{f['ms']:.3f}",
            f"{row.floor_ms:.3f}",
        ),
        f"{100 * row.floor_ms / f['ms']:.0f} %",
        *(f"{f[name]:.2f}" for name in ("clock_ghz", "read_gb", "written_gb")),
        *(f"{f[name]:.0f} %" for name in _SHARES),
        *(f"{f['conflicts']:.2g}", f"{f['warps']:.1f}", f"{f['registers']:.0f}", _waits(f)),
    ]


def _waits(figures: dict[str, float]) -> str:
    known = [name for name in STALLS if not math.isnan(figures[name])]
    most = sorted(known, key=lambda name: -figures[name])[:3]
    return ", ".join(f"{STALLS[name]} {figures[name]:.1f}" for name in most)


def document(rows: list[Counted]) -> dict[str, list]:
    """For JSON."""
    return {"counted": [vars(row) for row in rows]}
