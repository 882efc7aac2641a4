"""Measured times of the CUDA kernels and of cuDNN: kept as JSON, shown as tables."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from ..backends.cuda.kernels.catalog import KERNELS
from ..errors import InvalidSetting
from ..files import markdown

LADDER = [kernel for kernel in KERNELS if kernel.name[0].isdigit()]
# The shapes whose steps from kernel to kernel the ladder shows.
STEPS = ("fa19_1", "fa19_2")

# {shape: {"batch": n, "kernels": {name: timing}, "cudnn": {variant: timing}}}; a timing has
# samples_ms and error, and failure, which is None or says what was wrong.
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
    return statistics.median(timing["samples_ms"])


def tables(results: Results) -> str:
    """Everything as Markdown: kernels and cuDNN by shape, the ladder's steps, errors."""
    return "\n\n".join(
        [
            "Median milliseconds, the kernel's own time on the GPU by events:",
            _by_shape(results),
            "The ladder, step by step. Factors are over the float32-accurate kernel before:",
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
    return f"{timing['error']:.1e}" if errors else f"{statistics.median(timing['samples_ms']):.3f}"


def steps(results: Results, shape: str) -> dict[str, tuple[float, float | None]]:
    """By kernel of the ladder: milliseconds, and how many times faster than the float32-accurate
    kernel before it (`None` for the first)."""
    timings, found = results.get(shape, {}).get("kernels", {}), {}
    before: float | None = None
    for kernel in LADDER:
        ms = median(timings.get(kernel.name))
        if ms is not None:
            found[kernel.name] = (ms, before / ms if before else None)
            before = ms if kernel.float32_accurate else before
    return found


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
