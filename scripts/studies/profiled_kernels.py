"""One kernel's launches, timed by events and by the profile at once: do the two agree?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.backends.cuda.kernels import tuned
from ece408_op.backends.cuda.plan import Plan
from ece408_op.backends.cuda.runtime import device, launcher
from ece408_op.bench import shapes
from ece408_op.bench.summary import summary
from ece408_op.errors import OperatorFailed
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem
from ece408_op.profile import ncu
from ece408_op.profile.activities import KERNEL, Activity
from ece408_op.profile.cupti_recorder import CuptiRecorder

LAUNCHES = 20
_ROUNDS = 6
_WARM_UP = 3
# Long enough for the GPU to recover from a launch, as it can between two of ncu's.
_PAUSE_S = 0.02
_BLOCK = 1 << 24  # numbers


@dataclass(frozen=True)
class Times:
    """Milliseconds of a kernel's launches, its arrays on the GPU.

    `apart` and `behind` are of `LAUNCHES` launches, one for each: of those apart each comes after a
    pause, of those behind each is enqueued while another runs. `in_a_row` is of rounds of
    `LAUNCHES` launches, one right after the other, a sum for each round.
    """

    apart: tuple[float, ...]
    behind: tuple[float, ...]
    in_a_row: tuple[float, ...]

    def record(self) -> dict[str, dict[str, float]]:
        """The same for JSON, a summary of each."""
        return {way: summary(samples) for way, samples in vars(self).items()}


@dataclass(frozen=True)
class Timed:
    """The kernel chosen for a shape: by events without any profile, by events while the profile is
    recorded, by that profile, and by ncu, in a process of its own, one launch (`None` without).

    `clocks_mhz` are the GPU's after launches apart and after those in a row.
    """

    shape: str
    kernel: str
    events: Times
    recorded_events: Times
    profile: Times
    clocks_mhz: tuple[int, int]
    ncu_ms: float | None = None

    def record(self) -> dict[str, Any]:
        """The same for JSON."""
        return {k: v.record() if isinstance(v, Times) else v for k, v in vars(self).items()}


def compare(names: Sequence[str]) -> list[Timed]:
    """Time the kernels that are chosen for these shapes on the first GPU.

    Raises what `CuptiRecorder` raises, `NotEnoughMemory`, the errors of compiling, loading and
    launching, and `OperatorFailed` if the profile lacks a launch or nvidia-smi does not run.
    """
    # CUPTI stays in the process once it has been there.
    before = {name: by_events(name)[0] for name in names}
    return [_recorded(name, before[name]) for name in names]


def by_events(shape: str) -> tuple[Times, tuple[int, int]]:
    """Launch the kernel chosen for a shape, in the order of `Times`, with events around; also the
    clocks in MHz, as in `Timed`."""
    gpu, problem = device.get(0), shapes.find(shape)
    with _ready(gpu, problem, _plan(shape)) as run:
        for _ in range(_WARM_UP):
            run.events_ms(1)
        apart = tuple(run.events_ms(1, pause=_PAUSE_S) for _ in range(LAUNCHES))
        rested = _clock_mhz()
        behind = tuple(run.events_ms(1, 1, pause=_PAUSE_S) for _ in range(LAUNCHES))
        in_a_row = tuple(run.events_ms(LAUNCHES) for _ in range(_ROUNDS))
        return Times(apart, behind, in_a_row), (rested, _clock_mhz())


def of_launches(milliseconds: Sequence[float]) -> Times:
    """What `by_events` has launched, from each launch's own time.

    Raises `OperatorFailed` if there are more or fewer than it launches.
    """
    apart = _WARM_UP + LAUNCHES
    behind = apart + 2 * LAUNCHES
    expected = behind + _ROUNDS * LAUNCHES
    if len(milliseconds) != expected:
        raise OperatorFailed(f"the profile has {len(milliseconds)} of {expected} launches")
    rounds = range(behind, expected, LAUNCHES)
    return Times(
        tuple(milliseconds[_WARM_UP:apart]),
        # Each follows the one that it waits behind.
        tuple(milliseconds[apart + 1 : behind : 2]),
        tuple(sum(milliseconds[at : at + LAUNCHES]) for at in rounds),
    )


def with_ncu(found: Timed, command: Sequence[str]) -> Timed:
    """The same with ncu's time for one launch, of which the command makes some.

    Raises what `ncu.count` raises.
    """
    counted = ncu.count(command, ncu.find())
    functions = {each.function for each in _plan(found.shape).launches}
    launch_ms = sum(each.milliseconds for each in counted if each.name in functions)
    return dataclasses.replace(found, ncu_ms=launch_ms)


def launch(shape: str, count: int) -> None:
    """Launch the kernel chosen for a shape `count` times."""
    with _ready(device.get(0), shapes.find(shape), _plan(shape)) as run:
        for _ in range(count):
            run.events_ms(1)


def table(found: Sequence[Timed]) -> str:
    """As Markdown: totals, which are the proof, and what single launches show."""
    return f"{_totals(found)}\n\n{_singles(found)}"


def _totals(found: Sequence[Timed]) -> str:
    about = (
        f"Totals of {LAUNCHES} launches, which are the proof. In a row: the sum in the profile, "
        "the time between an event before and one after all of them, and the same without a "
        f"profile (medians of {_ROUNDS}). Apart: the sum in the profile of launches with a pause "
        "before each, and as many times ncu's duration of one (a median), for ncu's launches lie "
        "apart as well: in a row, the GPU lowers its clock where a kernel takes much power."
    )
    head = ["shape", "kernel", "in a row: profile, ms", "events, ms", "off by"]
    head += ["events without a profile, ms", "off by", "clock, MHz"]
    head += ["apart: profile, ms", "ncu, ms", "off by", "clock, MHz"]
    rows = []
    for each in found:
        events = (each.recorded_events, each.events)
        in_a_row = _cells(
            statistics.median(each.profile.in_a_row),
            [statistics.median(times.in_a_row) for times in events],
        )
        ncu_ms = None if each.ncu_ms is None else LAUNCHES * each.ncu_ms
        apart = _cells(sum(each.profile.apart), [ncu_ms])
        rested, busy = each.clocks_mhz
        rows.append([each.shape, each.kernel, *in_a_row, busy, *apart, rested])
    return f"{about}\n\n{markdown.table(head, rows)}"


def _singles(found: Sequence[Timed]) -> str:
    about = (
        "Single launches (medians). Events around one that comes after a pause time more than the "
        "kernel: after the first event the GPU waits until Python has launched it. Enqueued "
        "behind another launch it does not wait, and events and profile agree."
    )
    head = ["shape", "kernel", "after a pause: profile, ms", "events, ms", "off by"]
    head += ["behind another: profile, ms", "events, ms", "off by"]
    rows = []
    for each in found:
        cells = [each.shape, each.kernel]
        for way in ("apart", "behind"):
            profile, events = (getattr(t, way) for t in (each.profile, each.recorded_events))
            cells += _cells(statistics.median(profile), [statistics.median(events)])
        rows.append(cells)
    return f"{about}\n\n{markdown.table(head, rows)}"


def _cells(profile_ms: float, others: Sequence[float | None]) -> list[str]:
    """The profile's time, and each other one with how far the profile is from it."""
    cells = [f"{profile_ms:.4f}"]
    for other in others:
        cells += ["", ""] if other is None else [f"{other:.4f}", f"{profile_ms / other - 1:+.2%}"]
    return cells


