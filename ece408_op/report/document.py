"""The report's text: the output of the programs, sorted into the course's sections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..course.comparison import Row, Run, read_run, reason
from ..course.milestone import MILESTONES, Milestone
from ..host import this_python
from ..problem import ConvProblem
from . import ladder, ladder_view, overview, plan, profile_view, rendering
from .ladder_view import LadderView
from .notes import Sections
from .plan import Measurement, Options
from .profile_view import ProfileView
from .spread import Spread
from .store import Result

OVERVIEW = "overview.svg"
_GPU_LINE = re.compile(r"^ece408: (\S*) by (.+?): kernel [\d.]+ ms", re.M)


@dataclass(frozen=True)
class Shown:
    """A milestone at one size: its command as a user would type it, the output of each run, and
    their figures; `run` has their medians."""

    command: str
    outputs: tuple[str, ...]
    runs: tuple[Run, ...]
    run: Run
    kernels: tuple[str, ...]

    def op_ms(self, index: int) -> Spread | None:
        """Return the milliseconds of a layer in each run that reports them, by the layer's
        index."""
        return Spread.of([1e3 * each.op_seconds[index] for each in self.runs if each.op_seconds])

    @property
    def total_ms(self) -> Spread | None:
        return Spread.of([1e3 * sum(each.op_seconds) for each in self.runs if each.op_seconds])

    @property
    def program_s(self) -> Spread | None:
        return Spread.of([each.elapsed_s for each in self.runs if each.elapsed_s is not None])


@dataclass(frozen=True)
class Section:
    """A milestone: its timed runs, one for each size, and its profile if it is profiled.

    `missing` says why it cannot run here, or is `None`.
    """

    milestone: Milestone
    runs: tuple[Shown, ...]
    missing: str | None
    profile: ProfileView | None


@dataclass(frozen=True)
class Document:
    """The report as Markdown, its pictures by file name, and the errors of its runs."""

    title: str
    markdown: str
    pictures: Mapping[str, str]
    failures: tuple[str, ...]


def build(
    options: Options,
    measurements: Sequence[Measurement],
    results: Mapping[str, Result],
    state: Mapping[str, Any],
    notes: Mapping[str, str],
) -> Document:
    """Sort results into sections and draw the pictures.

    `state` is `Store.state`; `notes` are a student's, by section.
    """
    pictures: dict[str, str] = {}
    by_key = {each.key: each for each in measurements}
    sections = {name: _section(options, name, by_key, results, pictures) for name in MILESTONES}
    ladders = [ladder_view.view(device, results, pictures) for device in ("gpu", "cpu")]
    title = f"Convolution in MXNet: milestone report, term {options.term.name}"
    layers = ladder.problems(options.term, options.sizes[-1])
    found = _overview(sections, ladders, layers, pictures)
    lacking: dict[str, list[str]] = {}
    for name, section in sections.items():
        if section.missing is not None:
            lacking.setdefault(section.missing, []).append(name)
    markdown = rendering.render(
        "report.md.j2",
        title=title,
        options=options,
        state=state,
        machine=state["identity"]["machine"],
        settings=state["identity"]["settings"],
        seconds=sum(result.seconds for result in results.values()),
        sections=sections,
        chart=OVERVIEW if OVERVIEW in pictures else None,
        ladders=ladders,
        own=ladder_view.own(options, ladders, results, pictures),
        finding=overview.finding(found),
        lacking=lacking,
        layers=layers,
        notes=Sections(notes),
    )
    return Document(title, markdown, pictures, _failures(measurements, results))


def _overview(
    sections: Mapping[str, Section],
    ladders: Sequence[LadderView],
    layers: Mapping[str, ConvProblem],
    pictures: dict[str, str],
) -> list[overview.Group]:
    """Return the first comparison; its chart is added to `pictures`."""
    runs = {name: section.runs[-1].runs for name, section in sections.items()}
    measured = {view.device.upper(): view.ladder for view in ladders if view.ladder is not None}
    found = overview.groups(runs, measured)
    titles = {name: f"{p.channels} to {p.filters} channels" for name, p in layers.items()}
    chart = overview.draw(found, titles)
    if chart is not None:
        pictures[OVERVIEW] = chart
    return found


def _section(
    options: Options,
    script: str,
    measurements: Mapping[str, Measurement],
    results: Mapping[str, Result],
    pictures: dict[str, str],
) -> Section:
    runs = tuple(
        _shown([(measurements[key], results[key]) for key in plan.run_keys(options, script, size)])
        for size in plan.sizes(options, script)
    )
    lacking = [shown.run.error for shown in runs if shown.run.lacks_gpu]
    key = plan.profile_key(script)
    profile = profile_view.view(script, results[key], pictures) if key in results else None
    return Section(MILESTONES[script], runs, lacking[0] if lacking else None, profile)


def _shown(made: Sequence[tuple[Measurement, Result]]) -> Shown:
    job = made[0][0].job
    assert job is not None
    results = [result for _, result in made]
    runs = tuple(read_run(job, result.completed) for result in results)
    failed = next((run for run in runs if run.error is not None), None)
    return Shown(
        " ".join(("ece408", *this_python.parts(job.command)[1])),
        tuple(
            "\n".join(part.rstrip() for part in (each.stdout, each.stderr) if part.strip())
            for each in results
        ),
        runs,
        failed or Row(runs).summary,
        tuple(f"{layer}: {name}" for layer, name in _GPU_LINE.findall(results[0].stderr)),
    )


def _failures(
    measurements: Sequence[Measurement], results: Mapping[str, Result]
) -> tuple[str, ...]:
    """Return a line for each failure, except of programs that cannot run on this machine."""
    return tuple(
        f"{each.title}: {reason(results[each.key].completed)}"
        for each in measurements
        if results[each.key].failed
    )
