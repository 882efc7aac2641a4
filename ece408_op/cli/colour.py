"""What is written to terminals: colour for the words that say whether something is well, and
nothing that others have put into names and messages to steer the terminal.

No colour where the output is no terminal, with NO_COLOR set (https://no-color.org) or TERM=dumb.
"""

from __future__ import annotations

import os
from typing import TextIO

_CODES = {"green": "32", "yellow": "33", "red": "31"}


def paint(text: str, colour: str, stream: TextIO) -> str:
    """The text in "green", "yellow" or "red", as it is to be written to the stream."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def plain(text: str) -> str:
    """The text with what is not printable, such as escape sequences, as Python writes it."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
