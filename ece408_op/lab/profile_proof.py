"""Whether a profile tells the truth: kernel times beside events' and ncu's; and what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..backends.cuda import catalog, device, launcher
from ..backends.cuda.plan import Plan
from ..course import comparison
from ..errors import OperatorFailed
from ..problem import ConvProblem
from ..profile import activities, ncu
from ..profile.activities import KERNEL, OP_CALL, Profile
from ..profile.cupti_recorder import CuptiRecorder
from . import cuda_bench, shapes

_OP_TIME = re.compile(r"^Op Time: ([\d.]+)$", re.M)
_SAMPLES = 20
_ROUNDS = 6
_SOME_NUMBER = 0x3D123456  # a float32 of 0.0357


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
class Total:
    """Milliseconds of so many launches of a kernel, one right after the other, arrays on the GPU:
    by the profile, as the sum of its kernels, and between two events; a pair for each round."""

    shape: str
    kernel: str
    launches: int
    rounds_ms: tuple[tuple[float, float], ...]

    def medians(self) -> tuple[float, float]:
        """The median by the profile, and by the events."""
        profile, events = zip(*self.rounds_ms)
        return statistics.median(profile), statistics.median(events)


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


def total(shape: str) -> Total:
    """Time rounds of launches of the kernel chosen for a shape, by events and the profile at once.

    A single launch would not do: between its events lies also what Python takes to launch it.
    Raises what `CuptiRecorder` raises, and the errors of compiling, loading and launching.
    """
    recorder = CuptiRecorder(time.time_ns())
    recorder.start()
    gpu, problem = device.get(0), shapes.find(shape)
    kernel = catalog.default(problem, "forward", gpu.capability)
    events_ms = _rounds(gpu, problem, kernel.plan(problem, gpu.capability, False))
    functions = _functions(kernel, shape)
    found = [
        activity.duration_ns / 1e6
        for activity in recorder.stop()
        if activity.kind == KERNEL and activity.name in functions
    ]
    step = len(found) // _ROUNDS
    profile_ms = (sum(found[n * step : (n + 1) * step]) for n in range(_ROUNDS))
    return Total(shape, kernel.name, _SAMPLES, tuple(zip(profile_ms, events_ms)))


def _rounds(gpu: device.Gpu, problem: ConvProblem, plan: Plan) -> list[float]:
    """Milliseconds between the events of each round, inputs being any constant."""
    arrays = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    with gpu.active(), contextlib.ExitStack() as lanes:
        pointers = {}
        for name, shape in arrays.items():
            size = math.prod(shape)
            pointers[name] = lanes.enter_context(gpu.lane(4 * size)).device
            gpu.cuda.memset_d32(pointers[name], _SOME_NUMBER, size)
        loaded = launcher.load(plan, gpu.capability)
        with loaded.lock, gpu.lane(plan.workspace_bytes) as lane:
            pointers["workspace"] = lane.device
            return [_round(lane, loaded, pointers) for _ in range(_ROUNDS)]


def _round(lane: device.Lane, loaded: launcher.LoadedPlan, pointers: dict[str, int]) -> float:
    lane.mark(device.BEGIN)
    for _ in range(_SAMPLES):
        lane.launch(loaded, pointers)
    lane.mark(device.COMPUTED)
    lane.wait()
    return 1e3 * lane.seconds(device.BEGIN, device.COMPUTED)


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


def table(
    agreements: Sequence[Agreement], costs: Sequence[Cost], totals: Sequence[Total] = ()
) -> str:
    """All as Markdown, as far as there are any."""
    lines = []
    if totals:
        lines += ["| shape | kernel | launches | profile, ms | events, ms | off by |"]
        lines += [f"|{' --- |' * 6}"]
    for each_total in totals:
        profile_ms, events_ms = each_total.medians()
        cells = [each_total.shape, each_total.kernel, str(each_total.launches)]
        cells += [f"{profile_ms:.4f}", f"{events_ms:.4f}", f"{profile_ms / events_ms - 1:+.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    if totals and agreements:
        lines += [
            "",
            "One launch at a time, events around each, between which lies also what Python takes "
            "to launch it:",
            "",
        ]
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
