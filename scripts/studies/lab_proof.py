"""Comparison of the lab's verdicts and rankings of kernel files with an independent check."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import dispatch
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.kernel_file import KernelFile
from ece408_op.dispatch import Layer
from ece408_op.errors import Ece408Error
from ece408_op.lab.ranking import Entry, Ranking
from ece408_op.problem import ConvProblem

# L2 error for normally distributed numbers; TF32 and half precision exceed it.
LARGEST_ERROR = 1e-5
_SECONDS = 120
# Files whose sums differ by less may change places.
CLOSE = 0.02
STEADY = 0.01


def compare(path: str, texts: Sequence[str], output: Path) -> None:
    """Compute problems by a file as the operator does, and by our CPU kernels; write for each the
    number of wrong elements for whole numbers, and the relative error for real ones, or the
    failure.

    Run it in a separate process, since the file's code runs in it.
    """
    rng = np.random.default_rng(408)
    rows: list[dict[str, Any]] = []
    for text in texts:
        problem = ConvProblem.parse(text)
        try:
            whole = [rng.integers(-4, 5, s).astype(np.float32) for s in _shapes(problem)]
            real = [rng.standard_normal(s).astype(np.float32) for s in _shapes(problem)]
            found, expected = _both(path, problem, *whole)
            row: dict[str, Any] = {"wrong": int(np.count_nonzero(found != expected))}
            found, expected = _both(path, problem, *real)
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            row["error"] = float(error) if np.isfinite(error) else None
        except Ece408Error as error:
            row = {"failure": " ".join(str(error).split())[:200]}
        rows.append(row)
        output.write_text(json.dumps(rows), encoding="utf-8")


def _shapes(problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return problem.x_shape, problem.w_shape


def _both(
    path: str, problem: ConvProblem, x: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    outputs = [np.full(problem.y_shape, np.nan, np.float32) for _ in range(2)]
    theirs = dispatch.select(problem, Layer(cuda_kernel=path), "forward")
    for backend, y in zip((theirs, CpuBackend()), outputs):
        addresses = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
        backend.forward(problem, *addresses, False)
    return outputs[0], outputs[1]


def by_other_means(
    script: str,
    files: dict[str, KernelFile],
    texts: Sequence[str],
    folder: Path,
    jobs: int,
) -> dict[str, list[dict[str, Any]]]:
    """Run `compare` for each file in a process; no rows for one that ends or hangs."""

    def one(item: tuple[str, KernelFile]) -> list[dict[str, Any]]:
        output = folder / f"{item[1].key}.json"
        command = [sys.executable, script, "--compare", str(item[1].path), str(output), *texts]
        try:
            subprocess.run(command, timeout=_SECONDS, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            return []
        return json.loads(output.read_text(encoding="utf-8")) if output.is_file() else []

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(files, pool.map(one, files.items())))


def is_right(rows: Sequence[dict[str, Any]], expected: int) -> bool:
    """Tell whether there are `expected` rows, and all are right."""
    return len(rows) == expected and all(
        row.get("wrong") == 0 and row["error"] is not None and row["error"] <= LARGEST_ERROR
        for row in rows
    )


def said(rows: Sequence[dict[str, Any]], expected: int) -> str:
    """Describe the worst of the rows, of which there should be `expected`."""
    for row in rows:
        if "failure" in row:
            return "fails"
    if len(rows) < expected:
        return "ends or hangs"
    if any(row["wrong"] for row in rows):
        return "whole numbers are wrong"
    if any(row["error"] is None for row in rows):
        return "overflows"
    return f"error {max(row['error'] for row in rows):.0e}"


def table_rows(
    checked: Ranking,
    rankings: Sequence[Ranking],
    files: dict[str, KernelFile | str],
    others: dict[str, list[dict[str, Any]]],
    problems: int,
) -> list[list[str]]:
    """Return a row for each file, by number: form, both verdicts, sums of both rankings, their
    change."""
    rows = []
    for number, (name, file) in enumerate(files.items(), 1):
        entry, own = checked.entries[name], others.get(name, [])
        right = not entry.wrong
        found = [r.sum(r.entries[name]) for r in rankings if name in r.entries]
        sums = [total for total in found if total is not None]
        rows.append(
            [
                str(number),
                file.form if isinstance(file, KernelFile) else "",
                said(own, problems) if isinstance(file, KernelFile) else "",
                "right" if right else _short(entry, name),
                "yes" if right == is_right(own, problems) else "NO",
                *(
                    "" if total is None else f"{1e3 * total:.3f}"
                    for total in (*sums, None, None)[:2]
                ),
                f"{sums[1] / sums[0] - 1:+.1%}" if len(sums) == 2 else "",
            ]
        )
    return rows


def _short(entry: Entry, name: str) -> str:
    """Return why a file has no rank, without its name and path."""
    words = [word for word in entry.wrong.split() if "/" not in word and name not in word]
    return " ".join(words)[:110].replace("|", "/")


def summary(rankings: Sequence[Ranking]) -> str:
    """Describe how much medians and sums differ between the rankings, and which pairs change
    places."""
    first, second = ({e.name: r.sum(e) or 0.0 for e in r.in_order()} for r in rankings)
    both = [name for name in first if name in second]
    if not both:
        return "None is ranked."
    medians = [
        abs(rankings[1].seconds(rankings[1].entries[name], layer) / before - 1)
        for name in both
        for layer in rankings[0].layers
        for before in [rankings[0].seconds(rankings[0].entries[name], layer)]
    ]
    swapped = [
        (a, b)
        for i, a in enumerate(both)
        for b in both[i + 1 :]
        if second[b] < second[a] and first[b] > (1 + CLOSE) * first[a]
    ]
    sums = [abs(second[name] / first[name] - 1) for name in both]
    return (
        f"{len(both)} ranked twice, ours among them: {_changes('medians of a layer', medians)}; "
        f"{_changes('sums', sums)}; pairs more than {CLOSE:.0%} apart that change places: "
        f"{len(swapped)}."
    )


def _changes(what: str, changes: Sequence[float]) -> str:
    within = sum(each <= STEADY for each in changes)
    return (
        f"{what} change by {statistics.median(changes):.1%} (median), {max(changes):.1%} (most), "
        f"{within} of {len(changes)} by at most {STEADY:.0%}"
    )


def layer_texts(layers: Sequence[tuple[str, ConvProblem]], images: int) -> list[str]:
    return [str(dataclasses.replace(problem, batch=images)) for _, problem in layers]
