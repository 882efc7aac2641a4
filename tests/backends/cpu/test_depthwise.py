"""Groups of one channel, forward and gradients, on every instruction set of this CPU.

Arrays end at forbidden pages (`guarded`); outputs hold NaN initially.
"""

from __future__ import annotations

import itertools

import harness
import numpy as np
import pytest
from cases import every
from harness import forward, inputs, integers, real_inputs
from studies import guarded

from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.bench import oracle
from ece408_op.errors import UnsupportedProblem
from ece408_op.problem import ConvProblem

# Strides, dilations, and the distance between neighbouring taps.
STEPS = {"s1x1": (1, 1), "s2x2": (1, 1), "d2x2": (2, 2), "d3x1": (3, 1), "d1x4": (1, 4)}

cpu = CpuBackend()
reference = ReferenceBackend()


def check_exact(problem, rng, accumulate=False, side="end"):
    harness.check_exact(cpu, problem, rng, accumulate, side)


@every(kernel=[3, 5], steps=STEPS, side=["start", "end"])
def test_every_width_up_to_40(isa, kernel, steps, side, rng):
    for width in range(1, 41):
        height = 1 + width * 7 % 19
        down, across = (step * (kernel // 2) + width % 3 for step in STEPS[steps])
        text = f"b2,c3,h{height},w{width},m3,k{kernel},{steps},p{down}x{across},g3,bias"
        check_exact(ConvProblem.parse(text), rng, accumulate=bool(width % 2), side=side)


@every(kernel=[3, 5], steps=STEPS)
def test_every_height_up_to_30_and_no_border(isa, kernel, steps, rng):
    for height in range(1, 31):
        size = f"h{height + 4 * (kernel - 1)},w{50 - height}"
        check_exact(ConvProblem.parse(f"b1,c2,{size},m2,k{kernel},{steps},g2"), rng)


@every(kernel=[3, 5], side=["start", "end"])
def test_two_rows_that_fill_a_vector(isa, kernel, side, rng):
    """The last of an odd number of rows is alone in its vector."""
    for width, height in itertools.product((2, 4, 8), range(1, 12)):
        text = f"b2,c3,h{height},w{width},m3,k{kernel},p{kernel // 2}x{kernel // 2},g3,bias"
        check_exact(ConvProblem.parse(text), rng, side=side)


@every(kernel=[3, 5], stride=[1, 2], side=["start", "end"])
def test_the_gradient_for_w_of_every_width_up_to_40(isa, kernel, stride, side, rng):
    for width in range(1, 41):
        height, pads = 1 + width * 13 % 83, (kernel // 2 + width % 2, kernel // 2 + width % 3)
        text = f"b2,c2,h{height},w{width},m4,k{kernel},s{stride}x{stride},p{pads[0]}x{pads[1]},g2"
        problem = ConvProblem.parse(text)
        x, dy = (integers(rng, each, "float32") for each in (problem.x_shape, problem.y_shape))
        places = [guarded.place(each, side, read_only=True) for each in (x, dy)]
        dw = guarded.place(np.full(problem.w_shape, np.nan, "float32"), side)

        def run(problem=problem, places=(*places, dw)):
            native.run(
                "backward_weight", problem, *(each.ctypes.data for each in places),
                accumulate=False, threads=2, isa=isa, kernel="depthwise",
            )  # fmt: skip

        # It has too few registers.
        if isa == "baseline" or (isa == "avx2" and kernel == 5):
            with pytest.raises(UnsupportedProblem):
                run()
            continue
        run()
        assert guarded.canary_intact(dw, side)
        np.testing.assert_array_equal(dw, oracle.backward_weight(problem, x, dy), err_msg=text)


@every(multiplier=[1, 2, 5])
def test_several_filters_for_a_channel(isa, multiplier, rng):
    for text in ("b3,c4,h9,w20,k3,p1x1", "b2,c7,h12,w7,k5,s2x2,p2x2"):
        channels = int(text[4])
        text += f",m{channels * multiplier},g{channels},bias"
        check_exact(ConvProblem.parse(text), rng, accumulate=True)


@every(pad=[3, 7, 40])
def test_more_border_than_image(isa, pad, rng):
    for size, steps in (("h1,w1", "s1x1"), ("h1,w1", "s2x2"), ("h2,w3", "s1x1"), ("h1,w1", "d2x3")):
        text = f"b2,c2,{size},m2,k3,{steps},p{pad}x{pad + 1},g2,bias"
        check_exact(ConvProblem.parse(text), rng)


@every(text=["b2,c40,h60,w61,m40,k5,p2x2,g40", "b1,c24,h999,w130,m24,k3,s2x2,g24"])
def test_results_do_not_depend_on_threads(isa, text, rng):
    """The sizes give each thread work: whole planes, and parts of planes."""
    harness.check_threads(cpu, ConvProblem.parse(text), rng)


@every(text=["b9,c16,h250,w240,m16,k3,p1x1", "b9,c16,h247,w240,m16,k5,p4x4,d2x2"])
def test_outputs_larger_than_the_cache(text, rng):
    """Such outputs are written by non-temporal stores if rows begin at a cache line."""
    problem = ConvProblem.parse(f"{text},g16,bias")
    assert 4 * np.prod(problem.y_shape) > 32 << 20
    harness.check_large_batch(cpu, problem, rng)


@every(kernel=[3, 5], steps=STEPS)
def test_infinities_and_nans_stay_where_they_belong(isa, kernel, steps, rng):
    problem = ConvProblem.parse(f"b1,c3,h31,w45,m3,k{kernel},{steps},p2x2,g3")
    x, w = real_inputs(problem, rng)
    x[0, 1, 0, 0], x[0, 1, 13, 29], x[0, 1, 30, 44] = np.inf, np.nan, -np.inf
    expected = np.isfinite(oracle.forward(problem, x, w, None))
    np.testing.assert_array_equal(np.isfinite(forward(cpu, problem, x, w)), expected)


@every(text=["b2,c9,h30,w33,m9,k5,p2x2,g9", "b2,c8,h29,w33,m16,k3,s2x2,g8"])
def test_error_against_float64(isa, text, rng):
    assert harness.error(cpu, ConvProblem.parse(text), rng) <= 3e-7


@every(text=["b1,c4,h9,w9,m4,k3,g2", "b1,c2,h9,w9,m2,k3,s2x1,g2"])
def test_the_library_refuses_what_the_kernel_cannot_do(isa, text, rng):
    problem = ConvProblem.parse(text)
    x, w, _ = inputs(problem, rng)
    y = np.empty(problem.y_shape, problem.dtype)
    with pytest.raises(UnsupportedProblem):
        native.run(
            "forward", problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data,
            accumulate=False, threads=1, isa=isa, kernel="depthwise",
        )  # fmt: skip
