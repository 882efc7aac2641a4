"""Preservation of a student's notes, between marks in report.md, when the report is made again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import NotesUnreadable

_BEGIN = re.compile(r"<!-- notes: (\S+) -->\s*")
_END = "<!-- end of notes -->"


def read(path: Path) -> dict[str, str]:
    """Return the notes in a report, by the key of their section; {} without a report.

    Raises `NotesUnreadable` unless marks come in pairs, each key once: writing the report again
    would lose text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise NotesUnreadable(f"{path} cannot be read: {error}; move it away") from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> dict[str, str]:
    notes: dict[str, str] = {}
    key: str | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        begin = _BEGIN.fullmatch(line)
        ends = line.strip() == _END
        if begin and (key is not None or begin[1] in notes):
            raise _misplaced(path, number, line)
        if ends and key is None:
            raise _misplaced(path, number, line)
        if begin:
            key, lines = begin[1], []
        elif ends and key is not None:
            notes[key] = "\n".join(lines).strip("\n")
            key = None
        else:
            lines.append(line)
    if key is not None:
        raise NotesUnreadable(
            f"{path} has notes on {key} without an end; put a line {_END} after them"
        )
    return notes


def _misplaced(path: Path, number: int, line: str) -> NotesUnreadable:
    return NotesUnreadable(
        f"{path}, line {number}: {line.strip()!r} is out of place; notes begin with a line "
        f"<!-- notes: SECTION -->, each section once, and end with {_END}"
    )


class Sections:
    """Notes for a new report, which `place` inserts section by section."""

    def __init__(self, notes: Mapping[str, str]) -> None:
        self._notes = dict(notes)
        self._placed: set[str] = set()

    def place(self, key: str) -> str:
        """Return the section's notes with their marks."""
        self._placed.add(key)
        text = self._notes.get(key, "")
        return f"<!-- notes: {key} -->\n{text}\n{_END}"

    def homeless(self) -> list[str]:
        """Return the keys of non-empty notes whose sections this report lacks."""
        return [key for key, text in self._notes.items() if text and key not in self._placed]


def without_marks(text: str) -> str:
    """Return the text without the lines that are marks."""
    lines = text.splitlines()
    kept = [line for line in lines if not _BEGIN.fullmatch(line) and line.strip() != _END]
    return "\n".join(kept) + "\n"
