"""Creation and locking of folders, and atomic writing of files.

The cache folder is created for its user alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .. import settings
from ..errors import CacheUnwritable

# Prefix of unfinished files and folders, followed by the kernel's boot id: locks show whether a
# process still works on them only among processes of one kernel.
_UNFINISHED = ".ece408-"
_RUN_OF_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_DAY_S = 24 * 60 * 60


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block into a `CacheUnwritable` about `path`.

    The block should only write there, so that no other failure is mistaken for one.
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
    """Create the folder `path` with its parents if it is missing; return it.

    The cache folder and its subfolders are created for this user alone. Raises `CacheUnwritable`
    when it cannot be created or written to.
    """
    with writing(path):
        missing = [each for each in path.parents if not each.exists()]
        for each in (*reversed(missing), path):
            each.mkdir(0o700 if in_cache(each) else 0o777, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write in this folder")
    return path


def in_cache(path: Path) -> bool:
    """Return whether this is the cache folder or is inside it."""
    try:
        return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(settings.cache()))
    except RuntimeError:
        # A user without a home has no cache folder.
        return False


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds.

    The temporary file exists, is empty, and has the suffix of `path`; the folder is created if
    necessary. If the block fails or is interrupted, the temporary file is removed and `path` stays
    unchanged: a half-written file never has the final name, not even after a power cut. Unfinished
    files of killed processes in the folder are removed.

    Raises `CacheUnwritable`, also for an `OSError` in the block, which should only write.
    """
    ensure_folder(path.parent)
    _remove_abandoned(path.parent)
    temporary = path.with_name(f"{_unfinished_here()}-{secrets.token_hex(4)}-{path.name}")
    with writing(path):
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        descriptor = _create(temporary, 0o600 if in_cache(path) else 0o666)
    try:
        with writing(path):
            yield temporary
            replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file by `atomic_path`. Raises `CacheUnwritable`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder in `folder`, removed at the end, or by the next user of `folder` if this
    process is killed.

    Raises `CacheUnwritable` when it cannot be created. `folder` must be locked.
    """
    _remove_abandoned(folder)
    with writing(folder):
        made = Path(tempfile.mkdtemp(prefix=f"{_unfinished_here()}-", dir=folder))
        descriptor = os.open(made, os.O_RDONLY)
    _hold(descriptor)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(descriptor)


def _unfinished_here() -> str:
    try:
        return f"{_UNFINISHED}{_RUN_OF_KERNEL.read_text()[:8]}"
    except OSError:
        return f"{_UNFINISHED}unknown"


def _create(temporary: Path, mode: int) -> int:
    """Create and lock the file, with permissions `mode` restricted by the umask."""
    while True:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        _hold(descriptor)
        # Before it was locked, another process may have removed it as abandoned.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _hold(descriptor: int) -> None:
    """Mark an unfinished file or folder as in use until it is closed."""
    # On file systems without locks, its age decides.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _remove_abandoned(folder: Path) -> None:
    """Remove this user's unfinished files and folders that no process uses."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_UNFINISHED}*"):
            # Skip files that vanish meanwhile or cannot be removed.
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(status.st_mode)):
        return
    flags = os.O_RDONLY if is_folder else os.O_RDWR
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_held(descriptor, path.name):
            return
        shutil.rmtree(path) if is_folder else path.unlink()
    finally:
        os.close(descriptor)


def _is_held(descriptor: int, name: str) -> bool:
    """Return whether a process uses it; one younger than a day may belong to another machine."""
    young = time.time() - os.fstat(descriptor).st_mtime < _DAY_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return young
    return young and not name.startswith(_unfinished_here())


def replace(temporary: Path, path: Path) -> None:
    """Flush `temporary` to disk, rename it to `path`, and flush the folder."""
    _flush(temporary)
    os.replace(temporary, path)
    # Some file systems cannot do it for folders.
    with contextlib.suppress(OSError):
        _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, purpose: str) -> Iterator[None]:
    """Exclude other processes that lock `folder` from the block; wait for them, and say so.

    `purpose` completes "waiting for another process to ...". On a file system without locks nothing
    is locked. Raises `CacheUnwritable` when the lock file cannot be created, or its path is not a
    file.
    """
    descriptor = _open_lock(folder / ".lock")
    try:
        with contextlib.suppress(OSError):
            _lock(descriptor, purpose)
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    with writing(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise OSError("it is not a regular file (remove it)")
        # Reading is enough for a lock, and is all that others may do with this user's file. If a
        # pipe or a link appears after the check above, open() neither waits for it nor follows it.
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _lock(descriptor: int, purpose: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"ece408: waiting for another process to {purpose}", file=sys.stderr)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
