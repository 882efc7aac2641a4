"""Output of `ece408 lab time --emulate`: counts of CUDA kernels per source line."""

from __future__ import annotations

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
    texts = _Texts(source.parent)
    rows = [_HEAD, *(_row(each, texts) for each in counts if _matters(each))]
    return [f"    {line}" for line in markdown.aligned(rows, (0, 1, 6))]


def _matters(each: Count) -> bool:
    """Return whether to show a count: it has a source line (others are the emulator's own) and, for
    code, many lanes are inactive."""
    parts = each.lanes < _ALMOST_ALL * each.possible_lanes
    return ":" in str(each.place) and (each.what != "code" or parts)


def _row(each: Count, texts: _Texts) -> tuple[str, ...]:
    one = each.sectors or each.passes
    return (
        str(each.place),
        each.what,
        str(each.warps),
        f"{32 * each.lanes / each.possible_lanes:.1f}",
        f"{one / each.warps:.1f}" if one else "",
        f"{each.conflicts / each.passes:.0%}" if each.passes else "",
        texts(str(each.place)),
    )


class _Texts:
    """Lines of the sources in a folder, by "file:line"."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, list[str]] = {}

    def __call__(self, place: str) -> str:
        name, _, number = place.rpartition(":")
        if name not in self._files:
            self._files[name] = self._lines(name)
        lines, index = self._files[name], int(number) - 1
        text = lines[index].strip() if 0 <= index < len(lines) else ""
        return text if len(text) <= _SOURCE_WIDTH else text[: _SOURCE_WIDTH - 3] + "..."

    def _lines(self, name: str) -> list[str]:
        try:
            path = self._folder / Path(name).name
            return path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            # A header from another folder.
            return []
