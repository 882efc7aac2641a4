"""A comparison as a table of text."""

from __future__ import annotations

from collections.abc import Sequence

from .comparison import Row, Run

_NAMES = ("script", "term", "model", "images")
_WORDS = ("script", "term", "model")


def table(rows: Sequence[Row]) -> str:
    """One line for each row below a header with the units.

    A run without figures shows the reason instead.
    """
    runs = [row.summary for row in rows]
    layers = max((len(run.op_seconds) for run in runs), default=0)
    times = [f"conv{layer} ms" for layer in range(1, layers + 1)]
    header = (*_NAMES, "accuracy", *times, "program s", "peak MiB")
    lines = [header, *(_cells(run, layers) for run in runs)]
    widths = [_width(index, lines) for index in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for cell, width, name in zip(line, widths, header)
        )
        for line in lines
    )


def _cells(run: Run, layers: int) -> tuple[str, ...]:
    names = (run.script, run.term, run.model, str(run.size))
    if run.accuracy is None or run.elapsed_s is None or run.peak_bytes is None:
        return (*names, f"{'not run' if run.lacks_gpu else 'failed'}: {run.error}")
    times = [f"{1e3 * seconds:.3f}" for seconds in run.op_seconds]
    times += ["-"] * (layers - len(times))
    peak_mib = run.peak_bytes / (1 << 20)
    return (*names, f"{run.accuracy:.4f}", *times, f"{run.elapsed_s:.2f}", f"{peak_mib:.0f}")


def _width(column: int, lines: Sequence[tuple[str, ...]]) -> int:
    """The width of the widest cell, not counting reasons, which end their lines."""
    last = max(map(len, lines))
    return max(len(line[column]) for line in lines if column < len(_NAMES) or len(line) == last)
