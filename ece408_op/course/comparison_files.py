"""Files of a comparison: checked before its runs; JSON output after them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.cachedir import ensure_folder, write_text, writing
from ..files.records import to_json
from ..operator.environment import machine
from .comparison import Options, Row


def check_writable(path: Path) -> None:
    """Create the folder of an output file; raise `CacheUnwritable` if it is not writable.

    An existing path must be a file: a device such as /dev/null would be replaced.
    """
    ensure_folder(path.parent)
    with writing(path):
        if path.exists() and not path.is_file():
            raise FileExistsError("something that is not a file has this name")


def write_json(path: Path, rows: Sequence[Row], options: Options) -> None:
    """Write `document` to `path` atomically. Raises `CacheUnwritable`."""
    write_text(path, to_json(document(rows, options)))


def document(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    """Return the comparison as strings, numbers, lists and dicts.

    "runs" has an entry for each row: medians, and all runs under "samples"; names and units are
    those of `Run`. "options" are those of the command line, "date" is local time with its UTC
    offset.
    """
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "options": dataclasses.asdict(options),
        "runs": [
            {
                **dataclasses.asdict(row.summary),
                "samples": [dataclasses.asdict(run) for run in row.samples],
            }
            for row in rows
        ],
    }
