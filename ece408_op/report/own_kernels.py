"""Versions of a user's kernel, from the first to the last: times, changes, profiles."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..backends import kernel_file
from ..errors import InvalidSetting
from .ladder import Ladder, Step

OURS = "ece408_op"


@dataclass(frozen=True)
class Version:
    """A kernel file as of the report's start; `device` is "cpu" or "gpu"."""

    path: str
    device: str
    text: str

    @property
    def name(self) -> str:
        return Path(self.path).name


def find(path: Path) -> tuple[Version, ...]:
    """Return the kernel files in a folder, in the order of their names, or the one file.

    Raises `InvalidSetting` for a path without kernel files, for files of two devices, and for files
    that are no kernels.
    """
    names = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [
        kernel_file.find(str(each))
        for each in names
        if kernel_file.device_of(each.name) is not None
    ]
    if not files:
        raise InvalidSetting(f"no kernel file in {path}; --kernels takes a folder of versions")
    if len({each.device for each in files}) > 1:
        raise InvalidSetting(
            f"{path} has kernels for the CPU and for CUDA; name a folder of one kind"
        )
    devices = {"cpu": "cpu", "cuda": "gpu"}
    return tuple(Version(str(f.path), devices[f.device], f.text) for f in files)


def ladder(versions: Sequence[Version], times: str, base: Ladder) -> Ladder:
    """Return the versions as steps, from the output of `ece408 lab time`, with the ceilings of
    `base` for the same layers. Raises `InvalidSetting` for other texts."""
    layers = {problem: layer for layer, problem in base.layers.items()}
    try:
        rows = [(row["name"], layers.get(row["problem"]), row) for row in json.loads(times)]
        found: dict[str, dict[str, Any]] = {}
        for name, layer, row in rows:
            if layer is not None:
                found.setdefault(name, {})[layer] = row
        steps = tuple(
            _step(version, before, found.get(version.name, {}))
            for before, version in zip((None, *versions), versions)
        )
        ours = Step(OURS, "what this package chooses", True, _samples(found.get(OURS, {})))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSetting(f"these are no times of kernels ({error!r}); measure again") from error
    note = (
        "Timed by ece408 lab time: in turns, each call with new numbers, and each output checked; "
        "on the GPU without copies."
    )
    return replace(base, steps=steps, peers=(ours,), notes=(note,))


def _step(version: Version, before: Version | None, rows: Mapping[str, Any]) -> Step:
    failures = [row["failure"] for row in rows.values() if row["failure"]]
    return Step(
        version.name,
        _idea(version.text),
        True,
        _samples(rows),
        why=f"It failed: {failures[0]}." if failures else "",
        change="" if before is None else _change(before, version),
    )


def _samples(rows: Mapping[str, Any]) -> dict[str, list[float]]:
    return {
        layer: [1e3 * seconds for seconds in row["seconds"]]
        for layer, row in rows.items()
        if row["seconds"]
    }


def _idea(text: str) -> str:
    """Return the first sentence of the file's first comment, or a note that it has none."""
    found = re.search(r"(?:^[ \t]*//.*\n?)+|/\*(?s:.*?)\*/", text, re.M)
    words = re.sub(r"^[\s/*]+|[\s/*]+$", "", found[0], flags=re.M).split() if found else []
    sentence = re.split(r"(?<=\.) ", " ".join(words))[0]
    return sentence.rstrip(".") or "a version without a comment"


def _change(before: Version, after: Version) -> str:
    """Return a unified diff of two files."""
    texts = (before.text.splitlines(), after.text.splitlines())
    return "\n".join(difflib.unified_diff(*texts, before.name, after.name, lineterm="", n=2))
