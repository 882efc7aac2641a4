"""The table of the CUDA kernels' errors, as far as the emulator runs them."""

from __future__ import annotations

import numpy as np
import pytest
from studies import cuda_errors, float32_sums

from ece408_op import settings
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.kernels.tuned import Choice
from ece408_op.backends.emulator.backend import EmulatedBackend
from ece408_op.bench import oracle
from ece408_op.problem import ConvProblem

PROBLEMS = ("b2,c1,h18,w18,m4,k5x5", "b2,c6,h9,w10,m5,k3x3,p1x1")


@pytest.fixture(autouse=True)
def _kept(tmp_path):
    with settings.override(cache=tmp_path):
        yield


def _emulated(choice, problem, arrays):
    """A kernel's output."""
    kernel = choice.kernel
    forward = kernel.direction == "forward"
    backend = EmulatedBackend(kernel.name if forward else "general", precision=kernel.precision)
    shape = problem.y_shape if forward else problem.x_shape
    found = np.empty(shape, np.float32)
    first, second = (array.ctypes.data for array in arrays.values())
    if forward:
        backend.forward(problem, first, second, None, found.ctypes.data, False)
    else:
        done = backend.backward_data(problem, first, second, found.ctypes.data, False)
        assert done.kernel == kernel.name
    return found


def _largest(records, kernel, kind, column):
    return max(e[column] for e in records if (e["kernel"], e["kind"]) == (kernel, kind))


@pytest.mark.slow
def test_errors_are_those_that_kernels_are_known_for():
    names = ["general", "general_strict", "15_winograd", "general_strict_backward_data"]
    kernels = [catalog.get(name) for name in names]
    records = cuda_errors.measure(_emulated, kernels, (8, 0), PROBLEMS)
    # 15 takes one channel only.
    assert len(records) == len(cuda_errors.KINDS) * (2 * len(names) - 1)
    assert all(record["same_bits"] for record in records)
    for kind in cuda_errors.KINDS:
        for name in ("general_strict", "general_strict_backward_data"):
            assert _largest(records, name, kind, "element") <= 5.4e-7
        for name in names:
            assert _largest(records, name, kind, "l2") < 1e-6
            assert 0 < _largest(records, name, kind, "plain_element") < 1e-5
    # Winograd's sums have neighbours of a window's pixels in them.
    assert _largest(records, "15_winograd", "geometric, 1e-6 to 1e6", "element") > 1e-3
    text = cuda_errors.table(records)
    assert text.count("| general_strict | 2 |") == len(cuda_errors.KINDS)
    # The largest quotient, not that of the largest errors.
    few = [{**records[0], "l2": 3e-7, "plain_l2": 1e-7}, {**records[0], "plain_l2": 9e-7}]
    assert " | 9.0e-07 | 3.00 | " in cuda_errors.table(
        [{**each, "kind": kind} for each in few for kind in cuda_errors.KINDS]
    )
    assert "## A pixel 1e9 larger than its neighbours" in text


def test_layers_are_measured_by_the_kernels_chosen_for_them():
    def run(choice, problem, arrays):
        if choice.kernel.direction != "backward_weight":
            return _emulated(choice, problem, arrays)
        return oracle.backward_weight(problem, *arrays.values()).astype(np.float32)

    def choose(problem, direction):
        return Choice(catalog.default(problem, direction, (7, 5), "strict"))

    problems = [ConvProblem.parse(text) for text in PROBLEMS]
    records = cuda_errors.measure_chosen(run, choose, problems)
    cases = {(each["problem"], each["direction"], each["kind"]) for each in records}
    assert len(cases) == len(records) == 3 * len(PROBLEMS) * len(cuda_errors.KINDS)
    assert all(each["same_bits"] and each["element"] < 5.4e-7 for each in records)
    assert {each["kernel"] for each in records if each["direction"] == "forward"} == {
        "general_strict"
    }
    text = cuda_errors.table_of_chosen(records)
    assert text.count(f"| `{PROBLEMS[0]}` | backward_weight |") == len(cuda_errors.KINDS)
    worse = [{**each, "l2": 2 * each["plain_l2"]} for each in records]
    assert "L2 above a plain sum's in 6 of 6, at most 2.00 times it." in (
        cuda_errors.table_of_chosen(worse)
    )


def test_what_differs_from_run_to_run_is_said():
    def run(choice, problem, arrays):
        return np.random.default_rng().random(problem.y_shape, np.float32)

    records = cuda_errors.measure(run, [catalog.get("1_naive")], (8, 0), PROBLEMS[:1])
    assert not any(record["same_bits"] for record in records)
    assert "| no |" in cuda_errors.table(records)


@pytest.mark.parametrize(
    "text", ["b2,c6,h8,w9,m4,k3x2,s2x1,p1x1,d1x2,g2", "b1,c3,h7,w6,m5,k1", "b2,c4,h6,w6,m4,k3,g4"]
)
def test_plain_sums_are_convolutions(text, rng):
    problem = ConvProblem.parse(text)
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    x, w, dy = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    exact = oracle.every_direction(problem, x, w, None, dy)
    inputs = {
        **{"forward": (x, w), "backward_data": (w, dy), "backward_weight": (x, dy)},
        **{"backward_bias": (dy,)},
    }
    for direction, arrays in inputs.items():
        found = getattr(float32_sums, direction)(problem, *arrays)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, exact[direction], err_msg=direction)
