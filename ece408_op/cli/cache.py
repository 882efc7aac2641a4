"""What lies in the cache folder, and its removal.

The folder may be one that the user keeps other things in, so only the kinds of content that this
package makes are listed and removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import InvalidSetting
from ..files.cachedir import writing

KINDS = ("fashion-mnist", "resized", "training", "cpu-kernels", "cuda-kernels", "cuda-tuning")


@dataclass(frozen=True)
class Entry:
    """One kind of content: where it is, its size in bytes, and its number of files."""

    kind: str
    path: Path
    size_bytes: int
    files: int


def entries(kinds: Iterable[str] = ()) -> list[Entry]:
    """What the cache holds of `kinds`, or of every kind; empty when there is no cache.

    A symbolic link counts as the link that it is. Raises `InvalidSetting` for an unknown kind.
    """
    folder = settings.cache()
    found = [(kind, folder / kind) for kind in _known(kinds)]
    return [_measure(kind, path) for kind, path in found if os.path.lexists(path)]


def clear(kinds: Iterable[str] = ()) -> list[Entry]:
    """Remove what the cache holds of `kinds`, or of every kind; returns what was removed.

    Symbolic links are removed, not followed, below the cache folder.

    Raises `InvalidSetting` for an unknown kind, before anything is removed, and
    `CacheUnwritable` when something cannot be removed.
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
    """Size in bytes of each file and link at or below `path`."""
    # Skip what vanishes meanwhile or may not be read.
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
