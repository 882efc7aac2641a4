"""Folders and files that are made once and kept: created, locked, and written as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import CacheUnwritable


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `CacheUnwritable` about `path`.

    The block should do nothing but write there, so that no other failure is mistaken for one.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CacheUnwritable(
            f"cannot write {path}: {reason}; make room or make it writable, or choose another "
            "folder (ECE408_CACHE for the cache)"
        ) from error


def ensure_folder(path: Path) -> Path:
    """Create the folder `path`, with its parents, unless it is there; returns it.

    Raises `CacheUnwritable` when it cannot be created or nothing can be written in it.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write in this folder")
    return path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which it becomes when the block ends well.

    The temporary file exists, is empty, and has the suffix of `path`; the folder is created if
    need be. When the block fails or is interrupted, the temporary file is removed and `path` is
    as it was: nobody ever sees half a file under the final name.

    Raises `CacheUnwritable`, also for an `OSError` in the block, which should only write.
    """
    ensure_folder(path.parent)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.stem}.{unique}{path.suffix}")
    try:
        with writing(path):
            if path.exists() and not path.is_file():
                raise OSError("it is not a regular file")
            # Unlike tempfile's, this file has the permissions that the user's umask asks for.
            temporary.touch(exist_ok=False)
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def locked(folder: Path, purpose: str) -> Iterator[None]:
    """Keep other processes that lock `folder` out of the block; waits for them, and says so.

    `purpose` completes "waiting for another process to ...". On a file system without locks
    nothing is locked. Raises `CacheUnwritable` when the lock's file cannot be created.
    """
    with writing(folder):
        # Reading is enough to lock, and all that others may do with this user's file.
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            _lock(descriptor, purpose)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, purpose: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"ece408: waiting for another process to {purpose}", file=sys.stderr)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
