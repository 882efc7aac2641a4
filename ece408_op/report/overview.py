"""What a reader sees first: one sentence with the finding, and one chart of all op times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..course.comparison import Run
from . import dots, svg
from .ladder import Ladder, Step
from .spread import Spread

# Times are for so many images, whatever the batch.
IMAGES = 1000
OURS = "ours"
_COLOURS = {OURS: svg.BLUE, "MXNet": svg.ORANGE, "cuDNN": svg.GREEN, "PyTorch": svg.PINK}
_MILESTONES = {
    "m1.1": ("MXNet", "CPU"),
    "m2.1": (OURS, "CPU"),
    "m1.2": ("MXNet", "GPU"),
    "m4.1": (OURS, "GPU"),
}
_WIDTH = 5.2


@dataclass(frozen=True)
class Line:
    """Whose convolution, on which device, and by layer milliseconds for `IMAGES` images."""

    name: str
    maker: str
    device: str
    times: Mapping[str, Spread]


@dataclass(frozen=True)
class Group:
    """Lines that were measured in one way, which `how` says."""

    how: str
    lines: tuple[Line, ...]


def groups(milestones: Mapping[str, Sequence[Run]], ladders: Mapping[str, Ladder]) -> list[Group]:
    """What can be shown of the milestones' runs, by their names, and of kernels, by device."""
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
        by_layer = zip(*([1e3 * IMAGES / r.size * s for s in r.op_seconds] for r in runs))
        times = {f"conv{i}": Spread.of(each) for i, each in enumerate(by_layer, start=1)}
        name = f"{maker}, {device} ({script})"
        yield from _line(name, maker, device, times)


def _alone(device: str, ladder: Ladder) -> Iterator[Line]:
    """The fastest that is accurate to float32, of each library, by its name, and of ours."""
    libraries: dict[str, list[Step]] = {}
    for peer in ladder.peers:
        libraries.setdefault(peer.name.split()[0].removesuffix("'s"), []).append(peer)
    for maker, steps in (*libraries.items(), (OURS, ladder.steps)):
        fastest = {layer: _fastest(steps, layer) for layer in ladder.layers}
        times = {
            layer: spread.scaled(IMAGES / ladder.batch) if spread else None
            for layer, spread in fastest.items()
        }
        yield from _line(f"{maker}, {device}", maker, device, times)


def _fastest(steps: Sequence[Step], layer: str) -> Spread | None:
    spreads = (step.spread(layer) for step in steps if step.accurate)
    return min(filter(None, spreads), key=lambda each: each.median, default=None)


def _line(name: str, maker: str, device: str, times: Mapping[str, Spread | None]) -> Iterator[Line]:
    known = {layer: spread for layer, spread in times.items() if spread}
    if known:
        yield Line(name, maker, device, known)


def finding(found: Sequence[Group]) -> str:
    """The sentence."""
    parts = [part for device in ("CPU", "GPU") if (part := _about(found, device))]
    if not parts:
        return "No convolution of ours was timed here."
    return f"For {IMAGES} images our convolution takes {'; '.join(parts)}."


def _about(found: Sequence[Group], device: str) -> str:
    """Our times on a device beside somebody else's that were measured in the same way, if any."""
    best = ""
    for group in found:
        ours, theirs = _ours_and_theirs(group, device)
        if ours and theirs:
            return _sentence(ours, theirs, group.how)
        best = best or (_times(ours, ours.times, group.how) if ours else "")
    return best


def _times(ours: Line, layers: Iterable[str], how: str) -> str:
    times = [f"{dots.figure(ours.times[layer].median)} ms in {layer}" for layer in layers]
    return f"{' and '.join(times)} on the {ours.device}, {how}"


def _sentence(ours: Line, theirs: Line, how: str) -> str:
    layers = [layer for layer in ours.times if layer in theirs.times]
    speeds = [theirs.times[layer].median / ours.times[layer].median for layer in layers]
    factors = " and ".join(f"{speed:.{1 if speed < 10 else 0}f}" for speed in speeds)
    return f"{_times(ours, layers, how)}, which is {factors} times the speed of {theirs.maker}'s"


def _ours_and_theirs(group: Group, device: str) -> tuple[Line | None, Line | None]:
    """The last of ours, which is the fastest, and of the others that share a layer with it."""
    lines = [line for line in group.lines if line.device == device]
    ours = next((line for line in reversed(lines) if line.maker == OURS), None)
    others = [line for line in lines if line.maker != OURS]
    theirs = next((each for each in others if ours and each.times.keys() & ours.times.keys()), None)
    return ours, theirs


def draw(found: Sequence[Group], layers: Mapping[str, str]) -> str | None:
    """The chart as SVG, a panel for each layer, by its title; `None` if there is nothing."""
    rows: list[tuple[str, Line | None]] = []
    for group in found:
        rows += [(group.how, None), *((line.name, line) for line in group.lines)]
    if not rows:
        return None
    spreads = [spread for _, line in rows if line for spread in line.times.values()]
    shown = [value for each in spreads for value in (each.low, each.high)]
    with svg.styled():
        height = (0.75 + dots.ROW_INCHES * len(rows)) * len(layers)
        figure = svg.figure(_WIDTH, height)
        panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (layer, title) in zip(panels, layers.items()):
            dots.draw(axes, [_dot(line, layer) for _, line in rows], shown)
            axes.set_yticks(range(len(rows)), labels=[name for name, _ in rows])
            for label, (_, line) in zip(axes.get_yticklabels(), rows):
                label.set_fontweight("bold" if line is None else "normal")
            axes.set_title(f"{layer}: {title}", loc="left")
        panels[-1].set_xlabel(f"ms for {IMAGES} images, logarithmic")
        return svg.text(figure)


def _dot(line: Line | None, layer: str) -> dots.Dot | None:
    spread = line.times.get(layer) if line else None
    return dots.Dot(spread, _COLOURS.get(line.maker, svg.SLATE)) if line and spread else None
