"""The report's templates, and formatting of values as Markdown."""

from __future__ import annotations

import re
from typing import Any

from ..files.resources import imported
from .ladder import Gain
from .spread import Spread

# Characters with a meaning in Markdown; an underscore within a word has none.
_SPECIAL = re.compile(r"[\\*\[\]<]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def require() -> Any:
    """Return the module jinja2. Raises `InvalidSetting` unless it imports."""
    return imported("jinja2", "a report needs Jinja", "report")


def render(template: str, **values: Any) -> str:
    """Render a template of the folder templates/ with these values; text in HTML is escaped.

    A missing value is an error.
    """
    jinja2 = require()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ece408_op.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (block, prose, cell, ms, spread, gain)
    environment.filters.update({each.__name__: each for each in filters}, once=Once())
    return environment.get_template(template).render(**values)


def block(text: str) -> str:
    """Return the text as a block of code, whatever it contains."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def prose(text: str) -> str:
    """Escape text except code between backticks, so that Markdown shows it unchanged."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\g<0>", part)
                   for index, part in enumerate(parts))  # fmt: skip


def cell(text: object) -> str:
    """Escape text for a cell of a table."""
    return prose(" ".join(str(text).split())).replace("|", "\\|")


def ms(value: float | None) -> str:
    """Format milliseconds with three digits or more; empty for `None`."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def spread(value: Spread | None, single: bool = False, places: int | None = None) -> str:
    """Format a median and the quartiles; `single` adds a note if there is only one run. Empty for
    `None`.

    `places` is the number of decimals, by default as in `ms`.
    """
    if value is None:
        return ""
    parts = (value.median, value.low, value.high)
    median, low, high = (ms(each) if places is None else f"{each:.{places}f}" for each in parts)
    if value.runs == 1:
        return f"{median} (1 run)" if single else median
    return f"{median} ({low} to {high})"


def gain(value: Gain | None) -> str:
    """Format a gain, such as 1.25x over 1_naive; empty for `None`."""
    return "" if value is None else f"{value.factor:.2f}x over {cell(value.over)}"


class Once:
    """Returns each reason in full once, and afterwards a reference to it."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, reason: str) -> str:
        if reason in self._said:
            return "the reason is given above"
        self._said.add(reason)
        return prose(reason)
