"""Comparison of the milestones that this machine can run: jobs, runs, and their figures.

Each run is a separate process, because program time and peak memory belong to a process. Its
figures are parsed from its output: the course's lines on stdout and the run time on stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from ..backends import kernel_file
from ..errors import NoUsableGpu
from ..host import this_python
from ..host.interruptible import interrupts_later
from .course_terms import BASELINE, Term
from .dataset import fashion_data
from .milestone import MILESTONES, Milestone, Request, make_request

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

_ERROR = "ece408: error: "
_SECONDS_TO_END = 5


@dataclass(frozen=True)
class Options:
    """Options given to every run, as on the command line; `None` leaves one to the milestone."""

    size: str | None = None
    batch_size: str | None = None
    backend: str | None = None
    threads: str | None = None
    data: str | None = None
    kernel: str | None = None
    precision: str | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class Job:
    """One run to make: its milestone, the request, and its command."""

    milestone: Milestone
    request: Request
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.milestone.name} {self.request.model} ({self.request.term.name})"


@dataclass(frozen=True)
class Run:
    """The figures of one run, or its error.

    `op_seconds` is wall seconds of each layer's convolution, all batches together; MXNet's own are
    measured by its profiler. `elapsed_s` is wall seconds of the whole process and `peak_bytes` its
    largest resident set. `error` is one line; the figures are then missing.
    """

    script: str
    term: str
    model: str
    size: int
    accuracy: float | None = None
    op_seconds: tuple[float, ...] = ()
    elapsed_s: float | None = None
    peak_bytes: int | None = None
    exit_code: int = 0
    error: str | None = None

    @property
    def lacks_gpu(self) -> bool:
        """Whether it failed because a GPU, or software for it, is missing."""
        return self.exit_code == NoUsableGpu.exit_code

    @property
    def failed(self) -> bool:
        """Whether it failed for another reason."""
        return self.error is not None and not self.lacks_gpu


@dataclass(frozen=True)
class Row:
    """The runs of one job, in order; a run that fails is the last one."""

    samples: tuple[Run, ...]

    @property
    def summary(self) -> Run:
        """The failed run, or a run with the median of each figure."""
        last = self.samples[-1]
        if last.error is not None or len(self.samples) == 1:
            return last
        layers = zip(*(run.op_seconds for run in self.samples))
        return dataclasses.replace(
            last,
            accuracy=_median(run.accuracy for run in self.samples),
            op_seconds=tuple(map(statistics.median, layers)),
            elapsed_s=_median(run.elapsed_s for run in self.samples),
            peak_bytes=round(_median(run.peak_bytes for run in self.samples)),
        )


def plan(terms: Sequence[Term], options: Options) -> list[Job]:
    """Return the jobs of a comparison: every milestone with each model of a term that it runs.

    Raises `InvalidSize` for an unusable number of images or batch size.
    """
    return [
        _job(term, milestone, model, options)
        for term in terms
        for milestone in MILESTONES.values()
        for model in term.models
        if milestone.own_operator == (model != BASELINE)
    ]


def _job(term: Term, milestone: Milestone, model: str, options: Options) -> Job:
    # An empty size is an error; it must not be treated as a missing one, which means all images.
    arguments = [model] if options.size is None else [model, options.size]
    request = make_request(milestone, arguments, term.name, options.batch_size)
    command = [*this_python.running("ece408_op"), milestone.name, model, str(request.size)]
    given = {
        "--term": term.name,
        "--batch-size": options.batch_size,
        "--backend": options.backend if milestone.own_operator and not milestone.on_gpu else None,
        "--kernel": options.kernel if _takes_kernel(milestone, options.kernel) else None,
        "--precision": options.precision if milestone.own_operator else None,
        "--gpu": options.gpu if milestone.on_gpu else None,
        "--threads": options.threads,
        "--data": options.data,
    }
    for option, value in given.items():
        # One word, so that a value may begin with a dash.
        command += [] if value is None else [f"{option}={value}"]
    return Job(milestone, request, tuple(command))


def _takes_kernel(milestone: Milestone, kernel: str | None) -> bool:
    """Return whether a milestone runs a kernel: CPU files are for m2.1, all others for the GPU."""
    if kernel is None or not milestone.own_operator:
        return False
    return milestone.on_gpu == (kernel_file.device_of(kernel) != "cpu")


def prepare_data(jobs: Sequence[Job]) -> None:
    """Fetch and resize the images in advance, so that the first run's time excludes that.

    Raises the errors of `fashion_data.load`.
    """
    for size in dict.fromkeys(job.request.term.image_size for job in jobs):
        fashion_data.load("t10k", size)


def run_process(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; if Ctrl-C interrupts the wait, end it first."""
    # If Ctrl-C arrived during the start of the process, nothing would end it.
    with interrupts_later() as interrupt:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    with process:
        try:
            interrupt()
            stdout, stderr = process.communicate()
        except BaseException:
            _end(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate a process so that it can remove its temporary files."""
    try:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
    finally:
        process.kill()
        process.wait()


def compare(jobs: Sequence[Job], repeat: int = 1, runner: Runner | None = None) -> list[Row]:
    """Make every run `repeat` times and return a row for each job, in the order of the jobs.

    Repeats go in rounds, so that a temporary slowdown of the machine affects all rows alike. A
    failed job is not repeated. `runner` runs a command, by default as `run_process`. Shows progress
    on stderr if it is a terminal.
    """
    runner = runner or run_process
    samples: list[list[Run]] = [[] for _ in jobs]
    with tqdm(total=repeat * len(jobs), unit="run", disable=None) as progress:
        for _ in range(repeat):
            for job, runs in zip(jobs, samples):
                progress.set_description(str(job))
                if not runs or runs[-1].error is None:
                    runs.append(read_run(job, runner(job.command)))
                progress.update()
    return [Row(tuple(runs)) for runs in samples]


def read_run(job: Job, result: subprocess.CompletedProcess[str]) -> Run:
    """Parse a run's exit code and output; unreadable output is an error of the run."""
    request = job.request
    run = Run(job.milestone.name, request.term.name, request.model, request.size)
    if result.returncode:
        return dataclasses.replace(run, exit_code=result.returncode, error=reason(result))
    try:
        layers = len(request.term.filters)
        return dataclasses.replace(
            run,
            accuracy=float(_find(r"^(?:Correctness:|EvalMetric: .*:) ([\d.e-]+)", result.stdout)),
            op_seconds=_op_seconds(result, job.milestone.own_operator, layers),
            elapsed_s=_seconds(_find(r"([\d:.]+)elapsed", result.stderr)),
            peak_bytes=int(_find(r"(\d+)maxresident\)k", result.stderr)) << 10,
        )
    except ValueError as error:
        return dataclasses.replace(run, error=f"cannot read what it printed: {error}")


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.M)
    if found is None:
        raise ValueError(f"nothing like {pattern}")
    return found[1]


