"""Correctness checks of CUDA kernels: exact on whole numbers, close to float64 on real ones.

Before a kernel runs, outputs hold NaN, or the values to add to, between guard zones. Results are
compared with the `oracle`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..backends.cuda.kernel_plan import Kernel, Layout
from ..backends.cuda.runtime.device import Gpu
from ..backends.cuda.work import shape_of
from ..errors import InvalidProblem
from ..problem import ITEM_BYTES, ConvProblem
from . import oracle
from .gpu_arrays import StrayWrite, run
from .shapes import SHAPES

Arrays = dict[str, np.ndarray]
# Output and inputs by direction, the bias last.
ARRAYS = {
    "forward": ("y", "x", "w", "bias"),
    "backward_data": ("dx", "w", "dy"),
    "backward_weight": ("dw", "x", "dy"),
    "backward_bias": ("dbias", "dy"),
}
# Largest relative L2 error against float64 on random numbers, by dtype or, for less accurate
# kernels, by precision.
_LARGEST_ERROR = {"float64": 1e-14, "float32": 1e-6, "tf32": 1e-3, "float16": 2e-3}
# Kernels that accept this problem accept all strides, padding and dilation.
_STRIDED = ConvProblem.parse("b1,c1,h9,w9,m1,k3x3,s2x2,p1x1,d2x2")
_GROUPED = ConvProblem.parse("b1,c2,h9,w9,m2,k3x3,g2")
# Relative error of a plain float32 sum, divided by the square root of its terms; measured for 25 to
# 588 terms.
_RUNNING_SUM_ERROR = 1.8e-8


@dataclass(frozen=True)
class Case:
    """One run of a kernel: the problem, whether it adds to its output, a random seed, and a layout
    unless the kernel chooses its own."""

    kernel: Kernel
    problem: ConvProblem
    accumulate: bool = False
    seed: int = 0
    layout: Layout | None = None


def course_cases(kernel: Kernel, batch: int = 3) -> list[Case]:
    """Return cases of the shapes of `bench.shapes` that the kernel accepts, with a small batch."""
    problems = [dataclasses.replace(problem, batch=batch) for problem in SHAPES.values()]
    if kernel.direction == "backward_bias":
        problems = [dataclasses.replace(problem, bias=True) for problem in problems]
    return [
        Case(kernel, p, seed=i) for i, p in enumerate(problems) if kernel.family.why_not(p) is None
    ]


def random_cases(kernel: Kernel, count: int, seed: int = 408) -> list[Case]:
    """Return cases of `count` different problems with odd sizes that the kernel accepts."""
    rng = np.random.default_rng(seed)
    cases: dict[ConvProblem, Case] = {}
    while len(cases) < count:
        problem = _random_problem(kernel, rng)
        if problem is not None and kernel.family.why_not(problem) is None:
            cases[problem] = Case(
                kernel, problem, bool(rng.integers(2)), int(rng.integers(1 << 30))
            )
    return list(cases.values())


def _random_problem(kernel: Kernel, rng: np.random.Generator) -> ConvProblem | None:
    """Return a random problem of the kernel's kind (general, small groups, or ladder), or `None` if
    the sizes are invalid."""
    everything = kernel.name.startswith("general")
    windows = everything or kernel.family.why_not(_STRIDED) is None
    grouped = everything or kernel.family.why_not(_GROUPED) is None

    def pair(low: int, high: int) -> tuple[int, int]:
        a, b = rng.integers(low, high + 1, 2)
        return int(a), int(b)

    groups = int(rng.choice([1, 1, 2, 3, 5])) if grouped else 1
    high = 12 if everything else 44
    channels = [1, 2, 3, 4, 6, 7, 9, 13, 17, 40][: 6 if everything else 9 + grouped]
    filters = [1, 2, 3, 5, 6, 8, 11, 17, 24, 37]
    if kernel.name.startswith("depthwise"):
        groups, channels, filters = int(rng.integers(1, 21)), [1], [1]
    if kernel.name.startswith("grouped"):
        groups, channels, filters = int(rng.integers(1, 9)), list(range(1, 9)), list(range(1, 9))
    try:
        problem = ConvProblem(
            batch=int(rng.integers(1, 5)),
            channels=groups * int(rng.choice(channels)),
            height=int(rng.integers(1, high)),
            width=int(rng.integers(1, 2 * high if everything else high)),
            filters=groups * int(rng.choice(filters)),
            kernel=pair(1, 5 if everything else 7),
            stride=pair(1, 3) if windows else (1, 1),
            pad=pair(0, 3) if windows else (0, 0),
            dilate=pair(1, 3) if windows else (1, 1),
            groups=groups,
            bias=kernel.direction == "backward_bias" or bool(rng.integers(2)),
        )
    except InvalidProblem:
        return None
    typed = [dataclasses.replace(problem, dtype=name) for name in ITEM_BYTES]
    typed = [each for each in typed if kernel.family.why_not(each) is None]
    return typed[rng.integers(len(typed))] if typed else None


def largest_integer(kernel: Kernel, problem: ConvProblem) -> int:
    """Return the largest magnitude of whole inputs for which every sum of the kernel is exact."""
    if kernel.precision == "float16":
        # A channel's products are summed in half precision, exact up to 2048.
        return min(8, math.isqrt(2048 // math.prod(problem.kernel)))
    return 8


def exact_failure(gpu: Gpu, case: Case, bare: bool = False) -> str | None:
    """Return the error in the kernel's result on whole numbers, or `None`.

    Raises the errors of compiling, loading and launching.
    """
    rng = np.random.default_rng(case.seed)
    most = largest_integer(case.kernel, case.problem)
    arrays = {
        name: rng.integers(-most, most + 1, shape).astype(case.problem.dtype)
        for name, shape in _shapes(case).items()
    }
    return _failure(gpu, case, arrays, bare)


def relative_error(gpu: Gpu, case: Case) -> float:
    """Return the relative L2 error against float64 on normally distributed numbers; may be NaN."""
    rng = np.random.default_rng(case.seed)
    arrays = {
        name: rng.standard_normal(shape).astype(case.problem.dtype)
        for name, shape in _shapes(case).items()
    }
    expected = _expected(case, arrays)
    found = _found(gpu, case, arrays, bare=False).astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def largest_error(kernel: Kernel, problem: ConvProblem) -> float:
    """Return the largest `relative_error` allowed for this kernel, at least twice a plain sum's."""
    most = _LARGEST_ERROR[problem.dtype if kernel.float32_accurate else kernel.precision]
    running = _RUNNING_SUM_ERROR * math.sqrt(math.prod(problem.w_shape[1:]))
    return max(most, 2 * running) if problem.dtype == "float32" else most


