"""Search for the fastest kernel and tiles of a problem; `backends.cuda.tuned` stores the
results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

from ..backends.cuda import work
from ..backends.cuda.kernel_plan import Kernel, Layout, Plan, Target
from ..backends.cuda.kernels import catalog, tuned
from ..backends.cuda.kernels.tuned import Choice, Result
from ..backends.cuda.runtime.device import Gpu
from ..errors import GpuFailed, KernelCompileFailed, TuningFailed
from ..files import markdown
from ..problem import PRECISIONS, ConvProblem
from .compiling import compile_all
from .cuda_timer import Bench, Timing, bench, strict_plan

# A kernel's other tiles are not tried if its own choice is slower than the best by this factor.
_WORTH_ALL_TILES = 2.0
# Every candidate is timed briefly; candidates this close to the best are timed again at length.
_FIRST_SAMPLES = 3
_FINAL_SAMPLES = 20
_CLOSE = 1.25
_MOST_FINALISTS = 8
# Number of a kernel's tiles to try in a quick search.
_QUICK_TILES = 6

_Layouts = TypeVar("_Layouts")


@dataclass(frozen=True)
class Candidate:
    """A choice and its timing."""

    choice: Choice
    timing: Timing

    def document(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        timing = {"ms": self.timing.median_ms, "error": self.timing.error}
        return {
            "kernel": self.choice.kernel.name,
            "tunables": dict(self.choice.tunables),
            "precision": self.choice.kernel.precision,
            **timing,
            "failure": self.timing.failure,
        }


@dataclass(frozen=True)
class Task:
    """A search: a direction of a float32 problem, among all kernels, or with only the kernel of the
    name or file `kernel`; `quick` limits it to possible default kernels and their few most
    promising tiles."""

    problem: ConvProblem
    direction: str = "forward"
    kernel: str | None = None
    quick: bool = False

    @property
    def only(self) -> Kernel | None:
        """The one kernel to measure, or `None` for all."""
        return None if self.kernel is None else work.forward_kernel(self.kernel)

    def __str__(self) -> str:
        way = "" if self.direction == "forward" else f" {self.direction}"
        return f"{self.problem}{way}"


def candidates(task: Task, gpu: Target, precision: str) -> list[Choice]:
    """Return every kernel of the direction that can compute the problem and is at least as exact as
    `precision`, with its own choice of a layout and then with each other one. Strict kernels are
    slower variants of general ones, so they are omitted unless `precision` is strict."""
    found: dict[Kernel, Sequence[Layout]] = {}
    for kernel in (task.only,) if task.only else catalog.KERNELS:
        wanted = kernel.direction == task.direction
        wanted = wanted and kernel.permitted(precision, task.problem)
        wanted = wanted and (kernel.precision != "strict" or precision == "strict")
        layouts = kernel.layouts(task.problem, gpu.capability) if wanted else ()
        if layouts and not (task.quick and kernel.rank is None):
            found[kernel] = layouts[:_QUICK_TILES] if task.quick else layouts
    if task.quick:
        found = _first_ranked(found)
    return [
        Choice(kernel, layout if i else None)
        for kernel, layouts in found.items()
        for i, layout in enumerate(layouts)
    ]


def _first_ranked(found: Mapping[Kernel, _Layouts]) -> dict[Kernel, _Layouts]:
    """Omit kernels ranked behind all kernels of this architecture: they serve other GPUs."""
    of_gpu = [each for each in found if all(name.endswith("a") for name in each.architectures)]
    last = max((each.rank or 0 for each in of_gpu), default=math.inf)
    return {each: layouts for each, layouts in found.items() if (each.rank or 0) <= last}


def compile_ahead(gpu: Gpu, tasks: Sequence[Task], precision: str) -> None:
    """Compile all candidates of some quick tasks, and the kernels that check them, in parallel.
    Candidates that do not compile fail again when they are timed."""
    plans = [
        _plan(choice, task, gpu) for task in tasks for choice in candidates(task, gpu, precision)
    ]
    of_w = (task.problem for task in tasks if task.direction == "backward_weight")
    plans += [strict_plan(gpu, problem, "backward_weight") for problem in of_w]
    with contextlib.suppress(KernelCompileFailed):
        compile_all(gpu, plans)


def tune(
    gpu: Gpu,
    task: Task,
    precisions: Sequence[str],
    on_each: Callable[[], object] = lambda: None,
) -> tuple[list[Candidate], list[Result]]:
    """Find the best of all candidates for a task, for each of `precisions`; for a task with one
    kernel its best layout, timed beside the default kernel.

    Every kernel is timed with its own choice of tiles, then kernels near the best of a precision
    with all other tiles, and finally the fastest candidates at length. Returns the timed
    candidates, the fastest first and incorrect ones last, and the results. `on_each` is called once
    for each candidate of the loosest precision, timed or skipped.

    Raises `TuningFailed` when no candidate is correct, `NotEnoughMemory`, and `NoUsableGpu` without
    nvcc.
    """
    task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, bias=False))
    loosest = max(precisions, key=PRECISIONS.index)
    first: list[Choice] = []
    others: list[Choice] = []
    for choice in candidates(task, gpu, loosest):
        (first if choice.layout is None else others).append(choice)
    with bench(gpu, task.problem, task.direction) as measure:
        found = _timed_all(measure, task, first, on_each)
        close = {
            each.choice.kernel.name
            for precision in precisions
            for each in _near(found, precision, task, _WORTH_ALL_TILES)
        }
        rest = [choice for choice in others if choice.kernel.name in close]
        for _ in range(len(others) - len(rest)):
            on_each()
        found += _timed_all(measure, task, rest, on_each)
        for precision in precisions:
            found = _at_length(measure, task, found, precision)
        results = [_result(task, precision, sorted(found, key=_order)) for precision in precisions]
        if task.only is not None:
            best = tuned.best(task.problem, gpu, loosest)
            found.append(_timed(measure, task, best, _FINAL_SAMPLES))
    return sorted(found, key=_order), results


def _timed_all(
    measure: Bench, task: Task, choices: Sequence[Choice], on_each: Callable[[], object]
) -> list[Candidate]:
    """Compile the choices in parallel, then time each briefly."""
    # A candidate that does not compile fails again when it is timed.
    with contextlib.suppress(KernelCompileFailed):
        compile_all(measure.gpu, (_plan(choice, task, measure.gpu) for choice in choices))
    found = []
    for choice in choices:
        found.append(_timed(measure, task, choice, _FIRST_SAMPLES))
        on_each()
    return found


def _plan(choice: Choice, task: Task, gpu: Target) -> Plan:
    return choice.kernel.plan(task.problem, gpu.capability, False, choice.layout)


def _timed(measure: Bench, task: Task, choice: Choice, samples: int) -> Candidate:
    plan = _plan(choice, task, measure.gpu)
    try:
        timing = measure.time(choice.kernel, samples, plan)
    except (KernelCompileFailed, GpuFailed) as error:
        timing = Timing([math.inf], math.nan, str(error))
    return Candidate(choice, timing)


def _at_length(
    measure: Bench, task: Task, found: list[Candidate], precision: str
) -> list[Candidate]:
    """Return the candidates, after timing at length those that may be the best at this
    precision."""
    again = {
        id(each): _timed(measure, task, each.choice, _FINAL_SAMPLES)
        for each in _near(found, precision, task, _CLOSE)[:_MOST_FINALISTS]
        if len(each.timing.samples_ms) < _FINAL_SAMPLES
    }
    return [again.get(id(each), each) for each in found]


def _near(found: Sequence[Candidate], precision: str, task: Task, factor: float) -> list[Candidate]:
    """Return correct candidates slower than the best by at most `factor`, in order."""
    right = sorted(_right(found, precision, task), key=_order)
    return [each for each in right if each.timing.median_ms <= factor * right[0].timing.median_ms]


def _right(found: Sequence[Candidate], precision: str, task: Task) -> list[Candidate]:
    return [
        each
        for each in found
        if each.timing.failure is None and each.choice.kernel.permitted(precision, task.problem)
    ]


def _order(each: Candidate) -> tuple[bool, float]:
    return each.timing.failure is not None, each.timing.median_ms


def _result(task: Task, precision: str, found: Sequence[Candidate]) -> Result:
    """Return the best of the candidates timed at length; `found` is ordered by time."""
    right = _right(found, precision, task)
    if not right:
        raise TuningFailed(
            f"none of {len(found)} candidates computes {task} right; the first is "
            f"{found[0].choice}: {found[0].timing.failure}; for details use ece408 lab check for a "
            "file, scripts/check_cuda.py for this package's kernels"
        )
    final = [each for each in right if len(each.timing.samples_ms) >= _FINAL_SAMPLES]
    best = min(final or right, key=_order)
    return Result(
        task.problem,
        precision,
        tuned.identity(best.choice.kernel),
        best.choice.tunables,
        best.timing.median_ms,
        sum(each.choice.kernel.permitted(precision, task.problem) for each in found),
        task.direction,
    )


def table(task: Task, found: Sequence[Candidate]) -> str:
    """Return the candidates for one task and their times, as text in columns."""
    rows = [("kernel", "precision", "ms", "error", "")]
    for each in found:
        timing = each.timing
        rows.append(
            (
                str(each.choice),
                each.choice.kernel.precision,
                f"{timing.median_ms:.4f}",
                f"{timing.error:.1e}",
                f"not used: {timing.failure}" if timing.failure else "",
            )
        )
    lines = markdown.aligned(rows, range(len(rows[0])))
    return "\n".join([f"{task}:", *(f"  {line}" for line in lines)])
