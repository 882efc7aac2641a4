"""Files with a checksum, for content that could do harm: read only if the checksum matches and no
other user can have written them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import CacheUntrusted
from .cachedir import atomic_path, ensure_folder, in_cache, locked

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Damage(Exception):
    """Description of wrong content, with its path and without advice."""


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file for `read_sealed` atomically. Raises `CacheUnwritable`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content + _seal(path, content))


def read_sealed(path: Path) -> bytes:
    """Return exactly the content that `write_sealed` wrote, by this user or root.

    Raises `Damage` when the content differs or is unreadable, `CacheUntrusted` when others can have
    written it, and `FileNotFoundError`.
    """
    try:
        check_trust(path)
        whole = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damage(f"{path} cannot be read: {error.strerror or error}") from error
    length = max(len(whole) - hashlib.sha256().digest_size, 0)
    content, seal = whole[:length], whole[length:]
    if seal != _seal(path, content):
        raise Damage(f"{path} is damaged")
    return content


def kept_or_compiled(path: Path, what: str, compile_it: Callable[[], bytes]) -> bytes:
    """Return the file at `path`; if it is missing, write the result of `compile_it` to it first.

    Concurrent threads and processes compile once. A damaged or untrusted file is compiled again,
    with a line on stderr. Raises what `compile_it` raises, and `CacheUnwritable`.
    """
    with contextlib.suppress(FileNotFoundError, Damage, CacheUntrusted):
        return read_sealed(path)
    ensure_folder(path.parent)
    # A lock per file: different kernels may be compiled concurrently.
    with locked(ensure_folder(path.parent / "locks" / path.stem), f"compile {what}"):
        try:
            return read_sealed(path)
        except FileNotFoundError:
            pass
        except (Damage, CacheUntrusted) as reason:
            print(f"ece408: compiling {what} again: {reason}", file=sys.stderr)
        content = compile_it()
        write_sealed(path, content)
        return content


def _seal(path: Path, content: bytes) -> bytes:
    """Return a checksum of name and content, so that a file under another name counts as
    damaged."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def check_trust(path: Path) -> None:
    """Raise `CacheUntrusted` if users other than this one and root can have written the file.

    Checks the file, its folder, and that folder's parents up to the cache folder. Raises
    `FileNotFoundError`.
    """
    above = [each for each in path.parents if each == path.parent or in_cache(each)]
    for each in (path, *above):
        status = each.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise CacheUntrusted(
                f"{each} belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())}; remove "
                "it, or set ECE408_CACHE to a folder of your own"
            )
        if status.st_mode & _BY_OTHERS:
            raise CacheUntrusted(
                f"{each} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"remove it, or, if you trust its content, chmod go-w {each}"
            )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