def _failure(gpu: Gpu, case: Case, arrays: Arrays, bare: bool) -> str | None:
    try:
        found = _found(gpu, case, arrays, bare)
    except StrayWrite as error:
        return str(error)
    expected = _expected(case, arrays).astype(case.problem.dtype)
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return None
    index = tuple(int(i) for i in np.unravel_index(wrong[0], found.shape))
    return (
        f"{wrong.size} of {found.size} elements are wrong, {np.isnan(found).sum()} of them not "
        f"written; the first, {index}, is {found[index]} instead of {expected[index]}"
    )


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the case's arrays, output first."""
    roles = ARRAYS[case.kernel.direction]
    wanted = [role for role in roles if role != "bias" or case.problem.bias]
    return {role: shape_of(case.problem, role) for role in wanted}


def _found(gpu: Gpu, case: Case, arrays: Arrays, bare: bool) -> np.ndarray:
    output = ARRAYS[case.kernel.direction][0]
    start = arrays[output] if case.accumulate else np.full_like(arrays[output], np.nan)
    plan = case.kernel.plan(case.problem, gpu.capability, case.accumulate, case.layout)
    # Kernels use narrower accesses if arrays are not aligned to two or four elements.
    offset = case.seed % 4 * arrays[output].itemsize
    return run(gpu, plan, {**arrays, output: start}, output, bare, offset)


def _expected(case: Case, arrays: Arrays) -> np.ndarray:
    """Return the expected output in float64."""
    output, *inputs = ARRAYS[case.kernel.direction]
    compute = getattr(oracle, case.kernel.direction)
    found: np.ndarray = compute(case.problem, *(arrays[n] for n in inputs if n in arrays))
    return found + arrays[output] if case.accumulate else found
