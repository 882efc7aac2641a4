"""Programs of tests/emulator/faults with their planted faults, and the emulator's findings."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from ece408_op.backends.emulator import findings, library
from ece408_op.backends.emulator.findings import KINDS

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
