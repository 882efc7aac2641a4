"""CPU kernels on problems of every size, on every instruction set of this CPU, and the choice among
them.

Arrays end at forbidden pages (`guarded`); outputs hold NaN initially (`harness`).
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import every
from harness import DIRECTIONS, check_exact, forward, inputs

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.errors import InvalidSetting, UnsupportedProblem
from ece408_op.problem import ConvProblem

SHORT, LONG = 3, 26  # channels, for `direct` and for `winograd`
BIAS = ("", ",bias")
# Strides and dilations.
STEPS = {"s1x1": (1, 1), "s2x2": (1, 1), "d2x2": (2, 2), "d3x1": (3, 1), "d1x4": (1, 4)}
ODD = list(itertools.product((3, 5, 7), repeat=2))
KERNELS = ("k1", "k2", "k3", "k4", "k5", "k7", "k9", "k1x4", "k1x7", "k5x1", "k3x1", "k2x5")
PIXELS = (*range(1, 20), *range(31, 35), *range(47, 51), *range(62, 66), 130)

cpu = CpuBackend()


def _taps(channels, pixels):
    """Yield 1x1 kernels; sums of more than 256 channels are split, those of the gradient are over
    filters."""
    filters = pixels * 5 % 23 + 1
    for c, m in ((channels, filters), (filters, channels)):
        yield f"b{1 + pixels % 2},c{c},h1,w{pixels},m{m},k1{BIAS[pixels % 3 == 0]}"


def _of_one_channel(kernel, steps, width):
    height = 1 + width * 7 % 19
    down, across = (step * (kernel // 2) + width % 3 for step in STEPS[steps])
    return f"b2,c3,h{height},w{width},m3,k{kernel},{steps},p{down}x{across},g3,bias"


# Problems by what differs; the last ones are computed by `winograd`, others by the chosen kernel.
SWEEPS = {
    "kernels": [
        f"b2,c{c},h{h},w{w},m7,{kernel}{bias}"
        for c in (SHORT, LONG)
        for kernel in KERNELS
        for h, w in ((9, 9), (11, 25), (23, 18), (10, 47))
        for bias in BIAS
    ],
    "widths of outputs": [
        f"b1,c{c},h{height + k - 1},w{width + q - 1},m5,k{k}x{q}"
        for c in (2, LONG)
        for k, q in ((3, 3), (5, 5), (2, 6), (4, 1))
        for width in range(1, 41)
        for height in (1, 2, 5)
    ],
    "filters": [
        f"{layer},m{filters}{bias}"
        for bias in BIAS
        for filters in range(1, 31)
        for layer in ("b2,c2,h8,w21,k3x5", "b2,c6,h8,w21,k3x5", "b1,c1,h6,w7,k3x4")
    ],
    "pixels of single taps": [
        text
        for channels in (1, 256, 257, 600)
        for pixels in PIXELS
        for text in _taps(channels, pixels)
    ],
    "strides of single taps": [
        f"b{batch},c5,h{height},w{width},m7,k1,{stride},bias"
        for stride in ("s2x2", "s1x2", "s2x1", "s3x5")
        for batch, height, width in ((1, 9, 26), (3, 12, 31), (9, 40, 7), (2, 3, 1))
    ],
    # Each by all numbers of threads.
    "batches": [
        f"b{batch},{layer}"
        for layer in ("c3,h14,w21,m13,k5", "c2,h9,w8,m3,k3")
        for batch in range(1, 6)
        for _ in range(4)
    ],
    "groups of one channel": [
        *(_of_one_channel(*each) for each in itertools.product((3, 5), STEPS, range(1, 41))),
        *(
            f"b1,c2,h{height + 4 * (k - 1)},w{50 - height},m2,k{k},{steps},g2"
            for k in (3, 5)
            for steps in STEPS
            for height in range(1, 31)
        ),
        *(f"b3,c4,h9,w20,k3,p1x1,m{4 * n},g4,bias" for n in (1, 2, 5)),
        *(f"b2,c7,h12,w7,k5,s2x2,p2x2,m{7 * n},g7,bias" for n in (1, 2, 5)),
        # Two rows fill a vector; the last one may be alone in its.
        *(
            f"b2,c3,h{height},w{width},m3,k{k},p{k // 2}x{k // 2},g3,bias"
            for k, width, height in itertools.product((3, 5), (2, 4, 8), range(1, 12))
        ),
        # More border than image.
        *(
            f"b2,c2,{size},m2,k3,p{pad}x{pad + 1},g2,bias"
            for size in ("h1,w1", "h1,w1,s2x2", "h2,w3", "h1,w1,d2x3")
            for pad in (3, 7, 40)
        ),
    ],
    "winograd": [
        *(
            f"b2,c2,h{k + width * 7 % 9},w{width},m3,k{k}x{q},p{width % 3}x{width % 2}"
            f"{BIAS[width % 2]}"
            for k, q in ODD
            for width in range(q, 41)
        ),
        *(f"b1,c2,h{h},w{50 - h},m5,k{k}" for k in (3, 5, 7) for h in range(k, 31)),
        *(f"b2,c3,h8,w21,m{m},k3x5{bias}" for bias in BIAS for m in range(1, 31)),
        *(f"b1,c1,h7,w9,m{m},k5x3{bias}" for bias in BIAS for m in range(1, 31)),
        *(f"b2,c2,h3,w4,m3,k3,p{pad}x{pad + 1}" for pad in (3, 4, 20)),
        # The transformed images exceed the cache; several threads split them into bands.
        *["b1,c40,h40,w66,m9,k3,p1x1", "b2,c64,h31,w33,m3,k7,p3x3"] * 3,
        # Each thread takes several images and prefetches the next; the last one has no next.
        *["b300,c2,h9,w11,m3,k5"] * 2,
    ],
}  # fmt: skip


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_size(isa, sweep, rng, monkeypatch):
    by_winograd = sweep == "winograd"
    if by_winograd:
        monkeypatch.setattr(native, "choose", lambda *_: "winograd")
    for number, text in enumerate(SWEEPS[sweep]):
        problem = ConvProblem.parse(text)
        # It has no gradient of a border larger than the kernel.
        fits = all(pad < size for pad, size in zip(problem.pad, problem.kernel))
        directions = DIRECTIONS[: 2 if fits or not by_winograd else 1]
        sides = ("start", "end")[:: 1 - 2 * (number % 2)]
        with settings.override(threads=(1, 2, 3, 7)[number % 4]):
            check_exact(cpu, problem, rng, [isa], zip((False, True), sides), directions)


@every(kernel=[3, 5], stride=[1, 2])
def test_gradients_for_w_of_groups_of_one_channel(isa, kernel, stride, rng, monkeypatch):
    monkeypatch.setattr(native, "choose", lambda *_: "depthwise")
    for width in range(1, 41):
        height, down, across = 1 + width * 13 % 83, kernel // 2 + width % 2, kernel // 2 + width % 3
        text = f"b2,c2,h{height},w{width},m4,k{kernel},s{stride}x{stride},p{down}x{across},g2"
        given = (cpu, ConvProblem.parse(text), rng, [isa])
        # It has too few registers.
        if isa == "baseline" or (isa == "avx2" and kernel == 5):
            with pytest.raises(UnsupportedProblem):
                check_exact(*given, directions=["backward_weight"])
            continue
        check_exact(*given, directions=["backward_weight"])


@every(
    text=[
        *("b170,c1,h70,w70,m12,k5", "b61,c2,h75,w63,m37,k4x5,bias"),
        *("b160,c1,h130,w135,m12,k3,s2x2,p1x1,bias", "b33,c3,h128,w128,m64,k7,s2x2,p3x3,bias"),
        "b9,c16,h250,w240,m16,k3,p1x1,g16,bias",
        "b9,c16,h247,w240,m16,k5,p4x4,d2x2,g16,bias",
    ]
)
@pytest.mark.slow
def test_outputs_larger_than_the_cache(text, rng):
    """Such outputs are written by non-temporal stores of whole lines, at any alignment."""
    problem = ConvProblem.parse(text)
    assert 4 * np.prod(problem.y_shape) > 32 << 20
    few = replace(problem, batch=7)
    x, w, bias = inputs(few, rng)
    expected = np.resize(forward(ReferenceBackend(), few, x, w, bias), problem.y_shape)
    x = np.resize(x, problem.x_shape)
    for isa in native.isas():
        with settings.override(isa=isa):
            found = forward(cpu, problem, x, w, bias, side="start")
        assert np.array_equal(found, expected), isa


# Problems by direction and by the kernel that every instruction set chooses.
CHOICES = {
    "forward": {
        "direct": [
            *("b1,c1,h5,w24,m1,k3", "b1,c1,h70,w70,m12,k5", "b1,c30,h6,w24,m1,k4"),
            *("b1,c3000,h4,w4,m1,k1", "b1,c3,h9,w8,m1,k1,s2x2", "b8,c128,h4,w4,m128,k1"),
            *("b7,c128,h4,w5,m128,k1", "b1,c3,h9,w25,m2,k3"),
        ],
        "winograd": [*("b1,c12,h33,w33,m24,k5", "b4,c8,h56,w56,m64,k3,p1x1")],
        "conv_fwd_oc_f23_2d": ["b4,c300,h30,w30,m64,k3,p1x1"],
        "conv_fwd_oc": [*("b1,c64,h7,w7,m64,k3,p1x1", "b8,c128,h3,w3,m128,k1")],
        "conv_fwd_ow": [
            *("b1,c1,h5,w5,m1,k3", "b1,c2,h9,w8,m2,k1,g2", "b1,c3,h1,w3,m1,k1"),
            *("b1,c2,h9,w9,m2,k3,s2x1,g2", "b1,c2,h9,w9,m2,k3,s2x2,d2x2,g2"),
            *("b1,c2,h9,w9,m2,k3,s3x3,g2", "b1,c2,h9,w9,m2,k7,g2", "b1,c4,h9,w9,m4,k3,g2"),
            "b1,c2,h9,w9,m2,k3,g2,float64",
        ],
        "depthwise": [
            *("b1,c2,h5,w6,m2,k3,p1x1,g2", "b1,c2,h5,w6,m6,k5,s2x2,p2x2,g2"),
            "b1,c2,h9,w9,m2,k3,d2x2,g2",
        ],
    },
    "backward_data": {
        "depthwise": [
            *("b1,c2,h5,w6,m2,k3,p1x1,g2", "b1,c2,h5,w6,m2,k3,d2x2,p3x4,g2"),
            "b1,c2,h5,w6,m2,k3,s2x2,p1x1,g2",
        ],
        "winograd": ["b1,c12,h33,w33,m24,k5"],
        "direct": ["b1,c12,h33,w33,m3,k4"],
        "im2col": ["b1,c1,h28,w28,m50,k5"],
        "conv_fwd_ow": [*("b1,c2,h5,w6,m4,k3,p1x1,g2", "b1,c1,h9,w25,m2,k3")],
    },
    "backward_weight": {
        "conv_bwd_w_dot": ["b2,c3,h9,w9,m20,k3"],
        "im2col": [*("b1,c64,h2,w2,m64,k1", "b2,c3,h64,w64,m16,k16,s16x16")],
        "conv_bwd_w_ic": ["b3,c40,h17,w15,m30,k1x7,p0x3"],
    },
}


def test_every_instruction_set_chooses_by_sizes(isa):
    found, expected = {}, {}
    for direction, kernels in CHOICES.items():
        for kernel, texts in kernels.items():
            for text in texts:
                expected[direction, text] = kernel
                found[direction, text] = native.choose(ConvProblem.parse(text), direction, isa)
    assert found == expected


def test_the_kernel_that_ran_is_named(isa, rng):
    problem = ConvProblem.parse("b2,c3,h9,w25,m20,k3")
    x, w, _ = inputs(problem, rng)
    y, dbias = np.ones(problem.y_shape, "float32"), np.ones(problem.filters, "float32")
    px, pw, py, pdbias = (each.ctypes.data for each in (x, w, y, dbias))
    assert cpu.forward(problem, px, pw, None, py, False).kernel == f"direct_{isa}"
    assert cpu.backward_data(problem, pw, py, px, False).kernel == f"direct_{isa}"
    done = cpu.backward_weight(problem, px, py, pw, pdbias, False, False)
    assert done.kernel == f"conv_bwd_w_dot_{isa}"
    done = cpu.backward_weight(problem, px, py, None, pdbias, False, False)
    assert done.kernel == "reference"


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
        ("b16,c128,h56,w56,m128,k3,s2,p1", {"avx2": "conv_fwd_oc", "avx512": "conv_fwd_oc_f23_1d"}),
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
        *(
            ("winograd", f"b1,c1,h9,w9,m1,{window}")
            for window in ("k4", "k3x4", "k1x3", "k9", "k3,s2x1", "k3,d1x2")
        ),
        ("winograd", "b1,c2,h9,w9,m2,k3,g2"),
        ("depthwise", "b1,c4,h9,w9,m4,k3,g2"),
        ("depthwise", "b1,c2,h9,w9,m2,k3,g2,s2x1"),
    ]
)
def test_a_kernel_refuses_what_it_does_not_do(isa, case, rng):
    kernel, text = case
    arrays = (1, 1, None, 1)
    with pytest.raises(UnsupportedProblem, match=f"by {kernel} failed"):
        native.run(
            *("forward", ConvProblem.parse(text), *arrays),
            **{"accumulate": False, "threads": 1, "isa": isa, "kernel": kernel},
        )


def test_an_instruction_set_the_cpu_lacks(monkeypatch):
    monkeypatch.setattr(native, "isas", lambda: ("avx2", "baseline"))
    problem = ConvProblem.parse("b1,c2,h9,w9,m2,k3")
    with settings.override(isa="avx512"), pytest.raises(InvalidSetting) as caught:
        cpu.forward(problem, 1, 1, None, 1, False)
    assert str(caught.value) == "this CPU has no avx512 (ECE408_ISA); it has avx2, baseline"
