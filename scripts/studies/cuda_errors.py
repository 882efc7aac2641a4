"""How exact the CUDA kernels are on numbers of several kinds, beside plain float32 sums, and
whether they give the same bits again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cuda.kernel_plan import Capability, Kernel
from ece408_op.backends.cuda.kernels.tuned import Choice
from ece408_op.bench import oracle
from ece408_op.bench.checker import inputs_of
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

from . import float32_sums

# One channel, several, many, small planes, single taps, groups of one channel, a first layer.
PROBLEMS = (
    *("b3,c1,h70,w70,m12,k5x5", "b3,c12,h33,w33,m24,k5x5", "b2,c64,h28,w28,m64,k3x3,p1x1"),
    *("b4,c256,h7,w7,m256,k3x3,p1x1", "b2,c128,h14,w14,m64,k1x1"),
    *("b2,c32,h28,w28,m32,k3x3,p1x1,g32", "b2,c3,h64,w64,m32,k7x7,s2x2,p3x3"),
    "b4,c16,h28,w28,m16,k3x3,p1x1,g4",
)
_DECADES = 6  # of geometric numbers' magnitudes, on either side of 1
_SPREAD = 3  # of log-normal ones' logarithms
_LARGE = 1e9  # what a pixel of each image is multiplied with

Arrays = dict[str, np.ndarray]
# A kernel's output for a problem, from inputs by role.
Run = Callable[[Choice, ConvProblem, Arrays], np.ndarray]
# Inputs, the result in float64, the sums of its terms' magnitudes, and plain float32 sums.
Expected = tuple[Arrays, np.ndarray, np.ndarray, np.ndarray]


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def _normal(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _log_normal(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    return _signs(rng, shape) * np.exp(_SPREAD * rng.standard_normal(shape))


def _geometric(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    return _signs(rng, shape) * 10 ** rng.uniform(-_DECADES, _DECADES, shape)


def _large_pixel(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    array = rng.standard_normal(shape)
    if role != "w":
        planes = array.reshape(shape[0], -1)
        planes[:, planes.shape[1] // 2] *= _LARGE
    return array


KINDS = {
    "normal": _normal,
    "log-normal": _log_normal,
    "geometric, 1e-6 to 1e6": _geometric,
    "a pixel 1e9 larger than its neighbours": _large_pixel,
}


def measure(
    run: Run,
    kernels: Iterable[Kernel],
    capability: Capability,
    problems: Sequence[str] = PROBLEMS,
) -> list[dict[str, Any]]:
    """A record for each kernel, problem that it can compute and kind of numbers: relative L2 errors
    against float64, and the largest error of an element beside the sum of its terms' magnitudes,
    of the kernel and of plain float32 sums; and whether two runs gave the same bits."""
    found = []
    for kernel in kernels:
        for text in problems:
            problem = ConvProblem.parse(text)
            if kernel.why_not(problem, capability) is None:
                for kind in KINDS:
                    expected = _remembered(kernel.direction, problem, kind)
                    found.append(_record(run, Choice(kernel), problem, kind, expected))
    return found


def measure_chosen(
    run: Run, choose: Callable[[ConvProblem, str], Choice], problems: Iterable[ConvProblem]
) -> list[dict[str, Any]]:
    """The same of the kernel and layout that are chosen for each problem and direction."""
    cases = list(itertools.product(DIRECTIONS, KINDS))
    directions, kinds = zip(*cases)
    found = []
    with ThreadPoolExecutor(settings.threads()) as pool:
        for problem in problems:
            made = pool.map(_expected, directions, itertools.repeat(problem), kinds)
            for (direction, kind), expected in zip(cases, made):
                record = _record(run, choose(problem, direction), problem, kind, expected)
                found.append({**record, "direction": direction})
    return found


def _record(
    run: Run, choice: Choice, problem: ConvProblem, kind: str, expected: Expected
) -> dict[str, Any]:
    arrays, exact, terms, plain = expected
    result, again = (run(choice, problem, arrays) for _ in range(2))
    errors = {**_errors("", result, exact, terms), **_errors("plain_", plain, exact, terms)}
    same = result.tobytes() == again.tobytes()
    about = {"kernel": choice.kernel.name, "problem": str(problem), "kind": kind}
    return {**about, **errors, "same_bits": same}


def _expected(direction: str, problem: ConvProblem, kind: str) -> Expected:
    rng = np.random.default_rng(408)
    arrays = {
        role: KINDS[kind](rng, role, shape).astype(np.float32)
        for role, shape in inputs_of(direction, problem).items()
    }
    compute = getattr(oracle, direction)
    exact = compute(problem, *arrays.values())
    terms = compute(problem, *map(np.abs, arrays.values()))
    plain = getattr(float32_sums, direction)(problem, *arrays.values())
    return arrays, exact, terms, plain


# Kernels of a direction follow each other.
_remembered = functools.lru_cache(maxsize=len(KINDS) * len(PROBLEMS))(_expected)


def _errors(
    prefix: str, result: np.ndarray, exact: np.ndarray, terms: np.ndarray
) -> dict[str, float]:
    wrong = np.abs(result.astype(np.float64) - exact)
    # Where there are no terms zero is exact.
    of_terms = wrong / np.where(terms > 0, terms, 1)
    return {
        f"{prefix}l2": float(np.linalg.norm(wrong) / np.linalg.norm(exact)),
        f"{prefix}element": float(np.max(of_terms)),
    }


def _beside_plain(record: dict[str, Any]) -> float:
    """The L2 error beside a plain sum's, 1 where both are none."""
    if record["plain_l2"] > 0:
        return record["l2"] / record["plain_l2"]
    return 1.0 if record["l2"] == 0 else math.inf


