"""Measures which kernel, with which tiles, is the best for a problem; `backends.cuda.tuned` keeps
what comes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ..backends.cuda import catalog
from ..backends.cuda.device import Gpu
from ..backends.cuda.plan import Plan, Target
from ..backends.cuda.tuned import Choice, Result
from ..errors import GpuFailed, KernelCompileFailed, TuningFailed
from ..precision import PRECISIONS
from ..problem import ConvProblem
from .compiling import compile_all
from .cuda_bench import Bench, Timing, bench

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


def candidates(problem: ConvProblem, gpu: Target, precision: str) -> list[Choice]:
    """Every kernel for the forward pass that can compute the problem and is at least as exact as
    `precision`, with each of its tunables that makes a difference."""
    by_plan: dict[Plan, Choice] = {}
    for kernel in catalog.KERNELS:
        fits = kernel.direction == "forward" and kernel.permitted(precision)
        if fits and kernel.rejects(problem, gpu.capability) is None:
            for tunables in kernel.tunables(problem, gpu.capability):
                choice = Choice(kernel, tunables)
                by_plan.setdefault(_plan(choice, problem, gpu), choice)
    return list(by_plan.values())


def tune(
    gpu: Gpu,
    problem: ConvProblem,
    precisions: Sequence[str],
    on_each: Callable[[], object] = lambda: None,
) -> tuple[list[Candidate], list[Result]]:
    """Time all candidates for a float32 problem, and find the best for each of `precisions`.

    Returns the candidates, the fastest first and those that compute something else last, and the
    results. `on_each` is called when a candidate has been compiled, and when it has been timed.
    Raises `TuningFailed` when no candidate computes what it should, `NotEnoughMemory`, and
    `NoUsableGpu` without nvcc.
    """
    problem = dataclasses.replace(problem, bias=False)
    loosest = max(precisions, key=PRECISIONS.index)
    choices = candidates(problem, gpu, loosest)
    plans = [_plan(choice, problem, gpu) for choice in choices]
    # One that does not compile fails again, by itself, when it is to be timed.
    with contextlib.suppress(KernelCompileFailed):
        compile_all(gpu, plans, on_each)
    with bench(gpu, problem) as measure:
        found = []
        for choice in choices:
            found.append(_timed(measure, choice, _FIRST_SAMPLES))
            on_each()
        for precision in precisions:
            found = _at_length(measure, found, precision)
    found.sort(key=_order)
    return found, [_result(problem, precision, found) for precision in precisions]


def _plan(choice: Choice, problem: ConvProblem, gpu: Target) -> Plan:
    return choice.kernel.plan(problem, gpu.capability, False, choice.tunables)


def _timed(measure: Bench, choice: Choice, samples: int) -> Candidate:
    plan = _plan(choice, measure.problem, measure.gpu)
    try:
        timing = measure.time(choice.kernel, samples, plan)
    except (KernelCompileFailed, GpuFailed) as error:
        timing = Timing([math.inf], math.nan, str(error))
    return Candidate(choice, timing)


def _at_length(measure: Bench, found: list[Candidate], precision: str) -> list[Candidate]:
    """The candidates with those that may be the best at this precision timed at length."""
    right = sorted(_right(found, precision), key=_order)
    limit = _CLOSE * right[0].timing.median_ms if right else 0.0
    close = [each for each in right[:_MOST_FINALISTS] if each.timing.median_ms <= limit]
    again = {
        id(each): _timed(measure, each.choice, _FINAL_SAMPLES)
        for each in close
        if len(each.timing.samples_ms) < _FINAL_SAMPLES
    }
    return [again.get(id(each), each) for each in found]


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
            f"{found[0].choice}: {found[0].timing.failure}; run scripts/check_cuda.py"
        )
    final = [each for each in right if len(each.timing.samples_ms) >= _FINAL_SAMPLES]
    best = min(final or right, key=_order)
    return Result(
        problem,
        precision,
        best.choice.kernel.name,
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
