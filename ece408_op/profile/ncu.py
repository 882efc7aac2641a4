"""Hardware counters by NVIDIA's `ncu`, which runs the program once more."""

from __future__ import annotations

import csv
import io
import math
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ProfilerMissing, ProfilingNotPermitted

# Attribute of `Counters`: ncu's metric, and the divisor of its value.
_METRICS = {
    "milliseconds": ("gpu__time_duration.sum", 1e6),
    "dram_read_gb": ("dram__bytes_read.sum", 1e9),
    "dram_written_gb": ("dram__bytes_write.sum", 1e9),
    "dram_share": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 100),
    "sm_share": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 100),
    "warps_share": ("sm__warps_active.avg.pct_of_peak_sustained_active", 100),
    "possible_warps_share": ("sm__maximum_warps_per_active_cycle_pct", 100),
}
_REGISTERS = "launch__registers_per_thread"
_USUAL_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_NOT_PERMITTED = "ERR_NVGPUCTRPERM"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Counters:
    """One function's counters; functions of the same name are distinguished by block and registers.
    Launches, and medians per launch: milliseconds, gigabytes read from and written to the GPU's
    memory, fractions (0 to 1) of the peak of that memory and of the multiprocessors, active warps
    as a fraction of the maximum, and the same for a full grid."""

    name: str
    block: tuple[int, ...]
    registers: int
    launches: int
    milliseconds: float
    dram_read_gb: float
    dram_written_gb: float
    dram_share: float
    sm_share: float
    warps_share: float
    possible_warps_share: float


def find() -> str:
    """Return the path of ncu. Raises `ProfilerMissing` if it is not found."""
    found = shutil.which("ncu")
    if found:
        return found
    for folder in map(Path, _USUAL_FOLDERS):
        for path in sorted(folder.glob("**/ncu"), reverse=True) if folder.is_dir() else ():
            if path.is_file():
                return str(path)
    raise ProfilerMissing(
        "ncu is not on PATH, in /usr/local/cuda/bin or in /opt/nvidia/nsight-compute; install "
        "NVIDIA's Nsight Compute (`ece408 profile` works without --ncu)"
    )


def count(command: Sequence[str], ncu: str) -> list[Counters]:
    """Return the counters of all functions that a command launches, the slowest first.

    Raises what `run` raises.
    """
    metrics = [_REGISTERS, *(metric for metric, _ in _METRICS.values())]
    return by_function(run(command, ncu, metrics, "--target-processes", "all")[1])


def run(
    command: Sequence[str], ncu: str, metrics: Iterable[str], *options: str
) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
    """Run a command under ncu; return a row per launch with its columns, and metrics in base units.

    Clocks are not locked. Raises `ProfilingNotPermitted`, and `ProfilerMissing` when ncu counts
    nothing for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="ece408-ncu-") as folder:
        log = Path(folder) / "ncu.csv"
        own = prefix(ncu, metrics, log)
        result = subprocess.run([*own, *options, *command], capture_output=True, text=True)
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    said += result.stderr
    return result, read(said, f"exit code {result.returncode}")


def prefix(ncu: str, metrics: Iterable[str], log: Path) -> list[str]:
    """Return the start of a command that runs another one under ncu, with a log for `read`."""
    own = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    return [ncu, *own, "--clock-control", "none", "--log-file", str(log)]


def read(said: str, ended: str) -> list[Row]:
    """Parse the launches in ncu's output. Raises `ProfilingNotPermitted`, and `ProfilerMissing` if
    there are none; `ended` says how ncu ended."""
    if _NOT_PERMITTED in said:
        raise ProfilingNotPermitted(
            f"the driver does not let this user read the GPU's counters ({_NOT_PERMITTED}); run as "
            "root, or have it loaded with NVreg_RestrictProfilingToAdminUsers=0 (`ece408 profile` "
            "works without --ncu)"
        )
    found = rows(said)
    if not found:
        reason = next((line for line in reversed(said.splitlines()) if "==" in line), "")
        raise ProfilerMissing(
            f"ncu has counted nothing ({ended}): {reason.strip('= ')}; does it run by itself?"
        )
    return found


def rows(log: str) -> list[Row]:
    """Parse ncu's page "raw" as CSV, which has units in the line below the names."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row["ID"]]


def number(row: Row, metric: str) -> float:
    """Parse a value with thousands separators; NaN if the GPU has no such counter."""
    try:
        return float(row.get(metric, "").replace(",", ""))
    except ValueError:
        return math.nan


def by_function(launches: Iterable[Row]) -> list[Counters]:
    """Return the counters of all launched functions, the slowest first."""
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in launches:
        key = (row["Kernel Name"], row["Block Size"], row[_REGISTERS])
        grouped.setdefault(key, []).append(row)
    found = [
        Counters(
            name,
            tuple(map(int, block.strip("()").split(","))),
            round(number(group[0], _REGISTERS)),
            len(group),
            **{
                attribute: statistics.median(number(row, metric) for row in group) / divisor
                for attribute, (metric, divisor) in _METRICS.items()
            },
        )
        for (name, block, _), group in grouped.items()
    ]
    return sorted(found, key=lambda each: -each.launches * each.milliseconds)


def table(found: Sequence[Counters]) -> str:
    """Return a table of the counters, a line per function."""
    lines = [
        "launches  ms each  read GB  written GB  memory  processors  warps  of possible  function"
    ]
    lines += [
        f"{c.launches:>8}  {c.milliseconds:>7.3f}  {c.dram_read_gb:>7.3f}  "
        f"{c.dram_written_gb:>10.3f}  {c.dram_share:>6.0%}  {c.sm_share:>10.0%}  "
        f"{c.warps_share:>5.0%}  {c.possible_warps_share:>11.0%}  {c.name}"
        for c in found
    ]
    return "\n".join(lines)
