"""Memory errors found by the emulator, with source lines."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import KernelFailed
from .library import runtime

# `Kind` of kernels/emulator/findings.h, in its order.
KINDS = (
    "reads out of bounds",
    "writes out of bounds",
    "reads freed memory",
    "writes freed memory",
    "misaligned access",
    "reads memory that was never written",
    "race between threads of a block",
    "race between blocks",
    "__syncthreads() that not all threads of the block reach",
    "threads of a block wait at different __syncthreads()",
    "wrong mask",
    "deadlock",
    "index beyond an array",
    "illegal address",
    "stopped",
    "failed CUDA call",
    "failed cudaFree()",
    "the host touches memory of the GPU",
    "race between streams",
)
# Kinds after which a kernel or file cannot continue.
ENDING = ("deadlock", "illegal address", "misaligned access", "stopped", "failed CUDA call")
# Kinds that are harmless by themselves, though seldom intended: threads that have ended count as
# waiting.
WARNINGS = ("__syncthreads() that not all threads of the block reach", "failed cudaFree()")
# Maximum number of findings in a process's answer.
_MOST = 64
# The file that survives the process.
_KEPT = ".findings"


class _Spot(ctypes.Structure):
    """`Spot` of kernels/emulator/findings.h."""

    _fields_ = [("offset", ctypes.c_uint64), ("line", ctypes.c_int32), ("file", ctypes.c_char * 60)]

    def told(self) -> str | int:
        """ "file:line", or an offset."""
        return f"{text_of(self.file)}:{self.line}" if self.file else int(self.offset)


class _Raw(ctypes.Structure):
    """`Finding` of kernels/emulator/findings.h."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("at", _Spot),
        ("other", _Spot),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("count", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("text", ctypes.c_char * 320),
        ("kernel", ctypes.c_char * 96),
    ]


@dataclass(frozen=True)
class Finding:
    """An error of one kind at one location, "file:line", with the first block and thread and the
    number of occurrences."""

    kind: str
    place: str
    kernel: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    count: int
    bytes: int
    text: str

    @property
    def title(self) -> str:
        """Description without location and thread."""
        size = f" ({self.bytes} bytes)" if self.bytes else ""
        return f"{self.kind}{size}: {self.text}"

    @property
    def by(self) -> str:
        """The first thread; empty for host code."""
        if not self.kernel:
            return ""
        return f"thread {_sizes(self.thread)} of block {_sizes(self.block)} of {self.kernel}"


def _sizes(numbers: Sequence[int]) -> str:
    return f"({','.join(map(str, numbers))})"


def take() -> list[dict[str, Any]]:
    """Return the findings since the last call, of all kernels in this process, as JSON values;
    `located` resolves lines."""
    library = runtime()
    if library is None:
        return []
    room = (_Raw * _MOST)()
    count = min(library.ece408_emulator_findings(room, _MOST), _MOST)
    found = [_told(raw) for raw in room[:count]]
    library.ece408_emulator_forget_findings()
    return found


def keep() -> None:
    """Also write findings to the folder for temporary files, where `left` reads them after this
    process has ended."""
    library = runtime()
    if library is not None:
        path = Path(tempfile.gettempdir()) / _KEPT
        library.ece408_emulator_keep_findings(str(path).encode())


