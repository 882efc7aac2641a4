"""Whether a profile tells the truth: kernel times beside events' and ncu's; and what it costs."""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends.cuda import catalog, device
from ..course import comparison
from ..errors import OperatorFailed
from ..profile import activities, ncu
from ..profile.activities import KERNEL, OP_CALL, Profile
from ..profile.cupti_recorder import CuptiRecorder
from . import cuda_bench, shapes

_OP_TIME = re.compile(r"^Op Time: ([\d.]+)$", re.M)
_SAMPLES = 20


@dataclass(frozen=True)
class Agreement:
    """Milliseconds of one kernel's work: by events around it without a profile, by the profile, by
    events in the same run as that, and by ncu in a process of its own (`None` where not taken)."""

    shape: str
    kernel: str
    events_ms: float | None
    profile_ms: float
    recorded_events_ms: float
    ncu_ms: float | None = None

    def off(self, other_ms: float | None) -> float | None:
        """By how much of it the profile differs from another time, 0.01 being 1 %."""
        return None if other_ms is None else self.profile_ms / other_ms - 1


@dataclass(frozen=True)
class Cost:
    """Op times of one milestone in milliseconds, a row for each run, without and with profile."""

    command: tuple[str, ...]
    without_ms: tuple[tuple[float, ...], ...]
    with_ms: tuple[tuple[float, ...], ...]

    def medians(self) -> list[tuple[float, float]]:
        """For each layer, the median without and with."""
        plain, recorded = (zip(*rows) for rows in (self.without_ms, self.with_ms))
        return [(statistics.median(a), statistics.median(b)) for a, b in zip(plain, recorded)]


def agree(shape: str) -> Agreement:
    """Time the kernel that the catalog chooses for a shape: by events, then with the profile too.

    Raises what `CuptiRecorder` and the bench raise.
    """
    kernel, timing = launch(shape, _SAMPLES)
    recorder = CuptiRecorder(time.time_ns())
    recorder.start()
    _, recorded = launch(shape, _SAMPLES)
    durations: dict[str, list[float]] = {}
    functions = _functions(kernel, shape)
    for activity in recorder.stop():
        if activity.kind == KERNEL and activity.name in functions:
            durations.setdefault(activity.name, []).append(activity.duration_ns / 1e6)
    profile_ms = sum(statistics.median(each[-_SAMPLES:]) for each in durations.values())
    return Agreement(shape, kernel.name, timing.median_ms, profile_ms, recorded.median_ms)


def launch(shape: str, samples: int) -> tuple[catalog.Kernel, cuda_bench.Timing]:
    """Run the chosen kernel on a shape's problem; returns it with its times by events."""
    gpu, problem = device.get(0), shapes.find(shape)
    kernel = catalog.default(problem, "forward", gpu.capability)
    with cuda_bench.bench(gpu, problem) as bench:
        return kernel, bench.time(kernel, samples)


def _functions(kernel: catalog.Kernel, shape: str) -> set[str]:
    """Names of the functions that the kernel launches for a shape."""
    plan = kernel.plan(shapes.find(shape), device.get(0).capability, False)
    return {each.function for each in plan.launches}


def with_ncu(found: Agreement, command: Sequence[str]) -> Agreement:
    """The same with ncu's median for the kernel's functions, which the command launches.

    Raises what `ncu.count` raises.
    """
    functions = _functions(catalog.get(found.kernel), found.shape)
    counted = [each for each in ncu.count(command, ncu.find()) if each.name in functions]
    return dataclasses.replace(found, ncu_ms=sum(each.milliseconds for each in counted))


def of_milestone(profile: Profile) -> list[Agreement]:
    """For each layer of a profiled milestone, the time in which kernels ran, the time between
    events before and after every chunk's kernels, and ncu's for all launches, where it has them."""
    found = []
    for figure in profile.kernel_figures:
        calls = [
            call.details["events_ms"]
            for call in profile.of_kinds(OP_CALL)
            if call.details["layer"] == figure["layer"]
        ]
        functions = {each["name"] for each in figure["functions"]}
        counted = [
            each["launches"] * each["milliseconds"]
            for each in profile.counters
            if each["name"] in functions
        ]
        found.append(
            Agreement(
                f"{' '.join(profile.command)}, {figure['layer']}",
                figure["kernel"],
                None,
                figure["milliseconds"],
                statistics.mean(calls),
                sum(counted) if counted else None,
            )
        )
    return found


def cost(arguments: Sequence[str], runs: int) -> Cost:
    """Op times of a milestone without and with its profile, in turns, each a process of its own.

    Raises `OperatorFailed` when a run fails.
    """
    times: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for _ in range(runs):
        for recorded, rows in times.items():
            options = ["--profile"] if recorded else []
            output = _run([*arguments, *options])
            rows.append(tuple(1e3 * float(seconds) for seconds in _OP_TIME.findall(output)))
    return Cost(tuple(arguments), tuple(times[False]), tuple(times[True]))


def profiled(arguments: Sequence[str], counters: bool) -> tuple[str, Profile, str]:
    """What `ece408 profile` prints for a milestone, the profile, and its time line's text; with
    `counters`, ncu's too.

    Raises `OperatorFailed` when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="ece408-proof-") as folder:
        json, trace = Path(folder) / "profile.json", Path(folder) / "trace.json"
        options = [f"--json={json}", f"--trace={trace}", *(["--ncu"] if counters else [])]
        output = _run(["profile", *options, *arguments])
        return output, activities.read(json), trace.read_text(encoding="utf-8")


def _run(arguments: Sequence[str]) -> str:
    command = [sys.executable, "-m", "ece408_op", *arguments]
    result = comparison.run_process(command)
    if result.returncode:
        words = result.stderr.strip().splitlines() or ["it said nothing"]
        raise OperatorFailed(f"{' '.join(arguments)} failed ({result.returncode}): {words[-1]}")
    return result.stdout


def table(agreements: Sequence[Agreement], costs: Sequence[Cost]) -> str:
    """Both as Markdown, as far as there are any."""
    lines = []
    if agreements:
        lines += [
            "| shape | kernel | profile, ms | events, without profile, ms | off by | events in the "
            "same run, ms | off by | ncu, ms | off by |",
            f"|{' --- |' * 9}",
        ]
    for each in agreements:
        cells = [each.shape, each.kernel, f"{each.profile_ms:.4f}"]
        for other in (each.events_ms, each.recorded_events_ms, each.ncu_ms):
            off = each.off(other)
            cells += ["", ""] if off is None else [f"{other:.4f}", f"{off:+.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    if any(each.events_ms is None for each in agreements):
        lines += [
            "",
            "Of a staged milestone, events lie before and after each chunk's kernels: what is "
            "between them includes the wait for a late launch. The profile has the kernels alone.",
        ]
    if costs:
        lines += ["", "| milestone | layer | op time, ms | with profile, ms | costs |"]
        lines += ["| --- | --- | --- | --- | --- |"]
    for each_cost in costs:
        command = " ".join(each_cost.command)
        for layer, (plain, recorded) in enumerate(each_cost.medians(), start=1):
            cells = [command, str(layer), f"{plain:.1f}", f"{recorded:.1f}"]
            lines.append(f"| {' | '.join(cells)} | {recorded / plain - 1:+.1%} |")
    return "\n".join(lines)
