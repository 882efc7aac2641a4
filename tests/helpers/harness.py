"""Runs of a backend on guarded NumPy arrays with poisoned outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from studies import guarded

from ece408_op import settings
from ece408_op.backends import Backend
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.bench import oracle
from ece408_op.problem import ConvProblem


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return small whole numbers: sums of a few thousand products of them are exact."""
    return rng.integers(-8, 9, shape).astype(dtype)


def inputs(
    problem: ConvProblem, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return whole-numbered x, w and, if the problem has one, bias."""
    x = integers(rng, problem.x_shape, problem.dtype)
    w = integers(rng, problem.w_shape, problem.dtype)
    return x, w, integers(rng, problem.bias_shape, problem.dtype) if problem.bias else None


def real_inputs(problem: ConvProblem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return normally distributed x and w in float32."""
    x, w = (rng.standard_normal(shape) for shape in (problem.x_shape, problem.w_shape))
    return x.astype("float32"), w.astype("float32")


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
    places = [
        None if array is None else guarded.place(array, side, read_only=True)
        for array in (x, w, bias)
    ]
    poison = np.full(problem.y_shape, np.nan, problem.dtype)
    y = guarded.place(poison if onto is None else onto, side)
    px, pw, pb = (None if a is None else a.ctypes.data for a in places)
    assert px is not None
    assert pw is not None
    backend.forward(problem, px, pw, pb, y.ctypes.data, onto is not None)
    assert guarded.canary_intact(y, side)
    return y


def backward_data(
    backend: Backend,
    problem: ConvProblem,
    w: np.ndarray,
    dy: np.ndarray,
    onto: np.ndarray | None = None,
    side: str = "end",
) -> np.ndarray:
    """Compute dx onto NaN or, if accumulating, onto a copy of `onto`."""
    pw, pdy = (guarded.place(array, side, read_only=True) for array in (w, dy))
    poison = np.full(problem.x_shape, np.nan, problem.dtype)
    dx = guarded.place(poison if onto is None else onto, side)
    backend.backward_data(
        problem, pw.ctypes.data, pdy.ctypes.data, dx.ctypes.data, onto is not None
    )
    assert guarded.canary_intact(dx, side)
    return dx


def check_exact(
    backend: Backend,
    problem: ConvProblem,
    rng: np.random.Generator,
    accumulate: bool = False,
    side: str = "end",
    gradient: bool = True,
) -> None:
    """Check the forward pass and, by default, the gradient for x, on whole numbers."""
    x, w, bias = inputs(problem, rng)
    dy = integers(rng, problem.y_shape, "float32")
    onto_y, onto_x = (
        integers(rng, shape, "float32") if accumulate else None
        for shape in (problem.y_shape, problem.x_shape)
    )
    expected = oracle.forward(problem, x, w, bias) + (0 if onto_y is None else onto_y)
    found = forward(backend, problem, x, w, bias, onto_y, side)
    np.testing.assert_array_equal(found, expected, err_msg=f"forward {problem}")
    if gradient:
        expected = oracle.backward_data(problem, w, dy) + (0 if onto_x is None else onto_x)
        found = backward_data(backend, problem, w, dy, onto_x, side)
        np.testing.assert_array_equal(found, expected, err_msg=f"backward {problem}")


def check_large_batch(backend: Backend, problem: ConvProblem, rng: np.random.Generator) -> None:
    """Check the forward pass of a batch that repeats a few images, on every instruction set."""
    few = replace(problem, batch=7)
    x, w, bias = inputs(few, rng)
    expected = np.resize(forward(ReferenceBackend(), few, x, w, bias), problem.y_shape)
    x = np.resize(x, problem.x_shape)
    for isa in native.isas():
        with settings.override(isa=isa):
            found = forward(backend, problem, x, w, bias, side="start")
        assert np.array_equal(found, expected), f"{isa} {problem}"


def check_threads(
    backend: Backend, problem: ConvProblem, rng: np.random.Generator, onto: np.ndarray | None = None
) -> None:
    """Check that the forward pass is bitwise equal with any number of threads."""
    x, w = real_inputs(problem, rng)
    results = []
    for threads in (1, 2, 3, 7, 16):
        with settings.override(threads=threads):
            results.append(forward(backend, problem, x, w, onto=onto))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def error(backend: Backend, problem: ConvProblem, rng: np.random.Generator) -> float:
    """Return the forward pass's relative L2 error against float64."""
    x, w = real_inputs(problem, rng)
    expected = oracle.forward(problem, x, w, None)
    found = forward(backend, problem, x, w)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
