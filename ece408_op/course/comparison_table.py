"""A comparison as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from .comparison import Row, Run

_NAMES = ("script", "term", "model", "images")
_WORDS = ("script", "term", "model")


def table(rows: Sequence[Row]) -> str:
    """One line for each row below a header with the units, and how many runs the figures are of.

    A run without figures shows the reason instead, once for all that have it.
    """
    runs = [row.summary for row in rows]
    layers = max((len(run.op_seconds) for run in runs), default=0)
    times = [f"conv{layer} ms" for layer in range(1, layers + 1)]
    header = (*_NAMES, "accuracy", *times, "program s", "peak MiB")
    said: set[str | None] = set()
    lines = [header, *(_cells(run, layers, said) for run in runs)]
    widths = [_width(index, lines) for index in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for cell, width, name in zip(line, widths, header)
        )
        for line in lines
    ]
    return "\n".join([*text, *_about_runs(rows)])


def _about_runs(rows: Sequence[Row]) -> list[str]:
    """A line on what the figures are of, if there are any."""
    counts = {len(row.samples) for row in rows if row.summary.error is None}
    if not counts:
        return []
    if counts == {1}:
        return ["", "Each figure is of a single run; --repeat N gives medians of N."]
    return ["", f"Figures are medians of {max(counts)} runs."]


def _cells(run: Run, layers: int, said: set[str | None]) -> tuple[str, ...]:
    """A row; the reasons that have been `said` are not said again."""
    names = (run.script, run.term, run.model, str(run.size))
    if run.accuracy is None or run.elapsed_s is None or run.peak_bytes is None:
        reason = "as above" if run.error in said else run.error
        said.add(run.error)
        return (*names, f"{'not run' if run.lacks_gpu else 'failed'}: {reason}")
    times = [f"{1e3 * seconds:.3f}" for seconds in run.op_seconds]
    times += ["-"] * (layers - len(times))
    peak_mib = run.peak_bytes / (1 << 20)
    return (*names, f"{run.accuracy:.4f}", *times, f"{run.elapsed_s:.2f}", f"{peak_mib:.0f}")


def _width(column: int, lines: Sequence[tuple[str, ...]]) -> int:
    """The width of the widest cell, not counting reasons, which end their lines."""
    last = max(map(len, lines))
    return max(len(line[column]) for line in lines if column < len(_NAMES) or len(line) == last)
