"""Counters of emulated warps, by source line."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .findings import lines_of, text_of
from .library import runtime

# `What` of kernels/emulator/counts.h, in its order.
WHAT = (
    "code",
    "global load",
    "global store",
    "shared load",
    "shared store",
    "atomic",
    "barrier",
)


class _RawCount(ctypes.Structure):
    """`Count` of kernels/emulator/counts.h."""

    _fields_ = [
        ("what", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("file", ctypes.c_char_p),
        ("place", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("warps", "lanes", "possible_lanes")),
        *((name, ctypes.c_uint64) for name in ("sectors", "passes", "conflicts")),
        ("kernel", ctypes.c_char * 96),
    ]


class _RawLaunched(ctypes.Structure):
    """`Launched` of kernels/emulator/counts.h."""

    _fields_ = [
        ("kernel", ctypes.c_char * 96),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint64) for name in ("static_shared", "dynamic_shared", "count")),
    ]


@dataclass
class Count:
    """Counters of one location, "file:line" or an offset in a library: executions by warps and by
    lanes, 32-byte sectors of global memory, and passes over the banks of shared memory with those
    caused by bank conflicts."""

    kernel: str
    place: str | int
    what: str
    warps: int = 0
    lanes: int = 0
    possible_lanes: int = 0
    sectors: int = 0
    passes: int = 0
    conflicts: int = 0

    def add(self, other: Count) -> None:
        """Add the counters of the same location in another count."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NUMBERS = ("warps", "lanes", "possible_lanes", "sectors", "passes", "conflicts")


@dataclass(frozen=True)
class Launched:
    """A kernel's launches of one size; shared memory in bytes per block."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    static_shared: int
    dynamic_shared: int
    count: int


def take() -> dict[str, list[dict[str, Any]]]:
    """Return the counts and launches since the last call, of all kernels in this process, as JSON
    values; `located` resolves lines."""
    library = runtime()
    if library is None:
        return {"counts": [], "launches": []}
    counts = (_RawCount * library.ece408_emulator_counts(None, 0))()
    library.ece408_emulator_counts(counts, len(counts))
    launches = (_RawLaunched * library.ece408_emulator_launches(None, 0))()
    library.ece408_emulator_launches(launches, len(launches))
    library.ece408_emulator_forget_counts()
    # Each core has its own counters.
    found: dict[tuple[Any, ...], Count] = {}
    for each in map(_count, counts):
        key = (each.kernel, each.place, each.what)
        found.setdefault(key, Count(*key)).add(each)
    return {
        "counts": [vars(each) for each in found.values()],
        "launches": [_launched(each) for each in launches],
    }


def located(taken: dict[str, Any], content: bytes) -> tuple[list[Count], list[Launched]]:
    """Resolve the output of `take` for the library with this content; one count per line and kind,
    in the file's order. Raises `KeyError`, `TypeError` or `ValueError` for invalid values, which
    another process may have made up."""
    told = taken["counts"]
    lines = lines_of(content, [each["place"] for each in told if isinstance(each["place"], int)])
    found: dict[tuple[str, str, str], Count] = {}
    for each in told:
        place = str(lines.get(each["place"], each["place"]))
        key = (str(each["kernel"]), place, str(each["what"]))
        numbers = (int(each[name]) for name in _NUMBERS)
        found.setdefault(key, Count(*key)).add(Count(*key, *numbers))
    counts = sorted(found.values(), key=lambda each: (each.kernel, *_file_and_line(each.place)))
    return counts, [_as_launched(each) for each in taken["launches"]]


def _file_and_line(place: str | int) -> tuple[str, int]:
    file, _, line = str(place).rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _count(raw: _RawCount) -> Count:
    place = f"{Path(text_of(raw.file)).name}:{raw.line}" if raw.file else raw.place
    numbers = {name: getattr(raw, name) for name in _NUMBERS}
    return Count(text_of(raw.kernel), place, WHAT[raw.what], **numbers)


def _launched(raw: _RawLaunched) -> dict[str, Any]:
    sizes = {"grid": list(raw.grid), "block": list(raw.block)}
    shared = {name: getattr(raw, name) for name in ("static_shared", "dynamic_shared", "count")}
    return {"kernel": text_of(raw.kernel), **sizes, **shared}


def _as_launched(told: dict[str, Any]) -> Launched:
    grid, block = ([int(each) for each in told[role]] for role in ("grid", "block"))
    return Launched(
        str(told["kernel"]),
        (grid[0], grid[1], grid[2]),
        (block[0], block[1], block[2]),
        *(int(told[name]) for name in ("static_shared", "dynamic_shared", "count")),
    )
