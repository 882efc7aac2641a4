"""Fashion-MNIST from the Debian and Ubuntu package, downloaded but not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...files.cachedir import ensure_folder, replace, scratch_folder, writing
from . import idx

PACKAGE = "dataset-fashion-mnist"
# Folder of the package's files, relative to the root of the file system.
FOLDER = "usr/share/datasets/fashion-mnist"

# Time limit of a command in seconds; without a connection the tools give up earlier.
_COMMAND_S = 1800.0


class PackageFailed(Exception):
    """The package cannot be obtained; the text says why."""


def extract(folder: Path) -> None:
    """Put all four verified files into `folder`, which must be locked. Needs no root and changes
    nothing in the system.

    Raises `PackageFailed`, and `CacheUnwritable` when `folder` cannot be written.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise PackageFailed(f"there is no {tool} here")
    # In the same folder, so that files can be renamed instead of copied.
    with scratch_folder(folder) as work:
        # The tools run in it, where a relative path would have another meaning.
        inside = work.resolve()
        package = _download_package(inside)
        unpacked = inside / "unpacked"
        _command(["dpkg-deb", "-x", str(package), str(unpacked)], inside)
        _install(unpacked / FOLDER, folder)


def _download_package(work: Path) -> Path:
    """Run `apt-get download` with the system's package lists, or else with private, new ones."""
    lists = work / "lists"
    for each in (lists / "partial", work / "cache" / "archives" / "partial"):
        ensure_folder(each)
    options = [
        f"Dir::Cache={work / 'cache'}",
        # When root calls apt, it would change to a user that may not write here.
        "APT::Sandbox::User=root",
        # Otherwise an update without a connection succeeds, and the reason is lost.
        "APT::Update::Error-Mode=any",
        "Acquire::Retries=1",
        "Acquire::http::Timeout=20",
        "Acquire::https::Timeout=20",
    ]
    try:
        return _apt_download(options, work)
    except PackageFailed:
        # A fresh container has no lists, an old machine outdated ones.
        options.append(f"Dir::State::Lists={lists}")
    update_failure = None
    try:
        _apt(["update"], options, work)
    except PackageFailed as failure:
        # A failing source does not matter if another one has the package.
        update_failure = failure
    try:
        return _apt_download(options, work)
    except PackageFailed as failure:
        raise update_failure or failure from None


def _apt_download(options: Sequence[str], work: Path) -> Path:
    _apt(["download", PACKAGE], options, work)
    packages = sorted(work.glob("*.deb"))
    if not packages:
        raise PackageFailed("apt-get download ended well but left no .deb file")
    return packages[0]


def _apt(arguments: Sequence[str], options: Sequence[str], work: Path) -> None:
    settings = [word for option in options for word in ("-o", option)]
    _command(["apt-get", "-q", *settings, *arguments], work)


def _command(command: Sequence[str], work: Path) -> None:
    """Run a tool in `work`; raise `PackageFailed` with its error message if it fails."""
    try:
        result = subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            # These tools print progress on stdout, which is reserved for results.
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_COMMAND_S,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise PackageFailed(f"{command[0]} took longer than {_COMMAND_S:.0f} s") from error
    except OSError as error:
        raise PackageFailed(f"{command[0]} does not run: {error.strerror}") from error
    if result.returncode != 0:
        said = _complaint(result.stderr) or f"exit status {result.returncode}"
        raise PackageFailed(f"{command[0]}: {said}")


def _complaint(stderr: str) -> str:
    """Return the line that names the cause: apt's first error, not warnings or follow-up errors."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line[2:].strip() for line in lines if line.startswith("E:")]
    return (errors or lines or [""])[0]


def _install(source: Path, folder: Path) -> None:
    for kind in idx.KINDS:
        for expected in idx.files(kind):
            path = source / f"{expected.name}.gz"
            try:
                idx.parse(path, expected)
            except (idx.Damage, OSError) as error:
                raise PackageFailed(f"its {path.name}: {error}") from error
            target = folder / path.name
            with writing(target):
                replace(path, target)
