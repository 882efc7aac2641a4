"""Files in docs/results: a table to read and the same as JSON, with date, machine and versions."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from ece408_op.files.cachedir import atomic_path
from ece408_op.files.records import to_json
from ece408_op.operator.environment import machine


def show(prefix: Path | None, title: str, table: str, content: dict[str, Any]) -> None:
    """Print the table and, where a prefix is given, `write`."""
    print(table)
    if prefix is not None:
        write(prefix, title, table, content)


def write(prefix: Path, title: str, table: str, content: dict[str, Any]) -> None:
    """Write PREFIX.md and PREFIX.json. Raises `CacheUnwritable` where that cannot be."""
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about = machine()
    document = {"date": date, "machine": about, **content}
    header = ", ".join(f"{key} {_plain(value)}" for key, value in about.items())
    text = f"# {title}\n\n{date}: {header}\n\n{table}\n"
    for suffix, each in ((".md", text), (".json", to_json(document))):
        with atomic_path(prefix.with_name(prefix.name + suffix)) as temporary:
            temporary.write_text(each, encoding="utf-8")


def _plain(value: Any) -> str:
    return " and ".join(value) if isinstance(value, list) else str(value)
