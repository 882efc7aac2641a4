"""Dot charts with a logarithmic axis: each row shows a median, its quartiles, and the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import svg
from .spread import Spread

# In points, from the axis: where figures end and words begin.
_FIGURES, _WORDS = 42, 47


@dataclass(frozen=True)
class Dot:
    """One row; `words` follow the figure."""

    spread: Spread
    colour: str
    marker: str = "o"
    words: str = ""


def draw(axes: Any, rows: Sequence[Dot | None], marks: Sequence[float] = ()) -> None:
    """Draw rows from the top. A line covers the middle half of the runs; the dot of a single run is
    hollow.

    The axis covers the rows and `marks`, in whole powers of ten.
    """
    for place, dot in enumerate(rows):
        if dot is not None:
            _row(axes, place, dot)
    shown = [value for dot in rows if dot for value in (dot.spread.low, dot.spread.high)]
    shown.extend(marks)
    axes.set_xscale("log")
    if shown:
        low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
        axes.set_xlim(10.0**low / 1.2, 10.0 ** max(high, low + 1) * 1.2)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(svg.number)
    axes.minorticks_off()
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)


def _row(axes: Any, place: int, dot: Dot) -> None:
    spread = dot.spread
    filling = "none"
    if spread.runs > 1:
        filling = dot.colour
        axes.plot([spread.low, spread.high], [place, place], color=dot.colour, linewidth=3)
    axes.plot(spread.median, place, marker=dot.marker, markersize=7, color=dot.colour,
              markerfacecolor=filling, markeredgewidth=1.5)  # fmt: skip
    words = ", ".join(filter(None, (dot.words, "" if spread.runs > 1 else "1 run")))
    for text, offset, side in ((figure(spread.median), _FIGURES, "right"), (words, _WORDS, "left")):
        if text:
            axes.annotate(text, (1, place), (offset, 0), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha=side, va="center_baseline")  # fmt: skip


def figure(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
