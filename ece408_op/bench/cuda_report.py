"""The ladder of CUDA kernels: which kernel each one improves on, and tables of times."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..backends.cuda.kernel_plan import Kernel
from ..backends.cuda.kernels.catalog import KERNELS
from ..files import markdown
from ..files.resources import kernels_dir
from .results import Row, median

LADDER = [kernel for kernel in KERNELS if kernel.name[0].isdigit()]
# Shapes for which the ladder shows the gain of each step.
STEPS = ("fa19_1", "fa19_2")


def tables(rows: Sequence[Row]) -> str:
    """Return all tables as Markdown: kernels and cuDNN by shape, the ladder's steps, errors."""
    return "\n\n".join(
        [
            "Median milliseconds, the kernel's own time on the GPU by events:",
            _by_shape(rows),
            "The ladder, step by step. A step is the speed-up over the kernel that it improves on:",
            ladder(rows),
            "Relative L2 errors against float64:",
            _by_shape(rows, errors=True),
        ]
    )


def _by_shape(rows: Sequence[Row], errors: bool = False) -> str:
    head = ["", *(f"{row['case']}, batch {row['batch']}" for row in rows)]
    names = dict.fromkeys(who for row in rows for who in (*row["ms"], *row.get("failures", ())))
    return markdown.table(
        head, ([who, *(_cell(row, who, errors) for row in rows)] for who in names)
    )


def _cell(row: Row, who: str, errors: bool) -> str:
    if who in row.get("failures", ()):
        return "failed"
    if errors:
        return f"{row['errors'][who]:.1e}" if who in row["errors"] else ""
    ms = median(row, who)
    return "" if ms is None else f"{ms:.3f}"


def parent(kernel: Kernel) -> str | None:
    """Return the kernel that this one's header names as its predecessor, or `None` for the
    first."""
    source = (kernels_dir() / "cuda" / kernel.source).read_text(encoding="utf-8")
    found = re.search(r"^// Changed against (\w+)\.cu", source, re.M)
    return found[1] if found else None


def steps(rows: Sequence[Row], shape: str) -> dict[str, tuple[float, float | None]]:
    """Return by kernel of the ladder its milliseconds, and its speed-up over its parent (`None` if
    the parent has no time)."""
    found: dict[str, tuple[float, float | None]] = {}
    for row in (each for each in rows if each["case"] == shape):
        for kernel in LADDER:
            ms, before = (median(row, name) for name in (kernel.name, parent(kernel) or ""))
            if ms is not None:
                found[kernel.name] = (ms, before / ms if before else None)
    return found


def tree() -> str:
    """Return the ladder as text: each kernel below its parent, chains in one line."""
    below: dict[str | None, list[str]] = {}
    for kernel in LADDER:
        below.setdefault(parent(kernel), []).append(kernel.name)
    lines: list[str] = []

    def draw(name: str, indent: int) -> None:
        chain = [name]
        while len(after := below.get(chain[-1], [])) == 1:
            chain += after
        lines.append(" " * indent + " > ".join(chain))
        for each in after:
            draw(each, indent + 4)

    for first in below[None]:
        draw(first, 4)
    return "\n".join(lines)


def ladder(rows: Sequence[Row]) -> str:
    """Return the ladder's kernels with descriptions, times and steps, as Markdown."""
    by_shape = {shape: steps(rows, shape) for shape in STEPS}
    head = ["kernel", "idea", "precision"]
    for shape in STEPS:
        head += [f"{shape} ms", "step"]
    lines = []
    for kernel in LADDER:
        cells = [kernel.name, kernel.summary, kernel.precision]
        for shape in STEPS:
            ms, factor = by_shape[shape].get(kernel.name, (None, None))
            cells += ["" if ms is None else f"{ms:.2f}", "" if factor is None else f"{factor:.2f}x"]
        lines.append(cells)
    return markdown.table(head, lines)


def measured(rows: Sequence[Row], kernel: str) -> str:
    """Return a kernel's measured effect in words, for its header."""
    parts = []
    for row in (each for each in rows if each["case"] in STEPS):
        ms, factor = steps(rows, row["case"]).get(kernel, (median(row, kernel), None))
        if ms is not None:
            parts.append(f"{row['case']} {ms:.2f} ms" + (f" ({factor:.2f}x)" if factor else ""))
    return ", ".join(parts) or "not measured on the shapes of the ladder"
