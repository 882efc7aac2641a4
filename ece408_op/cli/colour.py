"""Terminal output: colour for status words, and removal of control characters from untrusted names
and messages.

No colour if the output is no terminal, with NO_COLOR set (https://no-color.org) or TERM=dumb.
"""

from __future__ import annotations

import os
from typing import TextIO

from ..errors import printable

_CODES = {"green": "32", "yellow": "33", "red": "31"}


def paint(text: str, colour: str, stream: TextIO) -> str:
    """Return the text in "green", "yellow" or "red", if the stream supports it."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def plain(text: str) -> str:
    """Return lines that contain untrusted text, each made `printable`."""
    return "\n".join(map(printable, text.split("\n")))
