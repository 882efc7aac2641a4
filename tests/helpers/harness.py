"""Runs of a backend on guarded NumPy arrays with poisoned outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from studies import guarded

from ece408_op import settings
from ece408_op.backends import Backend
from ece408_op.bench import oracle
from ece408_op.problem import ConvProblem

DIRECTIONS = ("forward", "backward_data", "backward_weight", "backward_bias")
# Whether a call accumulates, and the side of its arrays on which memory is forbidden.
WAYS = ((False, "start"), (True, "end"))


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return small whole numbers: sums of a few thousand products of them are exact."""
    return rng.integers(-8, 9, shape).astype(dtype)


def attributes(problem: ConvProblem) -> dict[str, Any]:
    """Return a problem as the attributes of Convolution."""
    window = {name: getattr(problem, name) for name in ("kernel", "stride", "pad", "dilate")}
    others = {"num_group": problem.groups, "no_bias": not problem.bias}
    return {**window, "num_filter": problem.filters, **others}


def inputs(
    problem: ConvProblem, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return whole-numbered x, w and, if the problem has one, bias."""
    x = integers(rng, problem.x_shape, problem.dtype)
    w = integers(rng, problem.w_shape, problem.dtype)
    return x, w, integers(rng, problem.bias_shape, problem.dtype) if problem.bias else None


def placed(side: str, *arrays: np.ndarray | None) -> list[np.ndarray | None]:
    """Return copies that are beside forbidden memory and may not be written."""
    return [None if a is None else guarded.place(a, side, read_only=True) for a in arrays]


def run(
    backend: Backend,
    problem: ConvProblem,
    direction: str,
    arrays: Sequence[np.ndarray | None],
    onto: np.ndarray | None = None,
    side: str = "end",
) -> np.ndarray:
    """Run one direction on x, w, bias and dy; the output holds NaN first or, if accumulating,
    `onto`."""
    x, w, bias, dy = (None if a is None else a.ctypes.data for a in arrays)
    shapes = (problem.y_shape, problem.x_shape, problem.w_shape, problem.bias_shape)
    poison = np.full(dict(zip(DIRECTIONS, shapes))[direction], np.nan, problem.dtype)
    out, add = guarded.place(poison if onto is None else onto, side), onto is not None
    to = out.ctypes.data
    if direction == "forward":
        backend.forward(problem, x, w, bias, to, add)  # type: ignore[arg-type]
    elif direction == "backward_data":
        backend.backward_data(problem, w, dy, to, add)  # type: ignore[arg-type]
    else:
        outputs = (to, None) if direction == "backward_weight" else (None, to)
        backend.backward_weight(problem, x, dy, *outputs, add, add)  # type: ignore[arg-type]
    assert guarded.canary_intact(out, side)
    return out


def forward(
    backend: Backend,
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    onto: np.ndarray | None = None,
    side: str = "end",
) -> np.ndarray:
    """Compute y onto NaN or, if accumulating, onto a copy of `onto`."""
    arrays = [*placed(side, x, w, bias), None]
    return run(backend, problem, "forward", arrays, onto, side)


def check_exact(
    backend: Backend,
    problem: ConvProblem,
    rng: np.random.Generator,
    isas: Iterable[str],
    ways: Iterable[tuple[bool, str]] = WAYS,
    directions: Iterable[str] = DIRECTIONS,
) -> None:
    """Check directions on instruction sets for whole numbers."""
    x, w, bias = inputs(problem, rng)
    dy = integers(rng, problem.y_shape, problem.dtype)
    given = dict(zip(DIRECTIONS, ((x, w, bias), (w, dy), (x, dy), (dy,))))
    expected = {each: getattr(oracle, each)(problem, *given[each]) for each in directions}
    for accumulate, side in ways:
        arrays = placed(side, x, w, bias, dy)
        for isa, (direction, exact) in itertools.product(isas, expected.items()):
            onto = integers(rng, exact.shape, problem.dtype) if accumulate else None
            total = exact if onto is None else exact + onto.astype(np.float64)
            with settings.override(isa=isa):
                found = run(backend, problem, direction, arrays, onto, side)
            case = f"{isa} {direction} {problem}, accumulate={accumulate}, side={side}"
            np.testing.assert_array_equal(found, total.astype(problem.dtype), err_msg=case)
