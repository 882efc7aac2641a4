"""Download of Fashion-MNIST's files from the official address, else from the distribution.

Needs no root. A file gets its final name only after its content has been verified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import DownloadFailed
from ...files.cachedir import ensure_folder, locked, writing
from . import distribution, idx
from .distribution import PACKAGE, PackageFailed
from .download import AddressFailed, download, part_of

OFFICIAL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


def fetch(folder: Path, kinds: Iterable[str] = idx.KINDS, base: str = OFFICIAL) -> list[Path]:
    """Put the verified, gzip-compressed files of `kinds` into `folder`; return their paths.

    Existing sound `.gz` files stay, damaged ones are replaced. The files come from the address
    `base`, where interrupted downloads are resumed; if that fails, from the package
    `dataset-fashion-mnist` by `apt-get download`. Notices go to stderr, and progress if that is a
    terminal.

    Raises `DownloadFailed` when neither source has them, `CacheUnwritable` when `folder` cannot be
    written, and `InvalidSetting` for an unknown kind.
    """
    wanted = [expected for kind in kinds for expected in idx.files(kind)]
    ensure_folder(folder)
    with locked(folder, f"fetch Fashion-MNIST into {folder}"):
        lacking = [each for each in wanted if not _is_sound(_target(folder, each), each)]
        if lacking:
            _from_any_source(folder, lacking, base)
            _discard_parts(folder)
    return [_target(folder, each) for each in wanted]


def _target(folder: Path, expected: idx.Expected) -> Path:
    return folder / f"{expected.name}.gz"


def _is_sound(path: Path, expected: idx.Expected) -> bool:
    try:
        idx.parse(path, expected)
    except (idx.Damage, OSError):
        return False
    return True


def _from_any_source(folder: Path, lacking: Sequence[idx.Expected], base: str) -> None:
    _notice(f"fetching Fashion-MNIST from {base}")
    try:
        for each in lacking:
            target = _target(folder, each)
            download(f"{base.rstrip('/')}/{target.name}", target, each)
        return
    except AddressFailed as failure:
        address_failure = failure
    _notice(f"fetching Fashion-MNIST from the package {PACKAGE}, because {address_failure}")
    try:
        distribution.extract(folder)
    except PackageFailed as package_failure:
        raise DownloadFailed(
            f"Fashion-MNIST cannot be fetched: {address_failure}; and the package {PACKAGE}: "
            f"{package_failure}; install that package (Debian, Ubuntu), or give a folder that has "
            "the files with --data DIR (ECE408_DATA)"
        ) from package_failure


def _discard_parts(folder: Path) -> None:
    """Remove unfinished downloads of files that now exist."""
    for kind in idx.KINDS:
        for expected in idx.files(kind):
            target = _target(folder, expected)
            if target.exists():
                with writing(folder):
                    part_of(target).unlink(missing_ok=True)


def _notice(text: str) -> None:
    print(f"ece408: {text}", file=sys.stderr)
