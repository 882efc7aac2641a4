"""Bar chart of a comparison: op times stacked by layer, next to the program's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting
from ..files.cachedir import atomic_path
from ..files.resources import imported
from .comparison import Row, Run

SUFFIXES = (".png", ".svg", ".pdf")

# Distinguishable with red-green colour blindness (Okabe and Ito).
_LAYER_COLOURS = ("#0072B2", "#E69F00", "#56B4E9", "#F0E442")
_PROGRAM_COLOUR = "#009E73"
_INCHES_WIDE = 10.0
_INCHES_PER_RUN = 0.45
_INCHES_AROUND = 1.8
# Space to the right of the longest bar for its figure.
_MARGIN = 0.18


def check(path: Path) -> None:
    """Raise `InvalidSetting` unless the suffix is a supported format and Matplotlib imports."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidSetting(
            f"{path} does not say which kind of picture to draw; end it with "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    _figure_module()


def _figure_module() -> Any:
    # Not pyplot, which looks for a display.
    return imported("matplotlib.figure", "--plot needs Matplotlib", "plot")


def write_plot(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the rows that have figures to `path`, in the format given by its suffix.

    Returns whether there were any; if not, no file is written. Raises `InvalidSetting` as `check`
    does, and `CacheUnwritable`.
    """
    check(path)
    runs = [row.summary for row in rows]
    runs = [run for run in runs if run.error is None]
    if not runs:
        return False
    figure = draw(runs, repeat=max(len(row.samples) for row in rows))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
    return True


def draw(runs: Sequence[Run], repeat: int = 1) -> Any:
    """Return a Matplotlib `Figure` with a group of bars for each run.

    Op times and program time can differ by orders of magnitude, so there are two panels: op times
    in ms, stacked by layer, on the left, program time in s on the right.
    """
    height = _INCHES_AROUND + _INCHES_PER_RUN * len(runs)
    figure = _figure_module().Figure(figsize=(_INCHES_WIDE, height), layout="constrained")
    ops, program = figure.subplots(1, 2, sharey=True)
    _draw_op_times(ops, runs)
    _draw_program_times(program, runs)
    ops.set_yticks(range(len(runs)), labels=[_label(run, runs) for run in runs])
    ops.invert_yaxis()
    program.tick_params(left=False)
    for axes in (ops, program):
        axes.margins(x=_MARGIN)
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(runs, repeat))
    return figure


def _draw_op_times(axes: Any, runs: Sequence[Run]) -> None:
    layers = max(len(run.op_seconds) for run in runs)
    ends = [0.0] * len(runs)
    for layer in range(layers):
        times = [1e3 * sum(run.op_seconds[layer : layer + 1]) for run in runs]
        colour = _LAYER_COLOURS[layer % len(_LAYER_COLOURS)]
        axes.barh(range(len(runs)), times, left=ends, color=colour, label=f"conv{layer + 1}")
        ends = [end + time for end, time in zip(ends, times)]
    for place, end in enumerate(ends):
        axes.annotate(f"{end:.4g}", (end, place), (4, 0), textcoords="offset points", va="center")
    axes.set_xlabel("op time (ms)")
    if layers:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=layers, frameon=False)


def _draw_program_times(axes: Any, runs: Sequence[Run]) -> None:
    times = [run.elapsed_s or 0.0 for run in runs]
    axes.barh(range(len(runs)), times, color=_PROGRAM_COLOUR)
    for place, time in enumerate(times):
        axes.annotate(f"{time:.2f}", (time, place), (4, 0), textcoords="offset points",
                      va="center")  # fmt: skip
    axes.set_xlabel("program time (s)")


def _label(run: Run, runs: Sequence[Run]) -> str:
    one_term = len({other.term for other in runs}) == 1
    return f"{run.script} {run.model}" + ("" if one_term else f" ({run.term})")


def _title(runs: Sequence[Run], repeat: int) -> str:
    terms = ", ".join(dict.fromkeys(run.term for run in runs))
    images = f"{runs[0].size} image{'s' if runs[0].size > 1 else ''}"
    medians = f", median of {repeat} runs" if repeat > 1 else ""
    return f"{images}, {'terms' if ',' in terms else 'term'} {terms}{medians}"
