"""Matplotlib figures as SVG for light and dark pages.

Colours in the file suit light pages; a style sheet within each picture replaces them if the reader
prefers dark, so that it works alone and embedded.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from ..files.resources import imported

WIDE = 9.0  # inches, the width of the page's text
PAPER, INK, FAINT = "#ffffff", "#1f2328", "#848d97"
# Each has enough contrast with the page for text (WCAG AA).
BLUE, ORANGE, GREEN, SLATE, RED, PINK = (
    *("#0b5cad", "#a85400", "#00734f", "#57677a", "#c0262d", "#a0348c"),
)
SERIES = (BLUE, ORANGE, GREEN, PINK)
DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    FAINT: "#767e88",
    BLUE: "#6cb6ff",
    ORANGE: "#f0a040",
    GREEN: "#4fd1a0",
    SLATE: "#a9b8c8",
    RED: "#ff8080",
    PINK: "#e58fd3",
}
# Id prefix of artists whose text has a halo in the page's colour.
GROUND = "ground"
_RULE = '[style*="{part}: {light}"]{{{part}:{dark}!important}}'
# Digits of one width, and a halo around letters that hides lines.
_TEXT = (
    "text{font-variant-numeric:tabular-nums}"
    f"[id^={GROUND}] text{{paint-order:stroke;stroke:{PAPER};stroke-width:4px}}"
)
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "ece408",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.color": FAINT,
}


def require() -> None:
    """Raise `InvalidSetting` unless Matplotlib imports."""
    _matplotlib("figure")


def _matplotlib(module: str) -> Any:
    # Not pyplot, which looks for a screen.
    return imported(f"matplotlib.{module}", "a report needs Matplotlib", "report")


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Apply the style to figures made, drawn and turned into text inside this block."""
    with _matplotlib("style").context(_STYLE):
        yield


def figure(width: float, height: float) -> Any:
    """Return an empty `Figure`, its size in inches. Raises `InvalidSetting` without Matplotlib."""
    return _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")


def number(value: float, _: int) -> str:
    """Return a tick's label on a logarithmic axis, without an exponent."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def shifted(axes: Any, points: float) -> Any:
    """Return the coordinates of an axes' data, moved to the right by `points`."""
    copy = _matplotlib("transforms").offset_copy
    return copy(axes.transData, axes.figure, points, 0, units="points")


def text(figure: Any) -> str:
    """Return the figure as SVG without a background; equal figures give equal text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    start = drawn.index("<svg")
    end = drawn.index(">", start) + 1
    return f"{drawn[start:end]}\n<style>{_TEXT}{_dark_rules()}</style>{drawn[end:]}"


def _dark_rules() -> str:
    rules = (
        _RULE.format(part=part, light=light, dark=dark)
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    ground = f"[id^={GROUND}] text{{stroke:{DARK[PAPER]}}}"
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}{ground}}}"
