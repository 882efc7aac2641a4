"""`ece408 cache`: lists or removes the contents of the cache folder.

Users may keep other files in the folder, so only the kinds of content that this package creates are
listed and removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import InvalidSetting
from ..files.cachedir import writing
from . import arguments

KINDS = (
    *("fashion-mnist", "resized", "training"),
    *("cpu-kernels", "cuda-kernels", "cuda-tuning", "emulated-kernels", "mxnet-functions"),
)


def add(commands: Any) -> None:
    """Add `ece408 cache`."""
    parser = arguments.add_command(
        commands, "cache", "list or remove what is kept in the cache folder"
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "clear"),
        default="list",
        help="list: print size, number of files and path of each kind of content; clear: remove "
        "it (default: %(default)s)",
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"only these: {', '.join(KINDS)} (default: all)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.action == "clear":
        found, verb = clear(options.kinds), "removed "
    else:
        found, verb = entries(options.kinds), ""
    for entry in found:
        size = entry.size_bytes / (1 << 20)
        print(f"{verb}{size:9.1f} MiB {entry.files:5} files  {entry.path}")
    if not found:
        print(f"ece408: nothing to {options.action} in {settings.cache()}", file=sys.stderr)


@dataclass(frozen=True)
class Entry:
    """One kind of content: its path, its size in bytes, and its number of files."""

    kind: str
    path: Path
    size_bytes: int
    files: int


def entries(kinds: Iterable[str] = ()) -> list[Entry]:
    """Return the cache's content of `kinds`, or of every kind; empty without a cache.

    A symbolic link counts as a link. Raises `InvalidSetting` for an unknown kind.
    """
    folder = settings.cache()
    found = [(kind, folder / kind) for kind in _known(kinds)]
    return [_measure(kind, path) for kind, path in found if os.path.lexists(path)]


def clear(kinds: Iterable[str] = ()) -> list[Entry]:
    """Remove the cache's content of `kinds`, or of every kind; return the removed entries.

    Below the cache folder, symbolic links are removed, not followed.

    Raises `InvalidSetting` for an unknown kind, before removing anything, and `CacheUnwritable`
    when something cannot be removed.
    """
    removed = []
    for entry in entries(kinds):
        with writing(entry.path):
            _remove(entry.path)
        removed.append(entry)
    return removed


def _known(kinds: Iterable[str]) -> list[str]:
    wanted = list(dict.fromkeys(kinds))
    for kind in wanted:
        if kind not in KINDS:
            raise InvalidSetting(
                f"unknown kind of cache content {kind!r}; there are: {', '.join(KINDS)}"
            )
    return wanted or list(KINDS)


def _measure(kind: str, path: Path) -> Entry:
    sizes = list(_file_sizes(path))
    return Entry(kind, path, sum(sizes), len(sizes))


def _file_sizes(path: Path) -> Iterator[int]:
    """Yield the size in bytes of each file and link at or below `path`."""
    # Skip files that vanish meanwhile or are unreadable.
    with contextlib.suppress(OSError):
        if _is_folder(path):
            for child in path.iterdir():
                yield from _file_sizes(child)
        else:
            yield path.lstat().st_size


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()
