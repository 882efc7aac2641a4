"""HTTP download of one file of Fashion-MNIST: resumable, verified before it is renamed."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from ...files.cachedir import replace, writing
from . import idx

# Seconds for which a server may say nothing, and between two attempts.
ANSWER_S = 10.0
PAUSE_S = 1.0
ATTEMPTS = 3
_BLOCK = 1 << 16


class AddressFailed(Exception):
    """The address cannot provide the file; the text says why."""


class _Interrupted(Exception):
    """A transfer ended early or the server had a temporary error; a retry may help."""


def part_of(target: Path) -> Path:
    """Return the path of an unfinished download of `target`."""
    return target.with_name(f"{target.name}.part")


def download(url: str, target: Path, expected: idx.Expected) -> None:
    """Fetch the gzip-compressed `url`; it becomes `target` once its content is as `expected`.

    Until then it is `target`.part, which remains after an interruption; the next call resumes it.
    Progress goes to stderr if that is a terminal.

    Raises `AddressFailed`, without a retry when the server does not answer within `ANSWER_S` or
    does not have the file, and `CacheUnwritable`.
    """
    part = part_of(target)
    reason = ""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * attempt)
        resumed = _size(part) > 0
        try:
            _receive(url, part, expected.most_bytes)
            idx.parse(part, expected)
        except _Interrupted as interruption:
            reason = str(interruption)
        except idx.Damage as damage:
            with writing(part):
                part.unlink()
            reason = f"what {url} gave {damage}"
            # In a resumed file the damage may be in the part from an earlier call.
            if not resumed:
                break
        else:
            with writing(target):
                replace(part, target)
            return
    raise AddressFailed(reason)


def _receive(url: str, part: Path, most: int) -> None:
    """Append the missing bytes to `part`, or rewrite it if the server sends everything.

    Raises `_Interrupted` when the transfer ends early, `idx.Damage` when the total would exceed
    `most` bytes, and `AddressFailed` when a retry cannot help.
    """
    start = _size(part)
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        response = _open(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            # Nothing is left to send; verification decides whether the file is right.
            with writing(part):
                part.touch()
            return
        kind = _Interrupted if error.code >= http.client.INTERNAL_SERVER_ERROR else AddressFailed
        raise kind(f"{url} answered {error.code} {error.reason}") from error
    with response:
        if not _continues_at(response, start):
            start = 0
        with writing(part):
            file = part.open("ab" if start else "wb")
        with file:
            _copy(url, response, file, start, most)


def _open(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=ANSWER_S)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise AddressFailed(f"{request.full_url} does not answer ({reason})") from error


def _continues_at(response: Any, start: int) -> bool:
    """Return whether the response is the requested rest of the file from `start`."""
    if response.status != http.client.PARTIAL_CONTENT:
        return False
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return match is not None and int(match[1]) == start


def _copy(url: str, response: Any, file: BinaryIO, start: int, most: int) -> None:
    length = response.headers.get("Content-Length")
    total = start + int(length) if length and length.isdigit() else None
    name = url.rpartition("/")[2]
    done = start
    with tqdm(
        desc=name, total=total, initial=start, unit="B", unit_scale=True, leave=False, disable=None
    ) as progress:
        while True:
            try:
                block = response.read(_BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise _Interrupted(f"{url} broke off after {done} bytes ({error})") from error
            if not block:
                break
            if done + len(block) > most:
                raise idx.Damage(f"is too long: more than {most} bytes")
            with writing(Path(file.name)):
                file.write(block)
                file.flush()
            done += len(block)
            progress.update(len(block))
    if total is not None and done < total:
        raise _Interrupted(f"{url} broke off after {done} of {total} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
