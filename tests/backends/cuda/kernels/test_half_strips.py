"""Kernels that repack images in half precision: their plans, and out-of-range numbers."""

import math

import numpy as np
import pytest
from cases import every

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import oracle
from ece408_op.bench.gpu_arrays import run
from ece408_op.bench.shapes import SHAPES
from ece408_op.problem import ConvProblem

HOPPER = (9, 0)
NAMES = ("17_half_wgmma", "18_split_half")


@pytest.fixture(scope="module")
def gpu(gpu):
    if gpu.capability != HOPPER:
        pytest.skip(f"compute capability {gpu.capability}, not {HOPPER}")
    return gpu


@pytest.mark.parametrize("name", NAMES)
@every(problem=[*SHAPES.values(), "b2,c64,h56,w56,m64,k3,p1x1"])
def test_every_choice_fits_a_processor(name, problem):
    kernel = catalog.get(name)
    problem = ConvProblem.parse(problem) if isinstance(problem, str) else problem
    choices = kernel.layouts(problem, HOPPER)
    assert len(choices) > 4
    for layout in choices:
        plan = kernel.plan(problem, HOPPER, False, layout)
        (launch,) = plan.launches
        assert launch.blocks_per_processor * (launch.shared_bytes + 1024) <= 228 << 10
        assert launch.blocks_per_processor * launch.block[0] <= 2048
        filters = 8 * math.prod(dict(plan.macros)[n] for n in ("FILTER_TILES", "FILTER_TURNS"))
        assert launch.grid[1] * filters >= problem.filters


def _convolved(gpu, kernel, problem, x, w):
    y = np.full(problem.y_shape, np.nan, np.float32)
    plan = kernel.plan(problem, gpu.capability, False)
    return run(gpu, plan, {"y": y, "x": x, "w": w}, "y")


PROBLEM = ConvProblem.parse("b3,c12,h14,w17,m11,k5x4,p1x2")


@pytest.mark.gpu
@pytest.mark.parametrize(("of_x", "of_w"), [(1e30, 1e-30), (1e-30, 1e20), (1e-3, 1e4), (1e36, 1)])
def test_half_precisions_few_exponents_do_not_show(gpu, of_x, of_w):
    rng = np.random.default_rng(17)
    x = (rng.standard_normal(PROBLEM.x_shape) * of_x).astype(np.float32)
    w = (rng.standard_normal(PROBLEM.w_shape) * of_w).astype(np.float32)
    # Adjacent images and filters of very different magnitude.
    x[1] *= 1e-5
    w[4] *= 1e-4
    expected = oracle.forward(PROBLEM, x, w)
    for name, most in zip(NAMES, (1e-3, 1e-6)):
        error = _convolved(gpu, catalog.get(name), PROBLEM, x, w) - expected
        for b in range(len(x)):
            for m in range(len(w)):
                relative = np.linalg.norm(error[b, m]) / np.linalg.norm(expected[b, m])
                assert relative < most, (name, b, m)


@pytest.mark.gpu
def test_two_halves_hold_whole_numbers_that_one_does_not(gpu):
    rng = np.random.default_rng(18)
    x = rng.integers(-9999, 10000, PROBLEM.x_shape).astype(np.float32)
    w = rng.integers(-3, 4, PROBLEM.w_shape).astype(np.float32)
    expected = oracle.forward(PROBLEM, x, w)
    assert abs(expected).max() < 1 << 24
    assert np.array_equal(_convolved(gpu, catalog.get("18_split_half"), PROBLEM, x, w), expected)
    assert not np.array_equal(
        _convolved(gpu, catalog.get("17_half_wgmma"), PROBLEM, x, w), expected
    )


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_reaches_its_windows_and_no_others(gpu, value):
    rng = np.random.default_rng(19)
    x = rng.standard_normal(PROBLEM.x_shape).astype(np.float32)
    w = rng.standard_normal(PROBLEM.w_shape).astype(np.float32)
    x[1, 9, 6, 7] = value
    expected = oracle.forward(PROBLEM, x, w)
    for name in NAMES:
        found = _convolved(gpu, catalog.get(name), PROBLEM, x, w)
        assert np.array_equal(np.isfinite(found), np.isfinite(expected)), name


@pytest.mark.gpu
def test_an_image_of_nothing_gives_nothing(gpu):
    x, w = np.zeros(PROBLEM.x_shape, np.float32), np.ones(PROBLEM.w_shape, np.float32)
    for name in NAMES:
        assert not _convolved(gpu, catalog.get(name), PROBLEM, x, w).any()
