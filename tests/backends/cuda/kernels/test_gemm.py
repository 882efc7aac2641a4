"""The host's grids for implicit_gemm_prepacked.cu, computed in NumPy, are convolutions."""

import contextlib
import itertools

import numpy as np
import pytest
from cases import first
from places import CUBINS

from ece408_op.backends.cuda.kernels import catalog, gemm_grid
from ece408_op.backends.cuda.runtime import compiler
from ece408_op.bench import oracle
from ece408_op.errors import KernelCompileFailed
from ece408_op.problem import ConvProblem

PROBLEMS = (
    *("b2,c3,h9,w11,m5,k3x3,p1x1", "b1,c4,h8,w8,m4,k1x1", "b2,c3,h13,w12,m4,k5x3,s2x3,p2x1"),
    *("b2,c8,h7,w7,m6,k3x3,p1x1,g2", "b1,c2,h17,w15,m3,k3x2,p3x2,d2x3", "b3,c3,h7,w7,m4,k1x1,s2x2"),
    *("b1,c3,h20,w19,m4,k11x11,s4x4,p2x2", "b2,c4,h6,w5,m4,k2x2,s3x3", "b1,c2,h5,w6,m3,k1x1,p2x1"),
    *("b2,c4,h11,w9,m4,k3x3,s2x2,p1x1,g4", "b1,c3,h9,w9,m2,k3x3,s2x2,d3x3,p4x4"),
    *("b2,c3,h8,w9,m4,k7x7,s2x2,p3x3", "b1,c2,h6,w30,m2,k1x7,p0x3", "b2,c2,h5,w5,m2,k5x5"),
)


def flat_grid(array, made, remainder):
    """Return positions of all images by channels, as lay_out_pixels writes them, followed by
    zeros."""
    (rows, columns) = made.axes
    batch, channels, height, width = array.shape
    grid = np.zeros((batch, channels, rows.grid, columns.grid))
    for i, j in itertools.product(range(rows.grid), range(columns.grid)):
        row = i * rows.in_step + rows.in_first + remainder[0]
        column = j * columns.in_step + columns.in_first + remainder[1]
        if 0 <= row < height and 0 <= column < width:
            grid[:, :, i, j] = array[:, :, row, column]
    flat = grid.transpose(0, 2, 3, 1).reshape(-1, channels)
    return np.concatenate([flat, np.zeros((made.halo, channels))])


def tap_of(made, axis, place, remainder, dilate, kernel):
    """Return the tap at a position in the grid, or None."""
    steps = axis.last - place if made.backward else place
    at = steps * (axis.out_step if made.backward else axis.in_step) + remainder
    tap = at // dilate
    return tap if at >= 0 and at % dilate == 0 and tap < kernel else None


def by_grid(problem, array, w, backward):
    """Return the convolution, or the gradient for x, by the tables that the kernel is compiled
    with."""
    made = gemm_grid.product(problem, backward)
    rows, columns = made.axes
    out = np.zeros(problem.x_shape if backward else problem.y_shape)
    group_in = problem.channels // problem.groups
    group_out = problem.filters // problem.groups
    fold = problem.stride if made.folded else (1, 1)
    reach = (problem.kernel[1] - 1) * problem.dilate[1]
    folded_taps = reach // problem.stride[1] + 1 if made.folded_taps else 1
    for remainder, taps in made.pairs:
        for down, across, tap in itertools.product(*map(range, (*fold, folded_taps))):
            here = (remainder[0] + down, remainder[1] + across + tap * fold[1])
            flat = flat_grid(array, made, (0, 0) if backward else here)
            count = problem.batch * made.positions
            sums = np.zeros((count, out.shape[1]))
            for place in taps:
                p, q = (
                    tap_of(made, axis, at, rest, dilate, kernel)
                    for axis, at, rest, dilate, kernel in zip(
                        made.axes, place, here, problem.dilate, problem.kernel
                    )
                )
                if p is None or q is None:
                    continue
                shift = place[0] * columns.grid + place[1]
                seen = flat[shift : shift + count]
                for group in range(problem.groups):
                    inner = slice(group * group_in, (group + 1) * group_in)
                    outer = slice(group * group_out, (group + 1) * group_out)
                    if backward:
                        sums[:, inner] += seen[:, outer] @ w[outer, :, p, q]
                    else:
                        sums[:, outer] += seen[:, inner] @ w[outer, :, p, q].T
            grid = sums.reshape(problem.batch, rows.grid, columns.grid, -1)
            for i, j in itertools.product(range(rows.valid), range(columns.valid)):
                h = i * rows.out_step + rows.out_first + (here[0] if backward else 0)
                s = j * columns.out_step + columns.out_first + (here[1] if backward else 0)
                if 0 <= h < out.shape[2] and 0 <= s < out.shape[3]:
                    out[:, :, h, s] += grid[:, i, j]
    return out


@pytest.mark.parametrize("text", PROBLEMS)
def test_grids_are_convolutions(text):
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(1)
    x, w, dy = (
        rng.integers(-4, 5, shape).astype("f4")
        for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    )
    expected = oracle.forward(problem, x, w, None)
    np.testing.assert_array_equal(by_grid(problem, x, w, False), expected)
    expected = oracle.backward_data(problem, w, dy)
    np.testing.assert_array_equal(by_grid(problem, dy, w, True), expected)


# Whether one launch of the kernels computes the gradient for x of such windows.
WINDOWS = {
    **dict.fromkeys(("k3", "k3,p1", "k1", "k1,p1", "k1,s2", "k1,s1x3"), True),
    **dict.fromkeys(("k3,s2", "k3,s2,p1", "k2,s2", "k1x2,s1x2", "k1,s2,p1", "k1,s2,p0x1"), False),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", [f"implicit_gemm_{by}_backward_data" for by in ("fused", "sm80")])
def test_the_gradient_for_x_in_one_launch_has_strides_of_single_unpadded_taps_only(name, window):
    problem = ConvProblem.parse(f"b2,c32,h16,w18,m32,{window}")
    reason = catalog.get(name).why_not(problem, (9, 0))
    expected = "of the gradient for x it computes strides for 1x1 without padding only"
    assert reason == (None if WINDOWS[window] else expected)


# Each needs a compilation.
@pytest.mark.parametrize("window", first(1, sorted(WINDOWS, key=WINDOWS.get)))
@pytest.mark.parametrize(
    ("name", "architecture"),
    [("implicit_gemm_fused_backward_data", "90a"), ("implicit_gemm_sm80_backward_data", "80")],
)
def test_its_source_takes_what_the_host_does(nvcc, name, architecture, window):
    kernel, problem = catalog.get(name), ConvProblem.parse(f"b2,c32,h16,w18,m32,{window}")
    plan = kernel.plan(problem, (9, 0), False)
    compiles = contextlib.nullcontext()
    fails = pytest.raises(KernelCompileFailed, match="static assertion failed")
    with compiles if kernel.why_not(problem, (9, 0)) is None else fails:
        compiler.compile_plan(plan.kernel.source, plan.macros, architecture, CUBINS)
