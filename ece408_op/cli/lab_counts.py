"""Output of `ece408 lab time --emulate`: counts of CUDA kernels per source line."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from pathlib import Path

from ..backends.emulator.counts import Count, Launched
from ..files import markdown
from ..lab.counting import Counted, Resident

_SOURCE_WIDTH = 44
_ALMOST_ALL = 0.9
_HEAD = ("line", "what", "warps", "lanes", "each", "repeats", "source")


def text(name: str, layer: str, counted: Counted, source: Path, architecture: str) -> str:
    """Return a contender's launches on a layer, with a table of lines for each function."""
    lines = [f"{name}, {layer}: counted, not timed"]
    functions = dict.fromkeys(each.kernel for each in counted.launches)
    for function in functions:
        for launched, resident in zip(counted.launches, counted.resident):
            if launched.kernel == function:
                lines.append(f"  {_launch(launched, resident, architecture)}")
        lines += _table([each for each in counted.counts if each.kernel == function], source)
    return "\n".join(lines)


def _launch(launched: Launched, resident: Resident, architecture: str) -> str:
    blocks = launched.grid[0] * launched.grid[1] * launched.grid[2]
    threads = launched.block[0] * launched.block[1] * launched.block[2]
    shared = launched.static_shared + launched.dynamic_shared
    fits = f"{resident.share:.0%} of {architecture}'s warps at a time"
    fits += f", with {resident.registers} registers a thread"
    if not resident.registers:
        fits = f"at most {resident.share:.0%} of {architecture}'s warps at a time: nvcc, which "
        fits += "tells registers, is not here"
    times = "" if launched.count == 1 else f", {launched.count} times"
    return (
        f"{launched.kernel}: {blocks} blocks of {threads} threads, {shared} bytes of shared "
        f"memory{times}; {fits}"
    )


def _table(counts: Sequence[Count], source: Path) -> list[str]:
    rows = [_HEAD, *(_row(each, source.parent) for each in counts if _matters(each))]
    return [f"    {line}" for line in markdown.aligned(rows, (0, 1, 6))]


def _matters(each: Count) -> bool:
    """Return whether to show a count: it has a source line (others are the emulator's own) and, for
    code, many lanes are inactive."""
    parts = each.lanes < _ALMOST_ALL * each.possible_lanes
    return ":" in str(each.place) and (each.what != "code" or parts)


def _row(each: Count, folder: Path) -> tuple[str, ...]:
    one = each.sectors or each.passes
    return (
        str(each.place),
        each.what,
        str(each.warps),
        f"{32 * each.lanes / each.possible_lanes:.1f}",
        f"{one / each.warps:.1f}" if one else "",
        f"{each.conflicts / each.passes:.0%}" if each.passes else "",
        _source_line(folder, str(each.place)),
    )


def _source_line(folder: Path, place: str) -> str:
    """Return the text at "file:line", cut to the column's width; none of a header elsewhere."""
    name, _, number = place.rpartition(":")
    text = linecache.getline(str(folder / name), int(number)).strip()
    return text if len(text) <= _SOURCE_WIDTH else text[: _SOURCE_WIDTH - 3] + "..."
