"""The report's text: what the programs printed, sorted into the course's sections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..course.comparison import Job, Run, read_run, reason
from ..course.milestone import MILESTONES, Milestone
from ..errors import InvalidSetting
from ..problem import ConvProblem
from . import figures, ladder, own_kernels, plan, profile_view, rendering
from .cudnn_times import Recorded, recorded
from .ladder import Ladder
from .notes import Sections
from .plan import Measurement, Options
from .profile_view import ProfileView
from .store import Result

_GPU_LINE = re.compile(r"^ece408: (\S*) by (.+?): kernel [\d.]+ ms", re.M)


@dataclass(frozen=True)
class Shown:
    """One timed run: its command as a user would type it, what it printed, and its figures."""

    command: str
    output: str
    run: Run
    kernels: tuple[str, ...]

    @property
    def op_times(self) -> str:
        """Milliseconds of each layer, or a dash for MXNet's own, which reports none."""
        return ", ".join(f"{1e3 * seconds:.3f}" for seconds in self.run.op_seconds) or "-"

    @property
    def total_ms(self) -> float:
        return 1e3 * sum(self.run.op_seconds)


@dataclass(frozen=True)
class Section:
    """A milestone: its timed runs, one for each size, and its profile if it is profiled.

    `missing` says why it cannot run here, if it cannot.
    """

    milestone: Milestone
    runs: tuple[Shown, ...]
    missing: str | None
    profile: ProfileView | None


@dataclass(frozen=True)
class LadderView:
    """A ladder and the files of its pictures, or the reason why it is missing; profiles by step."""

    device: str
    failure: str | None = None
    ladder: Ladder | None = None
    bars: str | None = None
    roofline: str | None = None
    profiles: Mapping[str, ProfileView] = field(default_factory=dict)

    def rates(self, layer: str) -> tuple[float, float, float]:
        """GFLOP/s, GB/s and share of the floor of a layer's fastest accurate step."""
        assert self.ladder is not None
        problem = ConvProblem.parse(self.ladder.layers[layer])
        step = self.ladder.fastest(layer)
        ms = step.median_ms(layer) if step else None
        assert ms is not None
        floor = self.ladder.floors_ms[layer]
        return problem.flops / ms / 1e6, problem.bytes / ms / 1e6, floor / ms


@dataclass(frozen=True)
class Document:
    """The report as Markdown, its pictures by file name, and what went wrong in its runs."""

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
    """Sort out results into sections and draw the pictures.

    `state` is `Store.state`, `notes` a student's, by section.
    """
    pictures: dict[str, str] = {}
    by_key = {each.key: each for each in measurements}
    sections = {name: _section(options, name, by_key, results, pictures) for name in MILESTONES}
    ladders = [_ladder(device, results, pictures) for device in ("gpu", "cpu")]
    title = f"Convolution in MXNet: milestone report, term {options.term.name}"
    placed = Sections(notes)
    markdown = rendering.render(
        "report.md.j2",
        title=title,
        options=options,
        state=state,
        machine=state["identity"]["machine"],
        settings=state["identity"]["settings"],
        seconds=sum(result.seconds for result in results.values()),
        sections=sections,
        ladders=ladders,
        own=_own(options, ladders, results, pictures),
        layers=ladder.problems(options.term, options.sizes[-1]),
        cudnn=_cudnn(options, ladders[0]),
        notes=placed,
    )
    return Document(title, markdown, pictures, _failures(measurements, results))


def _section(
    options: Options,
    script: str,
    measurements: Mapping[str, Measurement],
    results: Mapping[str, Result],
    pictures: dict[str, str],
) -> Section:
    keys = [plan.run_key(script, size) for size in options.sizes]
    runs = tuple(_shown(measurements[key], results[key]) for key in keys if key in results)
    lacking = [shown.run.error for shown in runs if shown.run.lacks_gpu]
    key = plan.profile_key(script)
    profile = profile_view.view(script, results[key], pictures) if key in results else None
    return Section(MILESTONES[script], runs, lacking[0] if lacking else None, profile)


def _shown(measurement: Measurement, result: Result) -> Shown:
    assert measurement.job is not None
    job: Job = measurement.job
    words = " ".join(("ece408", *job.command[3:]))
    kernels = tuple(f"{layer}: {name}" for layer, name in _GPU_LINE.findall(result.stderr))
    output = "\n".join(part.rstrip() for part in (result.stdout, result.stderr) if part.strip())
    return Shown(words, output, read_run(job, result.completed), kernels)


def _ladder(device: str, results: Mapping[str, Result], pictures: dict[str, str]) -> LadderView:
    result = results[plan.ladder_key(device)]
    if not result.ok:
        return LadderView(device, failure=reason(result.completed))
    try:
        measured = ladder.from_json(result.stdout.strip().splitlines()[-1])
    except (InvalidSetting, IndexError) as error:
        return LadderView(device, failure=f"its times cannot be read: {error}")
    return _drawn(device, device, measured, pictures)


def _drawn(
    device: str,
    name: str,
    measured: Ladder,
    pictures: dict[str, str],
    profiles: Mapping[str, ProfileView] | None = None,
) -> LadderView:
    bars, roofline = f"ladder_{name}.svg", f"roofline_{name}.svg"
    pictures[bars] = figures.ladder_bars(measured)
    pictures[roofline] = figures.roofline(measured)
    return LadderView(device, None, measured, bars, roofline, profiles or {})


def _own(
    options: Options,
    ladders: Sequence[LadderView],
    results: Mapping[str, Result],
    pictures: dict[str, str],
) -> LadderView | None:
    """The versions of the user's kernel, if the report was given any."""
    if not options.versions:
        return None
    device = options.versions[0].device
    base = next(each for each in ladders if each.device == device)
    result = results[plan.OWN_KEY]
    # A version that fails is among the times, too.
    if result.profile is None:
        return LadderView(device, failure=reason(result.completed))
    if base.ladder is None:
        return LadderView(device, failure=base.failure)
    try:
        measured = own_kernels.ladder(options.versions, result.profile, base.ladder)
    except InvalidSetting as error:
        return LadderView(device, failure=str(error))
    profiles = {
        version.name: profile_view.view(
            f"own_{number}", results[plan.own_profile_key(number)], pictures
        )
        for number, version in enumerate(options.versions)
    }
    return _drawn(device, "own", measured, pictures, profiles)


def _cudnn(options: Options, gpu: LadderView) -> Recorded | None:
    """Recorded times of cuDNN, unless there are some of this very GPU."""
    if gpu.ladder is not None and gpu.ladder.peers:
        return None
    return recorded(options.term)


def _failures(
    measurements: Sequence[Measurement], results: Mapping[str, Result]
) -> tuple[str, ...]:
    """A line for each failure, except of programs that cannot run on this machine."""
    return tuple(
        f"{each.title}: {reason(results[each.key].completed)}"
        for each in measurements
        if results[each.key].failed
    )