def table(records: Sequence[dict[str, Any]]) -> str:
    """The largest errors of each kernel over its problems, and its L2 error beside a plain sum's of
    the problem where it is the largest, a table for each kind of numbers."""
    head = ["kernel", "problems", "L2", "plain", "L2 / plain", "element", "plain", "same bits"]
    parts = []
    for kind in KINDS:
        rows = []
        for kernel in dict.fromkeys(each["kernel"] for each in records):
            own = [r for r in records if (r["kernel"], r["kind"]) == (kernel, kind)]
            columns = ("l2", "plain_l2", "element", "plain_element")
            errors = [f"{max(each[column] for each in own):.1e}" for column in columns]
            errors.insert(2, f"{max(map(_beside_plain, own)):.2f}")
            same = "yes" if all(each["same_bits"] for each in own) else "no"
            rows.append([kernel, len(own), *errors, same])
        parts += [f"## {kind[0].upper()}{kind[1:]}", markdown.table(head, rows)]
    return "\n\n".join(parts)


def table_of_chosen(records: Sequence[dict[str, Any]]) -> str:
    """Of each layer and direction, a table for each kind of numbers, and how the kernels' L2 errors
    are beside plain sums'."""
    head = ["layer", "direction", "kernel", "L2", "plain", "element", "plain"]
    parts = []
    for kind in KINDS:
        own = [each for each in records if each["kind"] == kind]
        rows = [
            [
                *(f"`{each['problem']}`", each["direction"], each["kernel"]),
                *(f"{each['l2']:.1e}", f"{each['plain_l2']:.1e}"),
                *(f"{each['element']:.1e}", f"{each['plain_element']:.1e}"),
            ]
            for each in own
        ]
        above = sum(_beside_plain(each) > 1 for each in own)
        most = max(map(_beside_plain, own))
        parts += [
            f"## {kind[0].upper()}{kind[1:]}",
            markdown.table(head, rows),
            f"L2 above a plain sum's in {above} of {len(own)}, at most {most:.2f} times it.",
        ]
    return "\n\n".join(parts)
