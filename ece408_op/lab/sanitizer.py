"""NVIDIA's compute-sanitizer on a CUDA file, with source lines: out-of-bounds accesses, races,
uninitialised memory, and divergent barriers.

https://docs.nvidia.com/compute-sanitizer describes the tools and their output.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.emulator import findings
from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error, ProfilerMissing
from ..problem import ConvProblem
from . import observed
from .session import Ended, Session

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Small problems, because a tool slows kernels down.
PROBLEMS = ("b2,c1,h70,w70,m12,k5", "b2,c12,h33,w33,m24,k5", "b3,c2,h21,w18,m5,k3")
_FOLDERS = "/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}
_SUMMARY = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY: (.*)$")
_PLACE = re.compile(r"\bin (\S+:\d+)")
_THREAD = re.compile(r"\b[Bb]y (threads? \(.*)$")


@dataclass
class Finding:
    """One kind of error at one location: description, source line, first thread, and number of
    reports. A warning is not an error by itself."""

    text: str
    place: str
    thread: str
    count: int = 1
    warning: bool = False


@dataclass(frozen=True)
class Sanitized:
    """Findings of one tool. `failure` says why they are missing or incomplete."""

    tool: str
    findings: tuple[Finding, ...]
    failure: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.failure and all(each.warning for each in self.findings)


def find() -> str:
    """Return the path of compute-sanitizer. Raises `ProfilerMissing` if it is not found."""
    name = "compute-sanitizer"
    found = shutil.which(name) or shutil.which(name, path=_FOLDERS)
    if found is None:
        raise ProfilerMissing(
            "compute-sanitizer is not on PATH or in /usr/local/cuda/bin; install the CUDA toolkit"
        )
    return found


def sanitize(
    file: KernelFile,
    problems: Sequence[ConvProblem] = (),
    progress: Callable[[], object] = lambda: None,
) -> list[Sanitized]:
    """Run each tool while a CUDA file computes these problems, or small ones.

    The tools run concurrently, each on a process of its own, isolated as for checking; `progress`
    is called after each. Raises `ProfilerMissing`, `KernelCompileFailed` and `NoUsableGpu`.
    """
    program = find()
    chosen = list(problems) or [ConvProblem.parse(text) for text in PROBLEMS]
    # Compile once: the result is cached.
    with Session(file):
        pass

    def one(tool: str) -> Sanitized:
        found = _run(tool, program, file, chosen)
        progress()
        return found

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return list(pool.map(one, TOOLS))


def told(session: Session) -> list[dict[str, Any]]:
    """Return the emulator's findings since the last call, even if the session has ended."""
    try:
        return findings.accepted(session.findings())
    except (Ended, Ece408Error):
        return findings.left(session.scratch)


def of_emulator(taken: dict[bytes, list[dict[str, Any]]]) -> Sanitized:
    """Resolve the emulator's findings, reported by the kernels' process, by the content of their
    library."""
    found: dict[tuple[str, str], Finding] = {}
    for content, told in taken.items():
        for each in findings.located(told, content):
            known = found.setdefault(
                (each.kind, each.place),
                Finding(each.title, each.place, each.by, 0, each.kind in findings.WARNINGS),
            )
            known.count += each.count
    return Sanitized("emulator", tuple(found.values()))


def _run(tool: str, program: str, file: KernelFile, problems: Sequence[ConvProblem]) -> Sanitized:
    with tempfile.TemporaryDirectory(prefix="ece408-sanitizer-") as folder:
        log = Path(folder) / "log"
        command = [program, "--tool", tool, *_OPTIONS.get(tool, ()), "--log-file", str(log)]
        command += ["--target-processes", "application-only", "--show-backtrace", "no"]
        failure = observed.compute(file, command, problems)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    findings, ended = parse(text)
    # A tool ends a kernel at its first error.
    if findings:
        failure = ""
    elif not ended:
        failure = failure or "it ended without a summary"
    return Sanitized(tool, findings, failure)


def parse(log: str) -> tuple[tuple[Finding, ...], bool]:
    """Return the findings in a tool's log, merged by kind and location, and whether the tool
    completed."""
    found: dict[tuple[str, str], Finding] = {}
    ended = False
    for block in _blocks(log):
        if _SUMMARY.match(block[0]):
            ended = True
            continue
        place = next(filter(None, map(_PLACE.search, block)), None)
        if place is None:
            continue
        where = f"{Path(place[1].rpartition(':')[0]).name}:{place[1].rpartition(':')[2]}"
        title = _title(block)
        if (title, where) in found:
            found[title, where].count += 1
            continue
        thread = next(filter(None, map(_THREAD.search, block)), None)
        warning = block[0].startswith(("Warning", "Info"))
        found[title, where] = Finding(title, where, thread[1] if thread else "", warning=warning)
    return tuple(found.values()), ended


def _blocks(log: str) -> list[list[str]]:
    """Return the reports in a log, each with its indented lines."""
    blocks: list[list[str]] = []
    for line in log.splitlines():
        content = line.lstrip("=")
        if line.startswith("====") and content.strip():
            if content.startswith("     ") and blocks:
                blocks[-1].append(content.strip())
            else:
                blocks.append([content.strip()])
    return blocks


def _title(block: Sequence[str]) -> str:
    """Return a report's title: its first line, and for an access the text beside its address, for a
    race the other access."""
    race = re.match(r"(Error|Warning|Info): Race reported between (\w+) access", block[0])
    if race:
        other = next((line for line in block[1:] if line.startswith("and ")), "and another access")
        place = _PLACE.search(other)
        where = f" at {Path(place[1]).name}" if place else ""
        return f"race of a {race[2].lower()} and a {other.split()[1].lower()}{where}"
    distance = next((line for line in block if "the nearest allocation" in line), "")
    found = re.search(r"is (.* bytes) (after|before|inside).* of size (.* bytes)", distance)
    return f"{block[0]}, {found[1]} {found[2]} an array of {found[3]}" if found else block[0]
