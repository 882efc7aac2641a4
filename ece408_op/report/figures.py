"""The pictures of a ladder: its times, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..problem import ConvProblem
from . import svg
from .ladder import Ladder, Step

# Lines less than this factor apart on a logarithmic scale share a label.
_CLOSE = 1.3


def ladder_bars(ladder: Ladder) -> str:
    """Times of each step by layer, and of the peers, as SVG; the scale is logarithmic."""
    steps = [*ladder.steps, *ladder.peers]
    with svg.styled():
        figure = svg.figure(svg.WIDE, 1.3 + 0.27 * len(steps))
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
        figure = svg.figure(svg.WIDE, 5.4)
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
