"""Text table of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from ..files import markdown
from .comparison import Row, Run
from .course_terms import BASELINE

_WORDS = ("script", "term", "model")
_GAIN = "gain: how many times as fast as MXNet's own convolution on the CPU (m1.1)."


def table(rows: Sequence[Row]) -> str:
    """Return one line per row below a header with units, and notes.

    Each layer's time is followed by its speed-up over m1.1 of the same term. A row without figures
    has the number of its reason, listed below the table.
    """
    runs = [row.summary for row in rows]
    layers = max((len(run.op_seconds) for run in runs), default=0)
    theirs = {run.term: run.op_seconds for run in runs if run.script == "m1.1"}
    times = [name for layer in range(1, layers + 1) for name in (f"conv{layer} ms", "gain")]
    header = (*_WORDS, "images", "accuracy", *times, "program s", "peak MiB")
    reasons = list(dict.fromkeys(_reason(run) for run in runs if not _has(run)))
    lines = [header]
    for run in runs:
        names = (run.script, run.term, run.model, str(run.size))
        if _has(run):
            lines.append((*names, *_figures(run, theirs.get(run.term, ()), layers)))
        else:
            lines.append((*names, f"({reasons.index(_reason(run)) + 1})"))
    return "\n".join(
        [
            *markdown.aligned(lines, range(len(_WORDS))),
            "",
            *([_GAIN, _repeats(rows)] if layers else []),
            *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1)),
        ]
    )


def _has(run: Run) -> bool:
    return None not in (run.accuracy, run.elapsed_s, run.peak_bytes)


def _reason(run: Run) -> str:
    return f"{'not run' if run.lacks_gpu else 'failed'}: {run.error}"


def _figures(run: Run, theirs: Sequence[float], layers: int) -> tuple[str, ...]:
    assert run.accuracy is not None
    assert run.elapsed_s is not None
    assert run.peak_bytes is not None
    cells = []
    for layer, seconds in enumerate(run.op_seconds):
        gained = run.model != BASELINE and layer < len(theirs) and seconds
        cells += [f"{1e3 * seconds:.3f}", f"{theirs[layer] / seconds:.1f}x" if gained else ""]
    cells += ["-", ""] * (layers - len(run.op_seconds))
    mebibytes = run.peak_bytes / (1 << 20)
    return (f"{run.accuracy:.4f}", *cells, f"{run.elapsed_s:.2f}", f"{mebibytes:.0f}")


def _repeats(rows: Sequence[Row]) -> str:
    """Return the number of runs that the medians cover."""
    most = max(len(row.samples) for row in rows)
    return f"Medians of {most} runs." if most > 1 else "Single runs; --repeat N gives medians."