def _op_seconds(
    result: subprocess.CompletedProcess[str], own_operator: bool, layers: int
) -> tuple[float, ...]:
    """Return the seconds of each layer, summed over batches; layers alternate within a batch."""
    if own_operator:
        found = re.findall(r"^Op Time: ([\d.]+)$", result.stdout, re.M)
    else:
        found = re.findall(r"^ece408: MXNet's convolution: ([\d.]+) s$", result.stderr, re.M)
    times = list(map(float, found))
    if not times or len(times) % layers:
        raise ValueError(f"{len(times)} op times for {layers} layers")
    return tuple(sum(times[layer::layers]) for layer in range(layers))


def _seconds(clock: str) -> float:
    """Convert GNU time's m:ss.ss or h:mm:ss to seconds."""
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def reason(result: subprocess.CompletedProcess[str]) -> str:
    """Return one line on why a run failed: its own error, else the last line it printed."""
    if result.returncode == -signal.SIGKILL:
        return "killed (SIGKILL), perhaps because memory ran out; --batch-size 1000 takes less"
    if result.returncode < 0:
        number = -result.returncode
        return f"ended by signal {number} ({signal.strsignal(number)})"
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line[len(_ERROR) :] for line in lines if line.startswith(_ERROR)]
    return (errors or lines or [f"exit code {result.returncode}, without a message"])[-1]


def _median(figures: Iterable[float | None]) -> float:
    return statistics.median(figure for figure in figures if figure is not None)
