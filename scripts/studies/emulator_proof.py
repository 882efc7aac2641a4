"""The emulator beside a GPU: verdicts on kernel files, and counts of this package's kernels."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.lab import counting, observed
from ece408_op.problem import ConvProblem
from ece408_op.profile import ncu

from . import lab_proof

KERNELS = (
    *("1_naive", "2_constant_weights", "3_shared_tiles", "4_im2col", "5_implicit_gemm"),
    *("6_register_tiles", "7_channel_tree", "8_channel_atomics"),
)
_ARCHITECTURE = "sm_90"


@dataclass(frozen=True)
class Compared:
    """A number of the emulator's, summed over kinds of access, and the metrics of ncu that make
    the same: the sum of those `added` that the GPU has, without those `subtracted`."""

    kinds: tuple[str, ...]
    number: str
    added: tuple[str, ...]
    subtracted: tuple[str, ...] = ()


# Conflicts are those of the instructions; the counters of the memory's pipeline
# (l1tex__data_bank_conflicts...) add its waits for other clients. Passes are not compared: nvcc
# joins loads of neighbouring words, which then take fewer.
_COMPARED = {
    "sectors loaded": Compared(
        ("global load",), "sectors", ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",)
    ),
    "sectors stored": Compared(
        ("global store",), "sectors", ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",)
    ),
    "sectors of atomics": Compared(
        ("atomic",),
        "sectors",
        (
            "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
            "l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum",
        ),
    ),
    "bank conflicts": Compared(
        ("shared load", "shared store"),
        "conflicts",
        ("memory_l1_wavefronts_shared",),
        ("memory_l1_wavefronts_shared_ideal",),
    ),
    "warps that load": Compared(
        ("global load",), "warps", ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",)
    ),
}
CLOSE = 0.01

Found = Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]


def verdicts(number: int, name: str, found: Found, problems: int) -> list[str]:
    """A file's row: what is said of its results on the GPU and in the emulator, whether both are
    right or both wrong, and, of one that is wrong the same way each time on the GPU, whether the
    first wrong elements are the same."""
    on_gpu, emulated = (found[backend].get(name, []) for backend in ("cuda", "emulator"))
    agree = lab_proof.is_right(on_gpu, problems) == lab_proof.is_right(emulated, problems)
    firsts = [row["first"] for row in on_gpu if row.get("first")]
    same = ""
    if firsts and all(row["repeats"] for row in on_gpu if row.get("first")):
        own = [row["first"] for row in emulated if row.get("first")]
        same = "same" if firsts == own else "other"
    says = [_said(rows, problems) for rows in (on_gpu, emulated)]
    return [str(number), *says, "yes" if agree else "NO", same]


def _said(rows: Sequence[dict[str, Any]], problems: int) -> str:
    words = lab_proof.said(rows, problems)
    failures = [row["failure"] for row in rows if "failure" in row]
    if failures:
        return f"{words}: {' '.join(w for w in failures[0].split() if '/' not in w)[:80]}"
    firsts = [f"({','.join(map(str, row['first']))})" for row in rows if row.get("first")]
    changes = "" if all(row.get("repeats", True) for row in rows) else ", other ones each time"
    return f"{words}, first {firsts[0]} of {len(firsts)} layers{changes}" if firsts else words


def summary(rows: Sequence[Sequence[str]]) -> str:
    agree = sum(row[3] == "yes" for row in rows)
    same, other = (sum(row[4] == what for row in rows) for what in ("same", "other"))
    return (
        f"{len(rows)} files, {agree} with the same verdict; of {same + other} that are wrong the "
        f"same way each time on the GPU, {same} have the same first wrong elements."
    )


def counts(kernel: str, layer: str, problem: ConvProblem) -> list[list[str]]:
    """A kernel's rows on a layer: by the emulator and by ncu. Raises `ProfilerMissing`."""
    own = counting.count(kernel, problem, _ARCHITECTURE)
    metrics = [metric for each in _COMPARED.values() for metric in (*each.added, *each.subtracted)]
    with tempfile.TemporaryDirectory(prefix="ece408-ncu-") as folder:
        log = Path(folder) / "ncu.csv"
        failure = observed.compute(kernel, ncu.prefix(ncu.find(), metrics, log), [problem])
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    functions = {each.kernel for each in own.launches}
    launches = [
        row
        for row in ncu.read(said, failure or "no launches")
        if row["Kernel Name"].partition("(")[0] in functions
    ]
    rows = []
    for what, each in _COMPARED.items():
        emulated = sum(getattr(e, each.number) for e in own.counts if e.what in each.kinds)
        counted = _total(launches, each.added) - _total(launches, each.subtracted)
        if emulated or counted:
            change = f"{emulated / counted - 1:+.1%}" if counted else "new"
            rows.append([kernel, layer, what, f"{emulated:.0f}", f"{counted:.0f}", change])
    return rows


def _total(launches: Sequence[ncu.Row], metrics: Sequence[str]) -> float:
    values = [ncu.number(row, metric) for row in launches for metric in metrics]
    return sum(value for value in values if not math.isnan(value))


def closeness(rows: Sequence[Sequence[str]]) -> str:
    close = sum(_is_close(row) for row in rows)
    return f"{len(rows)} counts, {close} within {CLOSE:.0%} of ncu's."


def _is_close(row: Sequence[str]) -> bool:
    emulated, counted = float(row[3]), float(row[4])
    return abs(emulated - counted) <= CLOSE * counted