def _recorded(shape: str, before: Times) -> Timed:
    recorder = CuptiRecorder()
    recorder.start()
    events, clocks_mhz = by_events(shape)
    profile = of_launches(_launches_ms(recorder.stop(), _plan(shape)))
    kernel = tuned.best(shapes.find(shape), device.get(0), "float32").kernel
    return Timed(shape, kernel.name, before, events, profile, clocks_mhz)


def _launches_ms(activities: Sequence[Activity], plan: Plan) -> list[float]:
    """Milliseconds of each of the plan's launches, those of all its functions together."""
    functions = {each.function for each in plan.launches}
    kernels = [each for each in activities if each.kind == KERNEL and each.name in functions]
    step = len(plan.launches)
    return [
        sum(kernel.duration_ns for kernel in kernels[at : at + step]) / 1e6
        for at in range(0, len(kernels), step)
    ]


def _clock_mhz() -> int:
    """The clock of the first GPU's multiprocessors."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True).stdout)
    except (OSError, ValueError) as error:
        raise OperatorFailed(f"nvidia-smi does not tell the GPU's clock: {error}") from error


def _plan(shape: str) -> Plan:
    gpu, problem = device.get(0), shapes.find(shape)
    choice = tuned.best(problem, gpu, "float32")
    return choice.kernel.plan(problem, gpu.capability, False, choice.layout)


@dataclass(frozen=True)
class _Run:
    lane: device.Lane
    loaded: launcher.LoadedPlan
    pointers: dict[str, int]

    def events_ms(self, count: int, behind: int = 0, pause: float = 0.0) -> float:
        """Milliseconds between events around `count` launches, after a pause in seconds and
        `behind` launches that are not timed."""
        time.sleep(pause)
        for _ in range(behind):
            self.lane.launch(self.loaded, self.pointers)
        self.lane.mark(device.BEGIN)
        for _ in range(count):
            self.lane.launch(self.loaded, self.pointers)
        self.lane.mark(device.COMPUTED)
        self.lane.wait()
        return 1e3 * self.lane.seconds(device.BEGIN, device.COMPUTED)


@contextlib.contextmanager
def _ready(gpu: device.Gpu, problem: ConvProblem, plan: Plan) -> Iterator[_Run]:
    """The plan loaded, and its arrays on the GPU, the inputs full of numbers in +-0.5."""
    arrays = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    block = np.random.default_rng(408).random(_BLOCK, np.float32) - np.float32(0.5)
    with gpu.active(), contextlib.ExitStack() as lanes:
        pointers = {}
        for name, shape in arrays.items():
            size = math.prod(shape)
            pointers[name] = lanes.enter_context(gpu.lane(4 * size)).device
            for at in range(0, size if name != "y" else 0, _BLOCK):
                gpu.cuda.memcpy_htod(pointers[name] + 4 * at, block[: size - at])
        loaded = launcher.load(gpu, plan)
        with loaded.lock, gpu.lane(plan.workspace_bytes) as lane:
            yield _Run(lane, loaded, {**pointers, "workspace": lane.device})