def left(folder: Path) -> list[dict[str, Any]]:
    """Return findings that a process has written to its folder and not returned by `take`."""
    try:
        with open(folder / _KEPT, "rb") as file:
            content = file.read(8 + _MOST * ctypes.sizeof(_Raw))
    except OSError:
        return []
    count = min(int.from_bytes(content[:8], "little"), (len(content) - 8) // ctypes.sizeof(_Raw))
    if count <= 0:
        return []
    raws = (_Raw * count).from_buffer_copy(content, 8)
    # Validate, as the process may have written anything.
    return [_told(raw) for raw in raws if 0 <= raw.kind < len(KINDS)]


def _told(raw: _Raw) -> dict[str, Any]:
    return {
        "kind": KINDS[raw.kind],
        "place": raw.at.told(),
        "other": raw.other.told(),
        "kernel": text_of(raw.kernel),
        "block": list(raw.block),
        "thread": list(raw.thread),
        "count": raw.count,
        "bytes": raw.bytes,
        "text": text_of(raw.text),
    }


def accepted(answer: object) -> list[dict[str, Any]]:
    """Filter the answer of a kernel's process, whose code may have forged it: keep only values that
    `take` could have returned."""
    items = answer[:_MOST] if isinstance(answer, list) else []
    return [each for each in items if isinstance(each, dict) and _could_be_told(each)]


def _could_be_told(each: dict[str, Any]) -> bool:
    texts = {"kernel": 96, "text": 320}
    numbers = [each.get(role) for role in ("count", "bytes")]
    for role in ("block", "thread"):
        sizes = each.get(role)
        if not isinstance(sizes, list) or len(sizes) != 3:
            return False
        numbers += sizes
    for role in ("place", "other"):
        if isinstance(each.get(role), str):
            texts[role] = 80
        else:
            numbers.append(each.get(role))
    return (
        each.get("kind") in KINDS
        and all(isinstance(n, int) and 0 <= n < 1 << 64 for n in numbers)
        and all(isinstance(each.get(role), str) for role in texts)
        and all(len(each[role]) <= most for role, most in texts.items())
    )


def located(taken: Sequence[dict[str, Any]], content: bytes) -> list[Finding]:
    """Resolve the output of `take` for the library with this content; findings of one kind and line
    are merged."""
    told = [each[role] for each in taken for role in ("place", "other")]
    places = [each for each in told if isinstance(each, int) and each]
    lines: dict[Any, str] = {**lines_of(content, places)}
    found: dict[tuple[str, str], Finding] = {}
    for each in taken:
        finding = _finding(each, lines)
        place = finding.place
        known = found.get((finding.kind, place))
        if known is not None:
            finding = replace(known, count=known.count + finding.count)
        found[finding.kind, place] = finding
    return list(found.values())


def explained(error: KernelFailed, content: bytes) -> KernelFailed:
    """Return the error that ended a kernel of the library with this content, with the last finding,
    which `take` then does not return."""
    found = located(take(), content)
    if not found:
        return error
    last = found[-1]
    by = f", by {last.by}" if last.by else ""
    return KernelFailed(f"{error}; {last.place}: {last.title}{by}")


def ending(taken: Sequence[dict[str, Any]], content: bytes) -> Finding | None:
    """Return the finding in the output of `take` that ended a kernel or file, if any."""
    last = [each for each in taken if each.get("kind") in ENDING][-1:]
    return next(iter(located(last, content)), None)


def _finding(told: dict[str, Any], lines: dict[Any, str]) -> Finding:
    return Finding(
        told["kind"],
        str(lines.get(told["place"], told["place"])),
        told["kernel"],
        tuple(told["block"]),
        tuple(told["thread"]),
        told["count"],
        told["bytes"],
        told["text"].replace("{}", str(lines.get(told["other"], told["other"]))),
    )


def text_of(content: bytes) -> str:
    return content.decode(errors="replace")


def lines_of(content: bytes, places: Sequence[int]) -> dict[int, str]:
    """Return "file:line" of return addresses in a library: the line of the call. For calls inlined
    from the emulator's headers this is the line in the kernel's own source."""
    unknown = {place: f"address 0x{place:x}" for place in places}
    program = shutil.which("addr2line")
    if not places or program is None:
        return unknown
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        library.write(content)
        library.flush()
        # A call's line belongs to the byte before its return address.
        addresses = [hex(place - 1) for place in unknown]
        command = [program, "--inlines", "--addresses", "--exe", library.name, *addresses]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    chains = re.split(r"^0x[0-9a-f]+\n", result.stdout, flags=re.M)[1:]
    return {place: _line(chain, unknown[place]) for place, chain in zip(unknown, chains)}


def _line(chain: str, otherwise: str) -> str:
    for each in chain.splitlines():
        path, _, line = each.partition(" ")[0].rpartition(":")
        if "/kernels/emulator/" not in path and line.isdigit() and not path.startswith("?"):
            return f"{Path(path).name}:{line}"
    return otherwise
