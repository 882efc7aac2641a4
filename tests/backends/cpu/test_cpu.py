"""The optimised CPU kernels against the reference, on every instruction set of this CPU.

Arrays end at forbidden pages (`guarded`); outputs hold NaN initially (`harness`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import harness
import numpy as np
import pytest
from cases import every
from harness import backward_data, forward, inputs, integers, real_inputs

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.bench import oracle
from ece408_op.errors import InvalidSetting
from ece408_op.problem import ConvProblem

SHORT, LONG = 3, 26  # channels, for `direct` and for `winograd`
KERNELS = [(k, k) for k in (1, 2, 3, 4, 5, 7, 9)] + [(1, 4), (1, 7), (5, 1), (3, 1), (2, 5)]
COURSE = ["b2,c1,h28,w28,m50,k5", "b2,c1,h70,w70,m12,k5", "b2,c12,h33,w33,m24,k7"]

cpu = CpuBackend()
reference = ReferenceBackend()


def check_exact(problem, rng, accumulate=False, side="end"):
    x, w, bias = inputs(problem, rng)
    onto = integers(rng, problem.y_shape, problem.dtype) if accumulate else None
    expected = forward(reference, problem, x, w, bias, onto)
    y = forward(cpu, problem, x, w, bias, onto, side)
    np.testing.assert_array_equal(y, expected, err_msg=str(problem))


@every(channels=[SHORT, LONG], kernel=KERNELS, side=["start", "end"])
def test_kernels(isa, kernel, side, channels, rng):
    for size in ((9, 9), (11, 25), (23, 18), (10, 47)):
        problem = ConvProblem(2, channels, *size, filters=7, kernel=kernel)
        check_exact(problem, rng, side=side)
        check_exact(replace(problem, bias=True), rng, accumulate=True, side=side)


@every(channels=[2, LONG], kernel=[(3, 3), (5, 5), (2, 6), (4, 1)])
def test_every_output_width_up_to_40(isa, kernel, channels, rng):
    for width in range(1, 41):
        for height in (1, 2, 5):
            size = (height + kernel[0] - 1, width + kernel[1] - 1)
            problem = ConvProblem(1, channels, *size, filters=5, kernel=kernel)
            check_exact(problem, rng, accumulate=bool(width % 2))


@every(bias=[False, True])
def test_every_number_of_filters_up_to_30(isa, bias, rng):
    for filters in range(1, 31):
        for channels in (2, 6):
            check_exact(ConvProblem(2, channels, 8, 21, filters, (3, 5), bias=bias), rng)
        check_exact(ConvProblem(1, 1, 6, 7, filters=filters, kernel=(3, 4), bias=bias), rng)


@every(channels=[1, 256, 257, 600], side=["start", "end"])
def test_single_taps_of_every_plane_up_to_a_few_vectors(isa, channels, side, rng):
    """Sums of more than 256 channels are split; those of the gradient are over filters."""
    for pixels in (*range(1, 20), *range(31, 35), *range(47, 51), *range(62, 66), 130):
        filters = pixels * 5 % 23 + 1
        for c, m in ((channels, filters), (filters, channels)):
            problem = ConvProblem(1 + pixels % 2, c, 1, pixels, m, (1, 1), bias=pixels % 3 == 0)
            onto = integers(rng, problem.x_shape, "float32") if pixels % 2 else None
            check_exact(problem, rng, accumulate=onto is not None, side=side)
            w, dy = (integers(rng, s, "float32") for s in (problem.w_shape, problem.y_shape))
            expected = oracle.backward_data(problem, w, dy) + (0 if onto is None else onto)
            found = backward_data(cpu, problem, w, dy, onto, side)
            np.testing.assert_array_equal(found, expected, err_msg=str(problem))


@every(stride=[(2, 2), (1, 2), (2, 1), (3, 5)], side=["start", "end"])
def test_single_taps_with_strides(isa, stride, side, rng):
    for batch, height, width in ((1, 9, 26), (3, 12, 31), (9, 40, 7), (2, 3, 1)):
        problem = ConvProblem(batch, 5, height, width, 7, (1, 1), stride=stride, bias=True)
        check_exact(problem, rng, accumulate=height == 12, side=side)


@every(threads=[1, 2, 3, 16], batch=[1, 2, 3, 4, 5])
def test_batches_and_threads(isa, batch, threads, rng):
    with settings.override(threads=threads):
        for accumulate in (False, True):
            check_exact(ConvProblem(batch, 3, 14, 21, 13, (5, 5)), rng, accumulate)
            check_exact(ConvProblem(batch, 2, 9, 8, 3, (3, 3)), rng, accumulate)


@every(text=[*COURSE, "b1,c3,h40,w40,m9,k3", "b1,c30,h40,w40,m9,k3", "b1,c700,h7,w7,m99,k1"])
def test_results_do_not_depend_on_threads(isa, text, rng):
    problem = ConvProblem.parse(text)
    harness.check_threads(cpu, problem, rng)
    onto = rng.standard_normal(problem.y_shape).astype("float32")
    harness.check_threads(cpu, problem, rng, onto)


@every(text=[*COURSE, "b1,c12,h12,w12,m24,k7", "b1,c3000,h6,w7,m9,k1"])
def test_error_against_float64(isa, text, rng):
    assert harness.error(cpu, ConvProblem.parse(text), rng) <= 1e-6


def test_calls_from_several_threads_at_once(isa, rng):
    problem = ConvProblem.parse("b4,c2,h20,w20,m9,k5")
    sets = [inputs(problem, rng)[:2] for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda pair: forward(cpu, problem, *pair), sets))
    for (x, w), y in zip(sets, results):
        np.testing.assert_array_equal(y, forward(reference, problem, x, w))


@every(
    text=[
        *("b1,c1,h9,w24,m2,k3x3", "b1,c26,h9,w24,m2,k3x3", "b1,c26,h12,w24,m2,k5x3"),
        *("b1,c26,h9,w24,m2,k4x3", "b1,c26,h14,w24,m40,k3x3,p1x1"),
        # Row pairs that are not adjacent, with a stride, and of even height.
        *("b1,c26,h24,w24,m40,k3x3,p2x2,d2x2", "b1,c4,h40,w40,m20,k7x5,s2x2,p3x2"),
        "b1,c26,h24,w24,m40,k4x4,p1x1",
    ],
    row=range(4, 8),
)
def test_infinities_and_nans_stay_where_they_belong(isa, text, row, rng):
    """A pixel must not affect outputs that do not read it, not even times zero."""
    problem = ConvProblem.parse(text)
    x, w = real_inputs(problem, rng)
    x[0, 0, row, 11], x[0, 0, 8, 23] = np.inf, np.nan
    expected = np.isfinite(oracle.forward(problem, x, w, None))
    np.testing.assert_array_equal(np.isfinite(forward(cpu, problem, x, w)), expected)


@every(
    text=[
        *("b170,c1,h70,w70,m12,k5", "b61,c2,h75,w63,m37,k4x5,bias"),
        *("b160,c1,h130,w135,m12,k3,s2x2,p1x1,bias", "b33,c3,h128,w128,m64,k7,s2x2,p3x3,bias"),
    ]
)
def test_outputs_larger_than_the_cache(text, rng):
    """Such outputs are written by non-temporal stores of whole lines, at any alignment."""
    problem = ConvProblem.parse(text)
    assert 4 * np.prod(problem.y_shape) > 32 << 20
    harness.check_large_batch(cpu, problem, rng)


@every(
    case=[
        ("b1,c1,h5,w24,m1,k3", "direct"),
        ("b1,c1,h70,w70,m12,k5", "direct"),
        ("b1,c12,h33,w33,m24,k5", "winograd"),
        ("b4,c8,h56,w56,m64,k3,p1x1", "winograd"),
        ("b4,c300,h30,w30,m64,k3,p1x1", "conv_fwd_oc_f23_2d"),
        ("b1,c64,h7,w7,m64,k3,p1x1", "conv_fwd_oc"),
        ("b1,c30,h6,w24,m1,k4", "direct"),
        ("b1,c1,h5,w5,m1,k3", "conv_fwd_ow"),
        ("b1,c3000,h4,w4,m1,k1", "direct"),
        ("b1,c3,h9,w8,m1,k1,s2x2", "direct"),
        ("b8,c128,h4,w4,m128,k1", "direct"),
        ("b7,c128,h4,w5,m128,k1", "direct"),
        ("b8,c128,h3,w3,m128,k1", "conv_fwd_oc"),
        ("b1,c2,h9,w8,m2,k1,g2", "conv_fwd_ow"),
        ("b1,c3,h1,w3,m1,k1", "conv_fwd_ow"),
        ("b1,c2,h5,w6,m2,k3,p1x1,g2", "depthwise"),
        ("b1,c2,h5,w6,m6,k5,s2x2,p2x2,g2", "depthwise"),
        ("b1,c2,h9,w9,m2,k3,d2x2,g2", "depthwise"),
        ("b1,c2,h9,w9,m2,k3,s2x1,g2", "conv_fwd_ow"),
        ("b1,c2,h9,w9,m2,k3,s2x2,d2x2,g2", "conv_fwd_ow"),
        ("b1,c2,h9,w9,m2,k3,s3x3,g2", "conv_fwd_ow"),
        ("b1,c2,h9,w9,m2,k7,g2", "conv_fwd_ow"),
        ("b1,c4,h9,w9,m4,k3,g2", "conv_fwd_ow"),
        ("b1,c2,h9,w9,m2,k3,g2,float64", "conv_fwd_ow"),
    ]
)
def test_names_the_kernel_that_ran(isa, case, rng):
    text, kernel = case
    problem = ConvProblem.parse(text)
    x, w, _ = inputs(problem, rng)
    y = np.empty(problem.y_shape, problem.dtype)
    at = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
    assert cpu.forward(problem, *at, False).kernel == f"{kernel}_{isa}"


BY_F23_2D = dict.fromkeys(("avx2", "avx512"), "conv_fwd_oc_f23_2d")


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("b8,c128,h14,w14,m128,k3,p1", BY_F23_2D),
        ("b8,c256,h14,w14,m256,k3,p1", BY_F23_2D),
        ("b8,c32,h28,w28,m64,k3,p1", {"avx2": "conv_fwd_oc_f23_2d", "avx512": "winograd"}),
        ("b8,c32,h28,w28,m64,k5,p2", BY_F23_2D),
        ("b4,c128,h28,w28,m128,k3,p2,d2x2", BY_F23_2D),
        ("b4,c128,h28,w28,m128,k3,p4,d4x4", dict.fromkeys(BY_F23_2D, "conv_fwd_oc_f23_1d")),
        ("b1,c256,h14,w14,m256,k3,p1", {"avx512": "conv_fwd_oc_f23_1d"}),
        ("b16,c256,h7,w7,m256,k3,p1", {"avx512": "conv_fwd_oc_f23_1d"}),
        ("b4,c256,h7,w7,m256,k3,p1", {"avx512": "conv_fwd_oc"}),
        ("b4,c32,h56,w56,m64,k3,p1", {"avx2": "conv_fwd_oc_f23_2d", "avx512": "winograd"}),
        ("b4,c64,h56,w56,m64,k3,p1", BY_F23_2D),
        ("b1,c3,h224,w224,m32,k3,s2,p1", dict.fromkeys(("avx2", "avx512"), "conv_fwd_oc")),
        ("b1,c128,h17,w17,m128,k1x7,p0x3", {"avx512": "conv_fwd_oc_f23_1d"}),
        ("b1,c3,h64,w64,m32,k7,s2,p3", dict.fromkeys(("avx2", "avx512"), "conv_fwd_oc_f23_1d")),
        (
            "b16,c128,h56,w56,m128,k3,s2,p1",
            {"avx2": "conv_fwd_oc", "avx512": "conv_fwd_oc_f23_1d"},
        ),
        ("b16,c288,h35,w35,m384,k3,s2", dict.fromkeys(("avx2", "avx512"), "conv_fwd_oc")),
        ("b1,c128,h56,w56,m128,k3,s2,p1", dict.fromkeys(("avx2", "avx512"), "conv_fwd_oc")),
        ("b16,c256,h7,w7,m256,k1", dict.fromkeys(("avx2", "avx512"), "direct")),
        ("b16,c256,h6,w6,m256,k1", {"avx2": "direct", "avx512": "conv_fwd_oc"}),
    ],
)
def test_instruction_sets_choose_by_their_own_measurements(text, kernels):
    problem = ConvProblem.parse(text)
    assert {isa: native.choose(problem, "forward", isa) for isa in kernels} == kernels


@pytest.mark.parametrize(
    ("text", "kernel", "kept"),
    [
        ("b1,c512,h7,w7,m512,k3,p1", "conv_fwd_oc", "conv_fwd_oc_f23_2d"),
        ("b1,c384,h8,w8,m384,k3x1,p1x0", "conv_fwd_oc", "conv_fwd_oc_f23_1d"),
        ("b1,c512,h5,w5,m512,k3,p1", "conv_fwd_oc", "conv_fwd_oc"),
        ("b1,c512,h7,w7,m512,k3,p1,float64", "conv_fwd_oc", "conv_fwd_oc"),
    ],
)
def test_weights_that_are_kept_packed_may_have_another_kernel(text, kernel, kept):
    problem = ConvProblem.parse(text)
    for isa in ("avx2", "avx512"):
        assert native.choose(problem, "forward", isa) == kernel
        assert native.choose(problem, "forward", isa, kept=True) == kept


@every(
    case=[
        ("b2,c3,h9,w9,m20,k3", "conv_bwd_w_dot"),
        ("b1,c64,h2,w2,m64,k1", "im2col"),
        ("b3,c40,h17,w15,m30,k1x7,p0x3", "conv_bwd_w_ic"),
        ("b2,c3,h64,w64,m16,k16,s16x16", "im2col"),
    ]
)
def test_names_the_kernel_of_the_gradient_for_weights(isa, case, rng):
    text, kernel = case
    problem = ConvProblem.parse(text)
    x, w, _ = inputs(problem, rng)
    dy, dbias = np.ones(problem.y_shape, "float32"), np.ones(problem.filters, "float32")
    at = (x.ctypes.data, dy.ctypes.data)
    done = cpu.backward_weight(problem, *at, w.ctypes.data, dbias.ctypes.data, False, False)
    assert done.kernel == f"{kernel}_{isa}"
    assert cpu.backward_weight(problem, *at, None, dbias.ctypes.data, False, False).kernel == (
        "reference"
    )


@every(
    case=[
        ("b1,c2,h5,w6,m2,k3,p1x1,g2", "depthwise"),
        ("b1,c2,h5,w6,m2,k3,d2x2,p3x4,g2", "depthwise"),
        ("b1,c12,h33,w33,m24,k5", "winograd"),
        ("b1,c12,h33,w33,m3,k4", "direct"),
        ("b1,c1,h28,w28,m50,k5", "im2col"),
        ("b1,c2,h5,w6,m4,k3,p1x1,g2", "conv_fwd_ow"),
        ("b1,c2,h5,w6,m2,k3,s2x2,p1x1,g2", "depthwise"),
    ]
)
def test_names_the_kernel_of_the_gradient(isa, case):
    text, kernel = case
    problem = ConvProblem.parse(text)
    w, dy, dx = (np.ones(s, "float32") for s in (problem.w_shape, problem.y_shape, problem.x_shape))
    at = (w.ctypes.data, dy.ctypes.data, dx.ctypes.data)
    assert cpu.backward_data(problem, *at, False).kernel == f"{kernel}_{isa}"


def test_an_instruction_set_the_cpu_lacks(monkeypatch):
    monkeypatch.setattr(native, "isas", lambda: ("avx2", "baseline"))
    problem = ConvProblem.parse("b1,c2,h9,w9,m2,k3")
    with settings.override(isa="avx512"), pytest.raises(InvalidSetting) as caught:
        cpu.forward(problem, 1, 1, None, 1, False)
    assert str(caught.value) == "this CPU has no avx512 (ECE408_ISA); it has avx2, baseline"
