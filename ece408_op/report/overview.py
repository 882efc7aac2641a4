"""The report's beginning: one sentence with the main result, and one chart of all op times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..course.comparison import Run
from . import dots, svg
from .ladder import Ladder, Step
from .spread import Spread

OURS = "ours"
_COLOURS = {OURS: svg.BLUE, "MXNet": svg.ORANGE, "cuDNN": svg.GREEN, "PyTorch": svg.PINK}
_MILESTONES = {
    "m1.1": ("MXNet", "CPU"),
    "m2.1": (OURS, "CPU"),
    "m1.2": ("MXNet", "GPU"),
    "m4.1": (OURS, "GPU"),
}
_WIDTH, _ROW = 5.2, 0.23


@dataclass(frozen=True)
class Line:
    """One contender: its name, its device, and milliseconds by layer for a number of `images`."""

    name: str
    maker: str
    device: str
    images: int
    times: Mapping[str, Spread]


@dataclass(frozen=True)
class Group:
    """Lines measured in the same way, which `how` describes."""

    how: str
    lines: tuple[Line, ...]


def groups(milestones: Mapping[str, Sequence[Run]], ladders: Mapping[str, Ladder]) -> list[Group]:
    """Return the comparable lines, from the milestones' runs, by name, and the kernels, by
    device."""
    found = (
        Group("within the network", tuple(_of_milestones(milestones))),
        Group(
            "called alone",
            tuple(line for each in sorted(ladders.items()) for line in _alone(*each)),
        ),
    )
    return [group for group in found if group.lines]


def _of_milestones(milestones: Mapping[str, Sequence[Run]]) -> Iterator[Line]:
    for script, (maker, device) in _MILESTONES.items():
        runs = [run for run in milestones.get(script, ()) if run.op_seconds]
        by_layer = zip(*([1e3 * seconds for seconds in run.op_seconds] for run in runs))
        times = {f"conv{i}": Spread.of(each) for i, each in enumerate(by_layer, start=1)}
        # All runs have the same size.
        images = runs[0].size if runs else 0
        yield from _line(f"{maker}, {device} ({script})", maker, device, images, times)


def _alone(device: str, ladder: Ladder) -> Iterator[Line]:
    """Return the fastest float32-accurate line of each library, by name, and of our kernels."""
    libraries: dict[str, list[Step]] = {}
    for peer in ladder.peers:
        libraries.setdefault(peer.name.split()[0].removesuffix("'s"), []).append(peer)
    for maker, steps in (*libraries.items(), (OURS, ladder.steps)):
        times = {layer: _fastest(steps, layer) for layer in ladder.layers}
        yield from _line(f"{maker}, {device}", maker, device, ladder.batch, times)


def _fastest(steps: Sequence[Step], layer: str) -> Spread | None:
    spreads = (step.spread(layer) for step in steps if step.accurate)
    return min(filter(None, spreads), key=lambda each: each.median, default=None)


def _line(
    name: str, maker: str, device: str, images: int, times: Mapping[str, Spread | None]
) -> Iterator[Line]:
    known = {layer: spread for layer, spread in times.items() if spread}
    if known:
        yield Line(name, maker, device, images, known)


def finding(found: Sequence[Group]) -> str:
    """Return the sentence with the main result."""
    parts = [part for device in ("CPU", "GPU") if (part := _about(found, device))]
    if not parts:
        return "No convolution of ours was timed here."
    return f"Our convolution takes {'; '.join(parts)}."


def _about(found: Sequence[Group], device: str) -> str:
    """Return our times on a device, with speed-ups over others if they were measured beside."""
    best = ""
    for group in found:
        lines = [line for line in group.lines if line.device == device]
        # The last of our lines is the fastest.
        ours = next((line for line in reversed(lines) if line.maker == OURS), None)
        if ours is None:
            continue
        times = " and ".join(f"{dots.figure(t.median)} ms in {n}" for n, t in ours.times.items())
        count = f"{ours.images} image{'' if ours.images == 1 else 's'}"
        text = f"{times} for {count} on the {device}, {group.how}"
        others = [_speed(ours, line) for line in lines if line.maker != OURS]
        if any(others):
            return f"{text}, which is {', '.join(filter(None, others))}"
        best = best or text
    return best


def _speed(ours: Line, theirs: Line) -> str:
    """Return our speed-up over another line in words; nothing if they have no layer in common."""
    layers = [layer for layer in ours.times if layer in theirs.times]
    factors = [theirs.times[layer].median / ours.times[layer].median for layer in layers]
    words = " and ".join(f"{factor:.{1 if factor < 10 else 0}f}" for factor in factors)
    return f"{words} times {theirs.maker}'s speed" if factors else ""


def draw(found: Sequence[Group], layers: Mapping[str, str]) -> str | None:
    """Draw the chart as SVG, a panel for each layer, by its title; `None` without groups."""
    rows: list[tuple[str, Line | None]] = []
    for group in found:
        rows += [(group.how, None), *((line.name, line) for line in group.lines)]
    if not rows:
        return None
    spreads = [_of_image(line, layer) for _, line in rows if line for layer in line.times]
    shown = [value for each in spreads for value in (each.low, each.high)]
    with svg.styled():
        height = (0.75 + _ROW * len(rows)) * len(layers)
        figure = svg.figure(_WIDTH, height)
        panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (layer, title) in zip(panels, layers.items()):
            dots.draw(axes, [_dot(line, layer) for _, line in rows], shown)
            axes.set_yticks(range(len(rows)), labels=[name for name, _ in rows])
            for label, (_, line) in zip(axes.get_yticklabels(), rows):
                label.set_fontweight("bold" if line is None else "normal")
            axes.set_title(f"{layer}: {title}", loc="left")
        panels[-1].set_xlabel("µs for each image, logarithmic")
        return svg.text(figure)


def _dot(line: Line | None, layer: str) -> dots.Dot | None:
    if line is None or layer not in line.times:
        return None
    return dots.Dot(_of_image(line, layer), _COLOURS.get(line.maker, svg.SLATE))


def _of_image(line: Line, layer: str) -> Spread:
    """Return microseconds per image, since lines may have different numbers of images."""
    return line.times[layer].scaled(1e3 / line.images)
