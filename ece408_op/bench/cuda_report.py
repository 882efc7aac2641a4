"""Measured times of the CUDA kernels and of cuDNN: kept as JSON, shown as tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..backends.cuda.kernel_plan import Kernel
from ..backends.cuda.kernels.catalog import KERNELS
from ..errors import InvalidSetting
from ..files import markdown
from ..files.resources import kernels_dir
from .summary import summary

LADDER = [kernel for kernel in KERNELS if kernel.name[0].isdigit()]
# The shapes whose steps from kernel to kernel the ladder shows.
STEPS = ("fa19_1", "fa19_2")

# {shape: {"batch": n, "kernels": {name: timing}, "cudnn": {variant: timing}}}; a timing has
# ms, a summary, and error, and failure, which is None or says what was wrong.
Results = dict[str, dict[str, Any]]


def load(path: Path) -> dict[str, Any]:
    """What `results.write` wrote as JSON; {} if there is no file. Raises `InvalidSetting`."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidSetting(f"{path} is no results file ({error}); remove it") from error


def median(timing: dict[str, Any] | None) -> float | None:
    """The median of a timing in milliseconds; `None` where there is none or it failed."""
    if timing is None or timing.get("failure"):
        return None
    return timing["ms"]["median"]


def kept(timing: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with a summary `ms` in place of `samples_ms`; none without samples."""
    samples = timing.get("samples_ms")
    others = {name: value for name, value in timing.items() if name != "samples_ms"}
    return {"ms": summary(samples), **others} if samples else others


def tables(results: Results) -> str:
    """Everything as Markdown: kernels and cuDNN by shape, the ladder's steps, errors."""
    return "\n\n".join(
        [
            "Median milliseconds, the kernel's own time on the GPU by events:",
            _by_shape(results),
            "The ladder, step by step. A step is over the kernel that the one in question changes:",
            ladder(results),
            "Relative L2 errors against float64:",
            _by_shape(results, errors=True),
        ]
    )


def _by_shape(results: Results, errors: bool = False) -> str:
    head = ["", *(f"{shape}, batch {each['batch']}" for shape, each in results.items())]
    rows = []
    for part, prefix in (("kernels", ""), ("cudnn", "cuDNN ")):
        names = dict.fromkeys(name for each in results.values() for name in each[part])
        for name in names:
            cells = [_cell(each[part].get(name), errors) for each in results.values()]
            rows.append([f"{prefix}{name}", *cells])
    return markdown.table(head, rows)


def _cell(timing: dict[str, Any] | None, errors: bool) -> str:
    if timing is None:
        return ""
    if timing.get("failure"):
        return "failed"
    return f"{timing['error']:.1e}" if errors else f"{timing['ms']['median']:.3f}"


def parent(kernel: Kernel) -> str | None:
    """The kernel that this one's header says it changes, `None` for the first."""
    source = (kernels_dir() / "cuda" / kernel.source).read_text(encoding="utf-8")
    found = re.search(r"^// Changed against (\w+)\.cu", source, re.M)
    return found[1] if found else None


def steps(results: Results, shape: str) -> dict[str, tuple[float, float | None]]:
    """By kernel of the ladder: milliseconds, and how many times faster than its parent (`None`
    where that has no time)."""
    timings, found = results.get(shape, {}).get("kernels", {}), {}
    for kernel in LADDER:
        ms, before = (median(timings.get(name)) for name in (kernel.name, parent(kernel) or ""))
        if ms is not None:
            found[kernel.name] = (ms, before / ms if before else None)
    return found


def tree() -> str:
    """The ladder as text: each kernel below its parent, chains in one line."""
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


def ladder(results: Results) -> str:
    """The ladder's kernels with what each does, its times and its steps, as Markdown."""
    by_shape = {shape: steps(results, shape) for shape in STEPS}
    head = ["kernel", "idea", "precision"]
    for shape in STEPS:
        head += [f"{shape} ms", "step"]
    rows = []
    for kernel in LADDER:
        cells = [kernel.name, kernel.summary, kernel.precision]
        for shape in STEPS:
            ms, factor = by_shape[shape].get(kernel.name, (None, None))
            cells += ["" if ms is None else f"{ms:.2f}", "" if factor is None else f"{factor:.2f}x"]
        rows.append(cells)
    return markdown.table(head, rows)


def measured(results: Results, kernel: str) -> str:
    """A kernel's measured effect in words, for its header."""
    parts = []
    for shape in STEPS:
        ms, factor = steps(results, shape).get(kernel, (None, None))
        if ms is None:
            ms = median(results.get(shape, {}).get("kernels", {}).get(kernel))
        if ms is not None:
            parts.append(f"{shape} {ms:.2f} ms" + (f" ({factor:.2f}x)" if factor else ""))
    return ", ".join(parts) or "not on the shapes of the ladder"
