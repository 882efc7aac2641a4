"""The milestones on the GPU beside those on the CPU: op times, and what a GPU did within them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from ece408_op.course import comparison
from ece408_op.course.comparison import Run
from ece408_op.course.course_terms import TERMS, Term
from ece408_op.files import markdown

# `final` runs what m4.1 runs.
_SCRIPTS = ("m1.1", "m1.2", "m2.1", "m3.1", "m4.1")
_GPU_LINE = re.compile(
    r"^ece408: \S* by (.+?): kernel ([\d.]+) ms \(\d+%\), copies ([\d.]+) ms", re.M
)
_WAY = re.compile(r"^ece408: (staged|zero-copy): ", re.M)


@dataclass(frozen=True)
class LayerShare:
    """What a GPU did within one op time: the kernel that ran, and milliseconds of it and copies."""

    kernel: str
    kernel_ms: float
    copies_ms: float


@dataclass(frozen=True)
class Row:
    """One run of a milestone; `way` is "staged", "zero-copy" or "", `layers` one entry each."""

    run: Run
    way: str
    layers: tuple[LayerShare, ...]


def measure(size: int, terms: Sequence[Term] = tuple(TERMS.values())) -> list[Row]:
    """Run every milestone of the terms' models on `size` images, one process after another."""
    said: dict[tuple[str, ...], str] = {}

    def runner(command: Sequence[str]) -> CompletedProcess[str]:
        result = comparison.run_process(command)
        said[tuple(command)] = result.stderr
        return result

    jobs = [
        job
        for job in comparison.plan(list(terms), comparison.Options(str(size)))
        if job.milestone.name in _SCRIPTS
    ]
    comparison.prepare_data(jobs)
    rows = comparison.compare(jobs, runner=runner)
    return [_row(row.summary, said[job.command]) for row, job in zip(rows, jobs)]


def _row(run: Run, stderr: str) -> Row:
    way = _WAY.search(stderr)
    layers = tuple(
        LayerShare(kernel, float(kernel_ms), float(copies_ms))
        for kernel, kernel_ms, copies_ms in _GPU_LINE.findall(stderr)
    )
    return Row(run, way[1] if way else "", layers)


def differences(rows: Sequence[Row]) -> list[str]:
    """Where a GPU milestone's correctness differs from m2.1's of the same term and model."""
    by_cpu = {(r.run.term, r.run.model): r.run.accuracy for r in rows if r.run.script == "m2.1"}
    return [
        f"{row.run.script} {row.run.term} {row.run.model}: {row.run.accuracy}"
        for row in rows
        if row.layers and row.run.accuracy != by_cpu.get((row.run.term, row.run.model))
    ]


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown, and a line on whether correctness agrees."""
    head = ["term", "model", "script", "way", "correctness", "op times, ms", "kernels, ms (share)"]
    head += ["copies, ms (share)", "program, s"]
    different = differences(rows)
    verdict = f"not everywhere: {'; '.join(different)}" if different else "everywhere"
    agrees = f"Correctness of m3.1 and m4.1 equals m2.1's: {verdict}."
    said: set[str] = set()
    cells = [_cells(row, said) for row in rows]
    return f"{markdown.table(head, cells)}\n\nEach row is a single run.\n\n{agrees}"


def _cells(row: Row, said: set[str]) -> list[str]:
    """A row of the table; the reasons that have been `said` are not said again."""
    run = row.run
    if run.error is not None:
        reason = "as above" if run.error in said else run.error
        said.add(run.error)
        return [run.term, run.model, run.script, row.way, f"not run: {reason}", *[""] * 4]
    op_ms = [1e3 * seconds for seconds in run.op_seconds]
    kernels = [(layer.kernel_ms, f" {layer.kernel}") for layer in row.layers]
    copies = [(layer.copies_ms, "") for layer in row.layers]
    return [
        *(run.term, run.model, run.script, row.way, str(run.accuracy)),
        ", ".join(f"{each:.1f}" for each in op_ms),
        _shares(kernels, op_ms),
        _shares(copies, op_ms),
        f"{run.elapsed_s:.2f}",
    ]


def _shares(parts: Sequence[tuple[float, str]], op_ms: Sequence[float]) -> str:
    return ", ".join(
        f"{part:.2f} ({part / whole:.0%}){name}" for (part, name), whole in zip(parts, op_ms)
    )


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON."""
    return {"runs": [dataclasses.asdict(row) for row in rows], "differences": differences(rows)}
