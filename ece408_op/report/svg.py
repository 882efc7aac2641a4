"""Matplotlib figures as SVG that suits a light page and a dark one.

Colours are written as they are for light pages; a style sheet within each picture replaces them
where the reader prefers dark, so that it works by itself and embedded alike.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any

from ..errors import InvalidSetting

WIDE = 9.0  # inches, which a page has room for
INK, FAINT = "#1f2328", "#8b949e"
# Distinguishable with red-green colour blindness (Okabe and Ito).
BLUE, ORANGE, GREEN, SKY, RED, PINK = (
    *("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7"),
)
SERIES = (BLUE, ORANGE, GREEN, PINK)
_DARK = {INK: "#e6edf3", FAINT: "#6e7681", BLUE: "#4aa3df"}
_RULE = '[style*="{part}: {light}"]{{{part}:{dark}!important}}'
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
    try:
        # Not pyplot, which looks for a screen.
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise InvalidSetting(
            f"a report needs Matplotlib, which does not import ({error}); "
            "pip install 'ece408_op[report]'"
        ) from error


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Figures are to be made, drawn and turned into text inside this block."""
    with _matplotlib("style").context(_STYLE):
        yield


def figure(width: float, height: float) -> Any:
    """An empty `Figure`, its size in inches. Raises `InvalidSetting` without Matplotlib."""
    return _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")


def text(figure: Any) -> str:
    """The figure as SVG without a background; the same figure gives the same text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    start = drawn.index("<svg")
    end = drawn.index(">", start) + 1
    return f"{drawn[start:end]}\n<style>{_dark_rules()}</style>{drawn[end:]}"


def _dark_rules() -> str:
    rules = (
        _RULE.format(part=part, light=light, dark=dark)
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
