"""What is written to terminals: colour for the words that say whether something is well, and
nothing that others have put into names and messages to steer the terminal.

No colour where the output is no terminal, with NO_COLOR set (https://no-color.org) or TERM=dumb.
"""

from __future__ import annotations

import os
from typing import TextIO

from ..errors import printable

_CODES = {"green": "32", "yellow": "33", "red": "31"}


def paint(text: str, colour: str, stream: TextIO) -> str:
    """The text in "green", "yellow" or "red", as it is to be written to the stream."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def plain(text: str) -> str:
    """Lines that others' names and messages are part of, as `printable` has each."""
    return "\n".join(map(printable, text.split("\n")))
