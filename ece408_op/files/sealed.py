"""Files whose content could do harm: kept with a checksum, and read only if it fits and no other
user can have written them."""

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
    """What is wrong with a file's content, with its path and without advice."""


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file for `read_sealed`, as a whole. Raises `CacheUnwritable`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content + _seal(path, content))


def read_sealed(path: Path) -> bytes:
    """What `write_sealed` has written there, to the byte, by this user or by root.

    Raises `Damage` when it is not what was written or cannot be read, `CacheUntrusted` when others
    can have written it, and `FileNotFoundError`.
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
    """What is kept at `path`; otherwise what `compile_it` returns, which is kept from then on.

    It is compiled once, however many threads and processes ask for it, and again, with a line on
    stderr, where what is kept is damaged or not to be trusted. Raises what `compile_it` raises, and
    `CacheUnwritable`.
    """
    with contextlib.suppress(FileNotFoundError, Damage, CacheUntrusted):
        return read_sealed(path)
    ensure_folder(path.parent)
    # A lock per file: different kernels may be compiled side by side.
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
    """A checksum of name and content: a file under another one's name counts as damaged."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def check_trust(path: Path) -> None:
    """Raise `CacheUntrusted` if users other than this one and root can have written the file.

    Checks the file, its folder, and the folders from there up to the cache folder. Raises
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
