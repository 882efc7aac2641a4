"""The report's pictures: op times over the ladder, the roofline, the time line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..problem import ConvProblem
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
from .ladder import Ladder, Step

_WIDE = 9.0
_COLOURS = {
    KERNEL: svg.GREEN,
    MEMCPY: svg.ORANGE,
    MEMSET: svg.PINK,
    API: svg.SKY,
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
# Activities closer than this share of the time line are drawn as one bar.
_RESOLUTION = 1 / 3000
_NEARLY_ALL = 0.95
_MOST_ROWS = 32
# The rows below those of the GPU, in this order.
_CPU_ROWS = (OP_CALL, OPERATOR, API)
_LABELLED = 0.06
_CHARACTERS = 95  # that fit the width of the time line
# Lines less than this factor apart on a logarithmic scale share a label.
_CLOSE = 1.3


def ladder_bars(ladder: Ladder) -> str:
    """Times of each step by layer, and of the peers, as SVG; the scale is logarithmic."""
    steps = [*ladder.steps, *ladder.peers]
    with svg.styled():
        figure = svg.figure(_WIDE, 1.3 + 0.27 * len(steps))
        panels = figure.subplots(1, len(ladder.layers), sharey=True, squeeze=False)[0]
        for axes, (layer, problem) in zip(panels, ladder.layers.items()):
            _bars(axes, ladder, steps, layer)
            axes.set_title(f"{layer}: {problem}", loc="left")
        panels[0].set_yticks(range(len(steps)), labels=[step.name for step in steps])
        panels[0].invert_yaxis()
        return svg.text(figure)


def _bars(axes: Any, ladder: Ladder, steps: Sequence[Step], layer: str) -> None:
    for place, step in enumerate(steps):
        ms = step.median_ms(layer)
        if ms is None:
            continue
        own = place < len(ladder.steps)
        colour = svg.BLUE if own else svg.ORANGE
        axes.barh(place, ms, color=colour, alpha=1.0 if step.accurate else 0.5)
        axes.annotate(_figure(ms), (ms, place), (4, 0), textcoords="offset points", va="center")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, ladder.floors_ms[layer] / 2), high * 2.5)
    axes.axvline(ladder.floors_ms[layer], color=svg.RED, linestyle="--", linewidth=1)
    axes.set_xlabel("ms, logarithmic; dashed: the floor")
    axes.grid(axis="x")


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def roofline(ladder: Ladder) -> str:
    """Each kernel's rate over its layer's arithmetic intensity, below measured ceilings, as SVG.

    After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
    multicore architectures", 2009. Bytes are the fewest possible: each input read once, each
    output written once, so a kernel that moves more lies lower, not further to the left.
    """
    problems = {name: ConvProblem.parse(each) for name, each in ladder.layers.items()}
    intensities = [problem.flops / problem.bytes for problem in problems.values()]
    with svg.styled():
        figure = svg.figure(_WIDE, 5.4)
        axes = figure.subplots()
        reach = np.array([min(intensities) / 8, max(intensities) * 8])
        _roofs(axes, ladder, reach)
        for number, (layer, problem) in enumerate(problems.items()):
            _points(axes, ladder, layer, problem, number)
        axes.set(xscale="log", yscale="log", xlim=reach)
        axes.set_xlabel("arithmetic intensity, FLOP per byte")
        axes.set_ylabel("GFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.margins(y=0.12)
        axes.grid(which="major")
        axes.legend(loc="lower right")
        return svg.text(figure)


def _roofs(axes: Any, ladder: Ladder, reach: np.ndarray) -> None:
    top = max(ladder.gflops.values())
    labels: list[tuple[float, list[str]]] = []
    for name, rate in sorted(ladder.gflops.items(), key=lambda item: -item[1]):
        axes.axhline(rate, color=svg.INK, linewidth=1)
        # Lines that lie close share a label, which would not fit between them.
        if labels and labels[-1][0] < _CLOSE * rate:
            labels[-1][1].append(f"{name}, {rate:.0f}")
        else:
            labels.append((rate, [f"{name}, {rate:.0f}"]))
    for rate, names in labels:
        axes.annotate(f"{'; '.join(names)} GFLOP/s", (reach[1], rate), (-4, 3),
                      textcoords="offset points", ha="right")  # fmt: skip
    for (name, gbs), style in zip(ladder.gbs.items(), ("-", "--", ":")):
        ends = np.array([reach[0], min(reach[1], top / gbs)])
        axes.plot(ends, gbs * ends, color=svg.INK, linewidth=1, linestyle=style,
                  label=f"{name}, {gbs:.0f} GB/s")  # fmt: skip


def _points(axes: Any, ladder: Ladder, layer: str, problem: ConvProblem, number: int) -> None:
    """Marks of a layer's steps, named right of them, or left if they are less accurate."""
    colour, best = svg.SERIES[number % len(svg.SERIES)], ladder.fastest(layer)
    axes.plot([], marker="o", linestyle="", color=colour, label=layer)
    for accurate in (True, False):
        timed = [(step.median_ms(layer), step) for step in ladder.steps]
        found = [(ms, each) for ms, each in timed if ms is not None and each.accurate == accurate]
        last = 0.0
        for ms, step in sorted(found, key=lambda pair: pair[0]):
            at = problem.flops / problem.bytes, problem.flops / ms / 1e6
            axes.plot(*at, marker="o" if accurate else "^", linestyle="", color=colour,
                      markersize=9 if step is best else 5)  # fmt: skip
            # Names of points that lie close would cover each other.
            if ms > _CLOSE * last:
                axes.annotate(step.name, at, (8 if accurate else -8, -3), fontsize=8,
                              textcoords="offset points",
                              ha="left" if accurate else "right")  # fmt: skip
                last = ms


def timeline(profile: Profile) -> str | None:
    """What ran when, a row for each stream and thread, as SVG; `None` if nothing was recorded.

    It spans the work on the GPU where there is any, else MXNet's operators and ours.
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
        figure = svg.figure(_WIDE, 1.6 + 0.26 * len(labels))
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
    """Activities by row: the GPU's streams, then our operator's, MXNet's and the API's threads."""
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
        # Drawn shorter than they lasted, to separate neighbours.
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
                              va="center", fontsize=8, color="white")  # fmt: skip


def merged(
    activities: Sequence[Activity], begin: int, end: int, gap: int
) -> list[tuple[int, int, str | None]]:
    """Start and end in ns, within the bounds, of what a bar each is for, with its name.

    Activities that overlap, or of which one lasts at most `gap` and is at most `gap` from the
    other, share a bar. Its name is that of what takes nearly all of its time, or `None`.
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
    """The name with nearly all of the time."""
    name = max(durations, key=lambda each: durations[each])
    return name if durations[name] >= _NEARLY_ALL * sum(durations.values()) else None


def _label(activity: Activity) -> str:
    if activity.kind == OP_CALL:
        return f"{activity.details['layer']} {activity.details['kernel']}"
    return activity.name


def _short(name: str, share: float) -> str:
    """As much of a name as fits a bar of this share of the width."""
    room = int(share * _CHARACTERS)
    return name if len(name) <= room else name[: max(room - 1, 1)] + "…"


def _natural(text: str) -> list[tuple[int, str]]:
    """A key to sort names by, in which 7 comes before 17."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", text)]
