"""Programs with planted faults of tests/emulator/faults, and the findings of the emulator and of
compute-sanitizer's tools in each."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.backends.emulator import emulator_compiler, findings, library
from ece408_op.backends.emulator.findings import KINDS
from ece408_op.errors import KernelCompileFailed, KernelsMissing, NoUsableGpu
from ece408_op.lab import sanitizer

# Seconds after which a program counts as hanging.
LIMIT = 20
# compute-sanitizer's exit code for findings.
_FOUND = 9
_PROGRAM = re.compile(r"^(?:PROGRAM|CONVOLUTION|TILES|KERNEL(?:_\w+)?)\((\w+)\b", re.M)
_MARK = re.compile(r"// (\w+): (.+?)(?= // |$)")


@dataclass(frozen=True)
class Program:
    """One of a file's programs, and its faults: the kind and the "file:line" of each."""

    name: str
    marks: frozenset[tuple[str, str]]

    @property
    def lines(self) -> set[str]:
        return {place for _, place in self.marks}

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self.marks})

    @property
    def is_right(self) -> bool:
        return self.name.startswith("right_")


@dataclass(frozen=True)
class Outcome:
    """One tool's reports on one program: the kind and the "file:line" of each. `failure` says why
    the tool gave no answer."""

    reports: frozenset[tuple[str, str]] = frozenset()
    failure: str = ""

    def at_line(self, program: Program) -> bool:
        """Tell whether a report names the line of the fault."""
        return any(place in program.lines for _, place in self.reports)

    def record(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {"reports": sorted(map(list, self.reports)), "failure": self.failure}


def programs(path: Path) -> list[Program]:
    """Return the programs of a CUDA file, with the faults that its comments name."""
    text = path.read_text(encoding="utf-8")
    marks = [
        (name, kind, f"{path.name}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        for name, kind in _MARK.findall(line)
        if kind in KINDS
    ]
    return [
        Program(name, frozenset((kind, place) for of, kind, place in marks if of == name))
        for name in _PROGRAM.findall(text)
    ]


def emulated(
    loaded: ctypes.CDLL, content: bytes, name: str, seed: int | None
) -> tuple[int, set[tuple[str, str]]]:
    """Run a library's program, whose content is given, in the emulator, with a seed in the random
    order of that seed; return the program's cudaError_t, and each finding's kind and
    "file:line"."""
    findings.take()
    library.begin(loaded, library.Emulation(threads=2, seed=seed))
    error = loaded.run(name.encode())
    found = findings.located(findings.take(), content)
    return error, {(each.kind, each.place) for each in found}


def by_emulator(path: Path, seeds: Sequence[int | None]) -> dict[str, Outcome]:
    """Return the emulator's findings in each program of a file, of all seeds together, in this
    process. Raises what `emulator_compiler.library` raises."""
    content = emulator_compiler.program(path)
    loaded = library.load(content)
    outcomes = {}
    for program in programs(path):
        runs = (emulated(loaded, content, program.name, seed)[1] for seed in seeds)
        outcomes[program.name] = Outcome(frozenset().union(*runs))
    return outcomes


def compiled(path: Path, folder: Path) -> Path:
    """Compile a file by nvcc for this GPU, with line numbers. Raises `KernelsMissing` without nvcc,
    and `KernelCompileFailed`."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise KernelsMissing("nvcc is not on PATH or in /usr/local/cuda/bin")
    made = folder / path.stem
    command = [nvcc, "-lineinfo", "-arch=native", "-w", str(path), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode:
        raise KernelCompileFailed(f"{path.name}: {' '.join(result.stderr.split())[:300]}")
    return made


def require_gpu() -> None:
    """Raises `NoUsableGpu` if nvidia-smi lists none."""
    program = shutil.which("nvidia-smi")
    shown = program and subprocess.run([program, "-L"], capture_output=True, text=True)
    if not shown or shown.returncode or "GPU" not in shown.stdout:
        raise NoUsableGpu("nvidia-smi shows no GPU; --without-gpu shows the emulator alone")


def sanitized(sanitizer_path: str, tool: str, made: Path, name: str) -> Outcome:
    """Run a program under one of compute-sanitizer's tools for at most `LIMIT` seconds; return its
    reports, including warnings."""
    command = [sanitizer_path, "--tool", tool, "--error-exitcode", str(_FOUND)]
    command += ["--print-limit", "50", "--show-backtrace", "no", str(made), name]
    # The program is the tool's child: both must end.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return outcome(process.communicate(timeout=LIMIT)[0], process.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Outcome(outcome(process.communicate()[0], 0).reports, "hangs")


def outcome(output: str, exit_code: int) -> Outcome:
    """Parse the reports in a tool's output; a report without a line has the place ""."""
    parsed, ended = sanitizer.parse(output)
    # A race's other access is in its text.
    reports = {
        (each.text, line)
        for each in parsed
        for line in {each.place, *re.findall(r"\S+\.cu:\d+", each.text)}
    }
    if not reports and exit_code == _FOUND:
        reports = {("an error without a line", "")}
    if reports or ended:
        return Outcome(frozenset(reports))
    return Outcome(failure=f"ended without a summary ({exit_code})")


def said(found: Outcome, program: Program) -> str:
    """Describe where the fault was found."""
    if found.reports:
        where = "found at its line" if found.at_line(program) else "found elsewhere"
        return "reports" if program.is_right else where
    return found.failure or ("nothing" if program.is_right else "not found")


def tools_said(found: dict[str, Outcome], program: Program) -> str:
    """Describe the findings of several tools, without tools that found nothing."""
    told = [
        f"{tool}: {said(each, program)}{', hangs' if each.reports and each.failure else ''}"
        for tool, each in found.items()
        if each.reports or each.failure
    ]
    return "; ".join(told) or ("nothing" if program.is_right else "not found")


def counted(what: str, found: Iterable[tuple[Program, Sequence[Outcome]]]) -> str:
    """Count the programs in which a fault was found, at its line, and the correct ones with a
    finding."""
    pairs = list(found)
    wrong = [(program, each) for program, each in pairs if not program.is_right]
    reported = sum(any(one.reports for one in each) for _, each in wrong)
    at_line = sum(any(one.at_line(program) for one in each) for program, each in wrong)
    false = sum(any(one.reports for one in each) for program, each in pairs if program.is_right)
    return (
        f"{what} reports {reported} of {len(wrong)} faults, {at_line} at the line, "
        f"and something in {false} of {len(pairs) - len(wrong)} right programs"
    )
