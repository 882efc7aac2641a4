"""Lists the programs to run for a report, each in a separate process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ..course import comparison
from ..course.comparison import Job
from ..course.milestone import MILESTONES
from ..course.models import BASELINE, Term
from ..errors import InvalidSize

DEFAULT_SIZES = "100,1000,10000"
# Run at the largest size only; the course asks for no op times of them, or for the same ones.
_ONE_SIZE = ("m1.1", "m1.2", "final")
# What the report profiles: the last one's kernels are m4.1's.
PROFILED = ("m1.1", "m1.2", "m2.1", "m3.1")
# Images in one batch for the CPU's kernels; the textbook loops take seconds for them.
CPU_LADDER_BATCH = 1000


@dataclass(frozen=True)
class Options:
    """The command line's options. `sizes` are numbers of images, smallest first.

    `peer_python` is a Python with PyTorch, for cuDNN's times, `threads` and `data` are what every
    run is given; `None` leaves it to the milestones.
    """

    term: Term
    sizes: tuple[int, ...]
    threads: str | None = None
    data: str | None = None
    peer_python: str | None = None


@dataclass(frozen=True)
class Measurement:
    """A program to run. `key` is its name within a report, `title` the name shown to the user.

    `job` is the milestone that it runs, if it does. The program writes `profile` if there is one.
    It is left out when the measurement `gate` found no usable GPU, for the same reason.
    """

    key: str
    title: str
    command: tuple[str, ...]
    job: Job | None = None
    profile: Path | None = None
    gate: str | None = None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of images, such as "100,1000", smallest first. Raises `InvalidSize`."""
    parts = [part.strip() for part in text.split(",")]
    sizes = sorted({int(part) for part in parts if part.isdecimal()})
    if not all(part.isdecimal() for part in parts) or sizes[0] < 1 or sizes[-1] > 10000:
        raise InvalidSize(
            f"{text!r} is not a list of sizes; give whole numbers from 1 to 10000, such as "
            f"{DEFAULT_SIZES}"
        )
    return tuple(sizes)


def plan(options: Options, folder: Path) -> list[Measurement]:
    """Every program of a report, in the order to run them; profiles are written to `folder`.

    Milestones are timed first and profiled in runs of their own, which profiling slows down.
    """
    largest = options.sizes[-1]
    timed = [
        _timed(options, script, size)
        for script in MILESTONES
        for size in ((largest,) if script in _ONE_SIZE else options.sizes)
    ]
    profiled = [_profiled(options, script, folder) for script in PROFILED]
    return [*timed, *profiled, _ladder(options, "cpu"), _ladder(options, "gpu")]


def run_key(script: str, size: int) -> str:
    """The key of a milestone's timed run."""
    return f"{script}-{size}"


def profile_key(script: str) -> str:
    """The key of a milestone's run under the profiler."""
    return f"profile-{script}"


def ladder_key(device: str) -> str:
    """The key of the kernels' times on a device, "cpu" or "gpu"."""
    return f"ladder-{device}"


def _job(options: Options, script: str, size: int) -> Job:
    asked = comparison.Options(str(size), None, None, options.threads, options.data)
    wanted = (BASELINE, options.term.default_model)
    return next(
        job
        for job in comparison.plan([options.term], asked)
        if job.milestone.name == script and job.request.model in wanted
    )


def _gate(options: Options, script: str) -> str | None:
    """The first run that shows whether a milestone of this kind can run here."""
    if not MILESTONES[script].on_gpu:
        return None
    if not MILESTONES[script].own_operator:
        return run_key(script, options.sizes[-1])
    return run_key("m3.1", options.sizes[0])


def _timed(options: Options, script: str, size: int) -> Measurement:
    job, key = _job(options, script, size), run_key(script, size)
    gate = _gate(options, script)
    return Measurement(
        key, f"{script}, {size} images", job.command, job, gate=None if gate == key else gate
    )


def _profiled(options: Options, script: str, folder: Path) -> Measurement:
    job, key = _job(options, script, options.sizes[-1]), profile_key(script)
    path = folder / f"{key}.profile.json"
    start, milestone = job.command[:3], job.command[3:]
    command = (*start, "profile", f"--json={path}", *milestone)
    return Measurement(key, f"profile of {script}", command, job, path, _gate(options, script))


def _ladder(options: Options, device: str) -> Measurement:
    largest = options.sizes[-1]
    batch = largest if device == "gpu" else min(largest, CPU_LADDER_BATCH)
    command = [sys.executable, "-m", "ece408_op.report.measure_ladder", device]
    command += [f"--term={options.term.name}", f"--batch={batch}"]
    if options.threads is not None:
        command.append(f"--threads={options.threads}")
    if options.peer_python is not None and device == "gpu":
        command.append(f"--peer-python={options.peer_python}")
    return Measurement(
        ladder_key(device),
        f"kernels on the {device.upper()}",
        tuple(command),
        gate=_gate(options, "m3.1") if device == "gpu" else None,
    )
