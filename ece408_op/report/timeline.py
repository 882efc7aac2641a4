"""Time line of a profile: its activities by stream and thread."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..profile.activities import (
    API,
    KERNEL,
    MEMCPY,
    MEMSET,
    ON_GPU,
    OP_CALL,
    OPERATOR,
    Activity,
    Profile,
)
from . import svg

_COLOURS = {
    KERNEL: svg.GREEN,
    MEMCPY: svg.ORANGE,
    MEMSET: svg.PINK,
    API: svg.SLATE,
    OPERATOR: svg.BLUE,
    OP_CALL: svg.RED,
}
_NAMES = {
    KERNEL: "kernel",
    MEMCPY: "copy",
    MEMSET: "fill",
    API: "CUDA API call",
    OPERATOR: "MXNet operator",
    OP_CALL: "our operator's backend",
}
# Activities closer than this fraction of the time line are drawn as one bar.
_RESOLUTION = 1 / 3000
_NEARLY_ALL = 0.95
_MOST_ROWS = 32
# The rows below those of the GPU, in this order.
_CPU_ROWS = (OP_CALL, OPERATOR, API)
_LABELLED = 0.06
_CHARACTERS = 75  # that fit the width of the time line beside long names of rows


def draw(profile: Profile) -> str | None:
    """Draw the activities as SVG, a row for each stream and thread; `None` without activities.

    It spans the work on the GPU, or MXNet's operators and ours if the GPU had none.
    """
    kinds = ON_GPU if profile.of_kinds(*ON_GPU) else (OPERATOR, OP_CALL)
    focus = profile.of_kinds(*kinds)
    if not focus:
        return None
    begin, end = min(a.start_ns for a in focus), max(a.end_ns for a in focus)
    rows = _rows([a for a in profile.activities if a.start_ns <= end and a.end_ns >= begin])
    labels = list(rows)[:_MOST_ROWS]
    left_out = f"; the first {len(labels)} rows of {len(rows)}" if len(labels) < len(rows) else ""
    with svg.styled():
        figure = svg.figure(svg.WIDE, 1.6 + 0.26 * len(labels))
        axes = figure.subplots()
        for place, label in enumerate(labels):
            _draw_row(axes, place, rows[label], begin, end)
        axes.set_yticks(range(len(labels)), labels=labels)
        axes.invert_yaxis()
        axes.set_xlim(0, (end - begin) / 1e6)
        axes.set_xlabel(f"ms since the first of them{left_out}")
        axes.grid(axis="x")
        figure.legend(loc="outside upper center", ncols=len(_NAMES))
        return svg.text(figure)


def _rows(activities: Sequence[Activity]) -> dict[str, list[Activity]]:
    """Return activities by row: the GPU's streams, then our operator's, MXNet's and the API's
    threads."""
    rows: dict[tuple[int, str, str], list[Activity]] = {}
    for activity in activities:
        on_gpu = activity.kind in ON_GPU
        order = 0 if on_gpu else _CPU_ROWS.index(activity.kind) + 1
        kind = "" if on_gpu else f"{_NAMES[activity.kind]}s, "
        rows.setdefault((order, kind, activity.track), []).append(activity)
    ordered = sorted(rows, key=lambda row: (row[0], _natural(row[2])))
    return {f"{row[1]}{row[2]}": rows[row] for row in ordered}


def _draw_row(axes: Any, place: int, activities: Sequence[Activity], begin: int, end: int) -> None:
    whole = end - begin
    for kind in dict.fromkeys(activity.kind for activity in activities):
        of_kind = [activity for activity in activities if activity.kind == kind]
        spans = merged(of_kind, begin, end, int(whole * _RESOLUTION))
        # Shortened, to separate neighbours.
        bars = [
            ((start - begin) / 1e6, (stop - start - min(whole / 800, (stop - start) / 4)) / 1e6)
            for start, stop, _ in spans
        ]
        drawn = {text.get_label() for text in axes.collections}
        label = _NAMES[kind] if _NAMES[kind] not in drawn else None
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=_COLOURS[kind], label=label,
                         edgecolors=_COLOURS[kind], linewidth=0.5)  # fmt: skip
        for start, stop, name in spans:
            if name is not None and stop - start > _LABELLED * whole:
                centre = ((start + stop) / 2 - begin) / 1e6
                axes.annotate(_short(name, (stop - start) / whole), (centre, place), ha="center",
                              va="center", fontsize=8, color=svg.PAPER)  # fmt: skip


def merged(
    activities: Sequence[Activity], begin: int, end: int, gap: int
) -> list[tuple[int, int, str | None]]:
    """Return start and end in ns, within the bounds, of each bar, with its name.

    Activities share a bar if they overlap, or if they are at most `gap` apart and one lasts at most
    `gap`. Its name is that of the activity that takes nearly all of its time, or `None`.
    """
    bars: list[tuple[int, int, dict[str, int]]] = []
    for each in sorted(activities, key=lambda a: a.start_ns):
        start, stop, name = max(each.start_ns, begin), min(each.end_ns, end), _label(each)
        first, last, names = bars[-1] if bars else (0, 0, {})
        short = stop - start <= gap or last - first <= gap
        if bars and (start < last or (short and start - last <= gap)):
            names[name] = names.get(name, 0) + stop - start
            bars[-1] = (first, max(last, stop), names)
        else:
            bars.append((start, stop, {name: stop - start}))
    return [(first, last, _dominant(names)) for first, last, names in bars]


def _dominant(durations: Mapping[str, int]) -> str | None:
    """Return the name with nearly all of the time."""
    name = max(durations, key=lambda each: durations[each])
    return name if durations[name] >= _NEARLY_ALL * sum(durations.values()) else None


def _label(activity: Activity) -> str:
    if activity.kind == OP_CALL:
        return f"{activity.details['layer']} {activity.details['kernel']}"
    return activity.name


def _short(name: str, fraction: float) -> str:
    """Return as much of a name as fits a bar of this fraction of the width."""
    room = int(fraction * _CHARACTERS)
    return name if len(name) <= room else name[: max(room - 1, 1)] + "…"


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key to sort names by, in which 7 comes before 17."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", text)]
