"""Pictures of a ladder: its times, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..problem import ConvProblem
from . import dots, svg
from .ladder import Ladder, Step

# Height of a name, as a fraction of the roofline's.
_NAME_SHARE = 1 / 32


def ladder_dots(ladder: Ladder) -> str:
    """Draw times of each step and peer by layer as SVG, with a logarithmic scale."""
    steps = [*ladder.steps, *ladder.peers]
    with svg.styled():
        figure = svg.figure(svg.WIDE, 1.3 + 0.27 * len(steps))
        panels = figure.subplots(1, len(ladder.layers), sharey=True, squeeze=False)[0]
        for axes, (layer, problem) in zip(panels, ladder.layers.items()):
            floor = ladder.floors_ms[layer]
            dots.draw(axes, [_dot(ladder, step, layer) for step in steps], (floor,))
            axes.axvline(floor, color=svg.RED, linestyle="--", linewidth=1)
            axes.set_xlabel("ms, logarithmic; dashed: the floor")
            axes.set_title(f"{layer}: {problem}", loc="left")
        panels[0].set_yticks(range(len(steps)), labels=[step.name for step in steps])
        return svg.text(figure)


def _dot(ladder: Ladder, step: Step, layer: str) -> dots.Dot | None:
    spread = step.spread(layer)
    if spread is None:
        return None
    colour = svg.BLUE if step in ladder.steps else svg.ORANGE
    return dots.Dot(spread, colour, _marker(step), step.computed_by.get(layer, ""))


def _marker(step: Step) -> str:
    return "o" if step.accurate else "^"


def roofline(ladder: Ladder) -> str:
    """Draw each kernel's rate over its layer's arithmetic intensity, below measured ceilings, as
    SVG.

    After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
    multicore architectures", 2009. Intensity uses the fewest possible bytes, each input read once
    and each output written once, so a kernel that moves more bytes has a lower point, not one
    further left.
    """
    problems = {name: ConvProblem.parse(each) for name, each in ladder.layers.items()}
    intensities = [problem.flops / problem.bytes for problem in problems.values()]
    with svg.styled():
        figure = svg.figure(svg.WIDE, 5.4)
        axes = figure.subplots()
        ridges = [max(ladder.gflops.values()) / gbs for gbs in ladder.gbs.values()]
        reach = np.array([min(*intensities, *ridges) / 4, max(*intensities, *ridges) * 4])
        _roofs(axes, ladder, reach)
        axes.set(xscale="log", yscale="log", xlim=reach)
        axes.set_xlabel("arithmetic intensity, FLOP per byte")
        axes.set_ylabel("GFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(svg.number)
        axes.grid(which="major")
        for number, (layer, problem) in enumerate(problems.items()):
            _points(axes, ladder, layer, problem, svg.SERIES[number % len(svg.SERIES)])
        axes.margins(y=0.12)
        axes.autoscale(axis="y")
        for layer, problem in problems.items():
            _names(axes, ladder, layer, problem)
        _roof_names(axes, ladder)
        figure.legend(loc="outside upper center", ncols=len(problems) + len(ladder.gbs))
        return svg.text(figure)


def _roofs(axes: Any, ladder: Ladder, reach: np.ndarray) -> None:
    top = max(ladder.gflops.values())
    for rate in ladder.gflops.values():
        axes.axhline(rate, color=svg.INK, linewidth=1)
    for (name, gbs), style in zip(ladder.gbs.items(), ("-", "--", ":")):
        ends = np.array([reach[0], min(reach[1], top / gbs)])
        axes.plot(ends, gbs * ends, color=svg.INK, linewidth=1, linestyle=style,
                  label=f"{name}, {gbs:.0f} GB/s")  # fmt: skip


def _roof_names(axes: Any, ladder: Ladder) -> None:
    """Draw the names of the arithmetic ceilings, right of the plot."""
    low, high = np.log10(axes.get_ylim())
    roofs = sorted((rate, name) for name, rate in ladder.gflops.items())
    places = apart([np.log10(rate) for rate, _ in roofs], 4.5 * _NAME_SHARE * (high - low))
    for (rate, name), place in zip(roofs, places):
        lines = name.replace(" on ", "\non ")
        axes.annotate(f"{lines}\n{rate:,.0f} GFLOP/s", (1, 10**place), (6, 0),
                      xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=9, va="center")  # fmt: skip


def _points(axes: Any, ladder: Ladder, layer: str, problem: ConvProblem, colour: str) -> None:
    """Draw a mark for each step of a layer."""
    best = ladder.fastest(layer)
    axes.plot([], marker="o", linestyle="", color=colour, label=layer)
    for step in ladder.steps:
        ms = step.median_ms(layer)
        if ms is not None:
            axes.plot(problem.flops / problem.bytes, problem.flops / ms / 1e6,
                      marker=_marker(step), linestyle="", color=colour,
                      markersize=9 if step is best else 5)  # fmt: skip


def _names(axes: Any, ladder: Ladder, layer: str, problem: ConvProblem) -> None:
    """Draw the names of a layer's marks, right of them, or left if they are less accurate."""
    low, high = np.log10(axes.get_ylim())
    for accurate, side, offset in ((True, "left", 22), (False, "right", -22)):
        steps = [step for step in ladder.steps if step.accurate == accurate]
        timed = [(step.median_ms(layer), step.name) for step in steps]
        found = sorted((problem.flops / ms / 1e6, name) for ms, name in timed if ms is not None)
        places = apart([np.log10(rate) for rate, _ in found], _NAME_SHARE * (high - low))
        for (rate, name), place in zip(found, places):
            at = problem.flops / problem.bytes
            label = axes.annotate(
                name,
                (at, rate),
                (at, 10**place),
                textcoords=svg.shifted(axes, offset),
                fontsize=8,
                ha=side,
                va="center",
                arrowprops={"arrowstyle": "-", "color": svg.FAINT, "linewidth": 0.6, "shrinkB": 3},
            )
            label.set_gid(f"{svg.GROUND}-{layer}-{name}")


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Return ascending positions, moved as little as possible to be `gap` apart."""
    up, down = list(places), list(places)
    for index in range(1, len(up)):
        up[index] = max(up[index], up[index - 1] + gap)
    for index in reversed(range(len(down) - 1)):
        down[index] = min(down[index], down[index + 1] - gap)
    return [(a + b) / 2 for a, b in zip(up, down)]
