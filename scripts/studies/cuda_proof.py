"""Checks of every CUDA kernel, and a table of the findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ece408_op.backends.cuda.kernel_plan import Kernel
from ece408_op.backends.cuda.runtime.device import Gpu
from ece408_op.bench.checker import (
    Case,
    course_cases,
    exact_failure,
    largest_error,
    random_cases,
    relative_error,
)
from ece408_op.bench.compiling import compile_all
from ece408_op.files import markdown

# Random problems with real numbers, for kernels that reject all of the course's.
_REAL = 9


@dataclass
class Proof:
    """Findings of the checks of one kernel: numbers of exact results, errors by shape, failures."""

    kernel: str
    course: int = 0
    random: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def prove(
    gpu: Gpu, kernel: Kernel, random: int = 200, course: bool = True, bare: bool = False
) -> Proof:
    """Check one kernel exactly on the course's shapes and on random problems, and, unless `bare`,
    its error on real numbers.

    Raises the errors of compiling, loading and launching.
    """
    proof = Proof(kernel.name)
    on_course = course_cases(kernel) if course else []
    drawn = random_cases(kernel, random)
    cases = [*on_course, *drawn]
    compile_all(gpu, (c.kernel.plan(c.problem, gpu.capability, c.accumulate) for c in cases))
    for case in on_course:
        proof.course += _exact(gpu, case, bare, proof)
    for case in drawn:
        proof.random += _exact(gpu, case, bare, proof)
    # Depthwise kernels reject all of the course's.
    for case in [] if bare else on_course or drawn[:_REAL]:
        error = relative_error(gpu, case)
        proof.errors[str(case.problem)] = error
        # This comparison also rejects NaN.
        if not error <= largest_error(kernel, case.problem):
            proof.failures.append(f"{case.problem}: relative error {error:.2e}")
    return proof


def _exact(gpu: Gpu, case: Case, bare: bool, proof: Proof) -> bool:
    failure = exact_failure(gpu, case, bare)
    if failure is not None:
        adding = ", adding" if case.accumulate else ""
        proof.failures.append(f"{case.problem}{adding}, seed {case.seed}: {failure}")
    return failure is None


def table(proofs: list[Proof]) -> str:
    """Return the findings as a Markdown table, followed by every failure."""
    head = ["kernel", "course shapes exact", "random problems exact"]
    head += ["largest error on real numbers", "failures"]
    rows = [
        [
            *(proof.kernel, proof.course, proof.random),
            f"{max(proof.errors.values()):.1e}" if proof.errors else "",
            len(proof.failures),
        ]
        for proof in proofs
    ]
    lines = [markdown.table(head, rows)]
    for proof in proofs:
        lines += [f"\n{proof.kernel}: {failure}" for failure in proof.failures]
    return "\n".join(lines)


def document(proofs: list[Proof]) -> list[dict[str, Any]]:
    """Return the findings as dicts, for JSON."""
    return [vars(proof) for proof in proofs]
