"""Measures which kernel, with which tiles, is the best for a problem; `backends.cuda.tuned` keeps
what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ..backends.cuda.kernels import catalog, tuned
from ..backends.cuda.kernels.tuned import Choice, Result
from ..backends.cuda.plan import Kernel, Plan, Target
from ..backends.cuda.runtime.device import Gpu
from ..errors import GpuFailed, KernelCompileFailed, TuningFailed
from ..problem import PRECISIONS, ConvProblem
from .compiling import compile_all
from .cuda_timer import Bench, Timing, bench

# A kernel that is slower than the best by this factor with its own tiles is not tried with others.
_WORTH_ALL_TILES = 2.0
# Every candidate is timed a little, and then those that are this close to the best at length.
_FIRST_SAMPLES = 3
_FINAL_SAMPLES = 20
_CLOSE = 1.25
_MOST_FINALISTS = 8


@dataclass(frozen=True)
class Candidate:
    """A choice and its timing."""

    choice: Choice
    timing: Timing

    def document(self) -> dict[str, Any]:
        """For JSON."""
        timing = {"ms": self.timing.median_ms, "error": self.timing.error}
        return {
            "kernel": self.choice.kernel.name,
            "tunables": dict(self.choice.tunables),
            "precision": self.choice.kernel.precision,
            **timing,
            "failure": self.timing.failure,
        }


def candidates(
    problem: ConvProblem, gpu: Target, precision: str, only: Kernel | None = None
) -> list[Choice]:
    """Every kernel for the forward pass that can compute the problem and is at least as exact as
    `precision`, or only this one, with its own choice of a layout and then with each of the
    others."""
    found: list[Choice] = []
    for kernel in (only,) if only else catalog.KERNELS:
        if kernel.direction == "forward" and kernel.permitted(precision):
            layouts = kernel.layouts(problem, gpu.capability)
            found += [Choice(kernel, layout if i else None) for i, layout in enumerate(layouts)]
    return found


def tune(
    gpu: Gpu,
    problem: ConvProblem,
    precisions: Sequence[str],
    on_each: Callable[[], object] = lambda: None,
    only: Kernel | None = None,
) -> tuple[list[Candidate], list[Result]]:
    """Find the best of all candidates for a float32 problem, for each of `precisions`; or, with
    `only`, the best layout of this kernel, which is then timed beside what runs without it.

    Every kernel is timed with the tiles that it would choose itself, then those near the best of
    a precision with all others, and what is near the best then at length. Returns what was timed,
    the fastest first and what computes something else last, and the results. `on_each` is called
    once for each candidate of the loosest precision, timed or passed over.

    Raises `TuningFailed` when no candidate computes what it should, `NotEnoughMemory`, and
    `NoUsableGpu` without nvcc.
    """
    problem = dataclasses.replace(problem, bias=False)
    loosest = max(precisions, key=PRECISIONS.index)
    first: list[Choice] = []
    others: list[Choice] = []
    for choice in candidates(problem, gpu, loosest, only):
        (first if choice.layout is None else others).append(choice)
    with bench(gpu, problem) as measure:
        found = _timed_all(measure, first, on_each)
        close = {
            each.choice.kernel.name
            for precision in precisions
            for each in _near(found, precision, _WORTH_ALL_TILES)
        }
        rest = [choice for choice in others if choice.kernel.name in close]
        for _ in range(len(others) - len(rest)):
            on_each()
        found += _timed_all(measure, rest, on_each)
        for precision in precisions:
            found = _at_length(measure, found, precision)
        results = [
            _result(problem, precision, sorted(found, key=_order)) for precision in precisions
        ]
        if only is not None:
            found.append(_timed(measure, tuned.best(problem, gpu, loosest), _FINAL_SAMPLES))
    return sorted(found, key=_order), results


def _timed_all(
    measure: Bench, choices: Sequence[Choice], on_each: Callable[[], object]
) -> list[Candidate]:
    """The choices compiled side by side, and timed a little one by one."""
    # One that does not compile fails again, by itself, when it is to be timed.
    with contextlib.suppress(KernelCompileFailed):
        compile_all(
            measure.gpu, (_plan(choice, measure.problem, measure.gpu) for choice in choices)
        )
    found = []
    for choice in choices:
        found.append(_timed(measure, choice, _FIRST_SAMPLES))
        on_each()
    return found


def _plan(choice: Choice, problem: ConvProblem, gpu: Target) -> Plan:
    return choice.kernel.plan(problem, gpu.capability, False, choice.layout)


def _timed(measure: Bench, choice: Choice, samples: int) -> Candidate:
    plan = _plan(choice, measure.problem, measure.gpu)
    try:
        timing = measure.time(choice.kernel, samples, plan)
    except (KernelCompileFailed, GpuFailed) as error:
        timing = Timing([math.inf], math.nan, str(error))
    return Candidate(choice, timing)


def _at_length(measure: Bench, found: list[Candidate], precision: str) -> list[Candidate]:
    """The candidates with those that may be the best at this precision timed at length."""
    again = {
        id(each): _timed(measure, each.choice, _FINAL_SAMPLES)
        for each in _near(found, precision, _CLOSE)[:_MOST_FINALISTS]
        if len(each.timing.samples_ms) < _FINAL_SAMPLES
    }
    return [again.get(id(each), each) for each in found]


def _near(found: Sequence[Candidate], precision: str, factor: float) -> list[Candidate]:
    """Those that are right and slower than the best by at most `factor`, in order."""
    right = sorted(_right(found, precision), key=_order)
    return [each for each in right if each.timing.median_ms <= factor * right[0].timing.median_ms]


def _right(found: Sequence[Candidate], precision: str) -> list[Candidate]:
    return [
        each
        for each in found
        if each.timing.failure is None and each.choice.kernel.permitted(precision)
    ]


def _order(each: Candidate) -> tuple[bool, float]:
    return each.timing.failure is not None, each.timing.median_ms


def _result(problem: ConvProblem, precision: str, found: Sequence[Candidate]) -> Result:
    """The best of those timed at length; the order of `found` is by time."""
    right = _right(found, precision)
    if not right:
        raise TuningFailed(
            f"none of {len(found)} candidates computes {problem} right; the first is "
            f"{found[0].choice}: {found[0].timing.failure}; ece408 lab check says more of a file, "
            "scripts/check_cuda.py of this package's kernels"
        )
    final = [each for each in right if len(each.timing.samples_ms) >= _FINAL_SAMPLES]
    best = min(final or right, key=_order)
    return Result(
        problem,
        precision,
        tuned.identity(best.choice.kernel),
        best.choice.tunables,
        best.timing.median_ms,
        sum(each.choice.kernel.permitted(precision) for each in found),
    )


def table(problem: ConvProblem, found: Sequence[Candidate]) -> str:
    """The candidates for one problem and their times, as text in columns."""
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([f"{problem}:", *(f"  {line}" for line in lines)])
