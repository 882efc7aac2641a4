"""Profiles of milestones: their kernels' times beside events' and ncu's, and what they cost."""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.bench.summary import summary
from ece408_op.course import comparison
from ece408_op.errors import OperatorFailed
from ece408_op.files import markdown
from ece408_op.profile import activities
from ece408_op.profile.activities import OP_CALL, Profile

_STAGED = (
    "Of a staged milestone, events lie before and after each chunk's kernels: what is between them "
    "includes the wait for a late launch. The profile has the kernels alone."
)
_COUNTED = (
    " ncu counts one launch at a time, with the caches emptied before it: of launches as short as "
    "a chunk's its durations are longer."
)
_OP_TIME = re.compile(r"^Op Time: ([\d.]+)$", re.M)


@dataclass(frozen=True)
class Layer:
    """Milliseconds of the kernels of a milestone's layer: in the profile, between events before and
    after the kernels of each chunk, and by ncu in a run of its own (`None` where not taken)."""

    milestone: str
    layer: str
    kernel: str
    profile_ms: float
    events_ms: float
    ncu_ms: float | None = None


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

    def record(self) -> dict[str, Any]:
        """The same for JSON, a summary for each layer."""
        times = {"without_ms": self.without_ms, "with_ms": self.with_ms}
        layers = {
            name: [summary(of_layer) for of_layer in zip(*rows)] for name, rows in times.items()
        }
        return {"command": self.command, **layers}


def of_milestone(profile: Profile) -> list[Layer]:
    """The layers of a profiled milestone whose kernels ran on a GPU; times are of one call."""
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
            Layer(
                " ".join(profile.command),
                figure["layer"],
                figure["kernel"],
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


def profiled(arguments: Sequence[str], counters: bool) -> tuple[str, Profile]:
    """What `ece408 profile` prints for a milestone, and the profile; with `counters`, ncu's too.

    Raises `OperatorFailed` when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="ece408-proof-") as folder:
        json = Path(folder) / "profile.json"
        options = [f"--json={json}", *(["--ncu"] if counters else [])]
        output = _run(["profile", *options, *arguments])
        return output, activities.read(json)


def _run(arguments: Sequence[str]) -> str:
    command = [sys.executable, "-m", "ece408_op", *arguments]
    result = comparison.run_process(command)
    if result.returncode:
        words = result.stderr.strip().splitlines() or ["it said nothing"]
        raise OperatorFailed(f"{' '.join(arguments)} failed ({result.returncode}): {words[-1]}")
    return result.stdout


def layers_table(layers: Sequence[Layer]) -> str:
    """The layers as Markdown, with ncu's times where there are any."""
    counted = any(each.ncu_ms is not None for each in layers)
    header = ["milestone", "layer", "kernel", "profile, ms", "between events, ms"]
    header += ["ncu, ms", "off by"] if counted else []
    rows = []
    for each in layers:
        cells = [each.milestone, each.layer, each.kernel]
        cells += [f"{each.profile_ms:.4f}", f"{each.events_ms:.4f}"]
        if each.ncu_ms is not None:
            cells += [f"{each.ncu_ms:.4f}", f"{each.profile_ms / each.ncu_ms - 1:+.2%}"]
        elif counted:
            cells += ["", ""]
        rows.append(cells)
    return f"{_STAGED}{_COUNTED if counted else ''}\n\n{markdown.table(header, rows)}"


def costs_table(costs: Sequence[Cost]) -> str:
    """What profiling costs, as Markdown."""
    head = ["milestone", "layer", "op time, ms", "with profile, ms", "costs"]
    rows = []
    for each in costs:
        command = " ".join(each.command)
        for layer, (plain, recorded) in enumerate(each.medians(), start=1):
            cells = [command, layer, f"{plain:.1f}", f"{recorded:.1f}"]
            rows.append([*cells, f"{recorded / plain - 1:+.1%}"])
    runs = len(costs[0].without_ms)
    about = f"Medians of {runs} runs; every profile is of a single one."
    return f"{about}\n\n{markdown.table(head, rows)}"
