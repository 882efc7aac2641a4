"""The list of programs for a report, each run in a separate process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..course import comparison
from ..course.comparison import Job
from ..course.course_terms import BASELINE, Term
from ..course.milestone import MILESTONES
from ..errors import InvalidSize
from ..host import this_python
from .ladder import problems
from .own_kernels import Version

DEFAULT_SIZES = "100,1000,10000"
# Run at the largest size only; the course wants no op times of them, nor of m4.1.
_ONE_SIZE = ("m1.1", "m1.2", "final")
# The milestones to profile: the last one's kernels are those of m4.1.
PROFILED = ("m1.1", "m1.2", "m2.1", "m3.1")
# Batch for the CPU's kernels; the textbook loops take seconds for it.
CPU_LADDER_BATCH = 1000
OWN_KEY = "own-kernels"
_OWN_ROUNDS = 5


@dataclass(frozen=True)
class Options:
    """The command line's options. `sizes` are numbers of images, smallest first.

    `peer_python` is a Python with PyTorch, for the times of PyTorch and cuDNN; every run receives
    `threads` and `data`; `None` means the milestones' default. `versions` are the user's kernels.
    Each milestone is timed in `repeat` runs.
    """

    term: Term
    sizes: tuple[int, ...]
    threads: str | None = None
    data: str | None = None
    peer_python: str | None = None
    versions: tuple[Version, ...] = ()
    repeat: int = 1


@dataclass(frozen=True)
class Measurement:
    """A program to run. `key` is its name within a report, `title` the name shown to the user.

    `job` is the milestone that it runs, or `None`. The program may write a `profile`. It is skipped
    if the measurement `gate` found no usable GPU.
    """

    key: str
    title: str
    command: tuple[str, ...]
    job: Job | None = None
    profile: Path | None = None
    gate: str | None = None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of images, such as "100,1000", smallest first. Raises `InvalidSize`."""
    parts = [part.strip() for part in text.split(",")]
    sizes = sorted({int(part) for part in parts if part.isdecimal()})
    if not all(part.isdecimal() for part in parts) or sizes[0] < 1 or sizes[-1] > 10000:
        raise InvalidSize(
            f"{text!r} is not a list of sizes; give whole numbers from 1 to 10000, such as "
            f"{DEFAULT_SIZES}"
        )
    return tuple(sizes)


def plan(options: Options, folder: Path) -> list[Measurement]:
    """Return a report's programs in the order of execution; profiles are written to `folder`.

    Milestones are timed first and profiled in separate runs, which profiling slows down. Repeats
    are interleaved, so that a temporary slowdown of the machine affects all milestones alike.
    """
    timed = [
        _timed(options, script, size, number)
        for number in range(1, options.repeat + 1)
        for script in MILESTONES
        for size in sizes(options, script)
    ]
    profiled = [_profiled(options, script, folder) for script in PROFILED]
    measured = [*timed, *profiled, _ladder(options, "cpu"), _ladder(options, "gpu")]
    return [*measured, *_own(options, folder)]


def sizes(options: Options, script: str) -> tuple[int, ...]:
    """Return the numbers of images with which a milestone is timed."""
    return options.sizes[-1:] if script in _ONE_SIZE else options.sizes


def run_key(script: str, size: int, number: int = 1) -> str:
    """Return the key of a milestone's timed run; runs are numbered from 1."""
    return f"{script}-{size}" if number == 1 else f"{script}-{size}-run{number}"


def run_keys(options: Options, script: str, size: int) -> list[str]:
    """Return the keys of all timed runs of a milestone at a size."""
    return [run_key(script, size, number) for number in range(1, options.repeat + 1)]


def profile_key(script: str) -> str:
    """Return the key of a milestone's run under the profiler."""
    return f"profile-{script}"


def ladder_key(device: str) -> str:
    """Return the key of the kernels' times on a device, "cpu" or "gpu"."""
    return f"ladder-{device}"


def own_profile_key(number: int) -> str:
    """Return the key of a milestone's run under the profiler with a kernel of the user's, numbered
    from 0."""
    return f"profile-own-{number}"


def _own(options: Options, folder: Path) -> list[Measurement]:
    """Return the measurements of the user's kernels: one run for all times, and a profile of
    each."""
    if not options.versions:
        return []
    script = "m2.1" if options.versions[0].device == "cpu" else "m3.1"
    batch = ladder_batch(options, options.versions[0].device)
    layers = problems(options.term, batch).values()
    path = folder / f"{OWN_KEY}.profile.json"
    command = (
        *(*this_python.running("ece408_op"), "lab", "time", "--no-why"),
        *(version.path for version in options.versions),
        *(f"--layer={problem}" for problem in layers),
        *(f"--batch-size={batch}", f"--repeat={_OWN_ROUNDS}", f"--json={path}"),
    )
    gate = _gate(options, script)
    found = [Measurement(OWN_KEY, "kernels of your own", command, None, path, gate)]
    for number, version in enumerate(options.versions):
        job = _job(options, script, options.sizes[-1])
        path = folder / f"{own_profile_key(number)}.profile.json"
        start, milestone = this_python.parts(job.command)
        own = (*start, "profile", f"--json={path}", *milestone, f"--kernel={version.path}")
        title = f"profile of {script} with {version.name}"
        found.append(Measurement(own_profile_key(number), title, own, job, path, gate))
    return found


def _job(options: Options, script: str, size: int) -> Job:
    run_options = comparison.Options(str(size), None, None, options.threads, options.data)
    wanted = (BASELINE, options.term.default_model)
    return next(
        job
        for job in comparison.plan([options.term], run_options)
        if job.milestone.name == script and job.request.model in wanted
    )


def _gate(options: Options, script: str) -> str | None:
    """Return the key of the first run that shows whether milestones of this kind can run here."""
    if not MILESTONES[script].on_gpu:
        return None
    if not MILESTONES[script].own_operator:
        return run_key(script, options.sizes[-1])
    return run_key("m3.1", options.sizes[0])


def _timed(options: Options, script: str, size: int, number: int) -> Measurement:
    job, key = _job(options, script, size), run_key(script, size, number)
    gate = _gate(options, script)
    title = f"{script}, {size} images" + (f", run {number}" if options.repeat > 1 else "")
    return Measurement(key, title, job.command, job, gate=None if gate == key else gate)


def _profiled(options: Options, script: str, folder: Path) -> Measurement:
    job, key = _job(options, script, options.sizes[-1]), profile_key(script)
    path = folder / f"{key}.profile.json"
    start, milestone = this_python.parts(job.command)
    command = (*start, "profile", f"--json={path}", *milestone)
    return Measurement(key, f"profile of {script}", command, job, path, _gate(options, script))


def ladder_batch(options: Options, device: str) -> int:
    """Return the batch for the kernels' times on a device, "cpu" or "gpu"."""
    largest = options.sizes[-1]
    return largest if device == "gpu" else min(largest, CPU_LADDER_BATCH)


def _ladder(options: Options, device: str) -> Measurement:
    batch = ladder_batch(options, device)
    command = [*this_python.running("ece408_op.report.measure_ladder"), device]
    command += [f"--term={options.term.name}", f"--batch={batch}"]
    if options.threads is not None:
        command.append(f"--threads={options.threads}")
    if options.peer_python is not None:
        command.append(f"--peer-python={options.peer_python}")
    return Measurement(
        ladder_key(device),
        f"kernels on the {device.upper()}",
        tuple(command),
        gate=_gate(options, "m3.1") if device == "gpu" else None,
    )
