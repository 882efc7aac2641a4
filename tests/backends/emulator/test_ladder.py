"""Our CUDA kernels without PTX, in the emulator: exact, and without findings."""

import numpy as np
import pytest
from cases import first
from harness import forward, inputs

from ece408_op import settings
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda.kernels import depthwise
from ece408_op.backends.emulator import findings
from ece408_op.backends.emulator.emulator_backend import EmulatedBackend
from ece408_op.errors import KernelNotSupported
from ece408_op.problem import ConvProblem

SMALL = ("b2,c6,h11,w8,m7,k4,bias", "b3,c5,h13,w18,m9,k3")
ONE_CHANNEL = ("b3,c1,h17,w22,m12,k5", "b2,c1,h12,w14,m5,k3")
GENERAL = (
    *("b2,c18,h9,w11,m18,k3x2,s2x1,p1x0,d1x2,g2,bias", "b3,c4,h10,w7,m6,k5,s3,p2,float16"),
    "b1,c2,h5,w6,m3,k3,p1,float64",
)
# Gradients for x process pixels by phases of the stride, which differ by one tap or have none.
STRIDED = ("b2,c9,h9,w10,m4,k3,p1,s2", "b2,c18,h9,w7,m18,k1x3,p3x2,s4x3,d1x2,g2")
MORE_STRIDED = (
    *("b1,c3,h12,w13,m4,k1,s2", "b2,c9,h14,w15,m3,k11,p4,s2", "b1,c3,h10,w11,m5,k1,s3x1"),
    *("b2,c40,h10,w11,m5,k3,p1,s3x1", "b1,c9,h13,w12,m3,k11,p5,s3x1", "b2,c1,h9,w14,m4,k1,s4"),
    *("b2,c9,h9,w14,m4,k3,p2,s4", "b2,c18,h17,w19,m4,k11,p2,s4,g2", "b2,c9,h11,w9,m6,k3,p2,s2,d2"),
    *("b1,c9,h11,w9,m6,k3,p3,s3,d2", "b1,c18,h13,w10,m18,k5x3,p4,s4,d2,g2"),
    *("b1,c2,h15,w16,m3,k4x3,p3,s6x4,d4x6", "b3,c2,h2,w3,m3,k2x3,p5x4,s4x5"),
    *("b2,c3,h9,w7,m4,k3,p1,s2x3,float64", "b2,c3,h11,w8,m4,k4x5,p3,s3x2,d2x1,float16"),
)
# Several planes per block, and parts of planes; arrays of odd sizes.
DEPTHWISE = (
    *("b5,c9,h7,w7,m9,k3,p1x1,g9,bias", "b2,c3,h37,w45,m3,k3,p1x1,g3", "b2,c5,h9,w8,m5,k8,p4,g5"),
    *("b2,c5,h19,w40,m5,k5x3,s3x2,p2x1,d1x2,g5", "b3,c7,h2,w3,m7,k3,p2x2,g7"),
)
MORE_DEPTHWISE = (
    *("b4,c1,h9,w70,m1,k1,s2x3,g1", "b1,c2,h23,w41,m2,k7,p3x3,g2,bias"),
    *("b1,c8,h7,w7,m8,k3,p1x1,g8", "b3,c4,h30,w29,m4,k3,s2x2,p1x1,g4,bias"),
    *("b2,c3,h26,w17,m3,k3x5,s1x3,p4x3,d3x2,g3", "b2,c2,h50,w90,m2,k3x2,s2x1,p0x3,g2,bias"),
)
# The same for groups of few channels, one of them with more filters than channels.
GROUPED = (
    *("b3,c12,h7,w7,m12,k3,p1x1,g3,bias", "b1,c6,h19,w40,m10,k5x3,s3x2,p2x1,d1x2,g2,bias"),
    *("b2,c12,h20,w37,m3,k3,p1x1,bias", "b1,c11,h13,w17,m2,k9x5,p4x2,bias"),
)
MORE_GROUPED = (
    *("b5,c24,h3,w4,m3,k3,p2x2,g3", "b2,c8,h37,w45,m8,k3,p1x1,g2"),
    *("b2,c2,h9,w35,m6,k3,s2x2,p1x1,g2", "b2,c16,h14,w14,m16,k3,p1x1,g2"),
    *("b1,c10,h28,w28,m14,k3,p1x1,g2,bias", "b2,c21,h26,w17,m9,k3x5,s1x3,p4x3,d3x2,g3"),
    "b1,c16,h50,w90,m8,k3x2,s2x1,p0x3,g4,bias",
)
# Planes with and without a multiple of four pixels; tiles with several images, and with parts of
# one; partially filled rows and channels; several blocks of rows.
POINTWISE = ("b5,c5,h3,w3,m9,k1,bias", "b2,c20,h6,w14,m37,k1", "b1,c33,h9,w11,m150,k1,bias")
KERNELS = {
    **dict.fromkeys(("1_naive", "2_constant_weights", "3_shared_tiles", "4_im2col"), SMALL),
    **dict.fromkeys(("5_implicit_gemm", "6_register_tiles", "7_channel_tree"), SMALL),
    **dict.fromkeys(("8_channel_atomics", "9_half"), SMALL),
    **dict.fromkeys(("12_one_channel", "13_column_pairs", "15_winograd"), ONE_CHANNEL),
    "depthwise": DEPTHWISE,
    "grouped": GROUPED,
    "pointwise_simt": POINTWISE,
    "general": GENERAL,
    "general_strict": GENERAL,
}


@pytest.fixture(autouse=True)
def _kept(kept):
    with settings.override(cache=kept):
        yield


def _faults(backend, problem):
    return [
        (each.kind, each.place)
        for each in findings.located(findings.take(), backend.content(problem))
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, marks=pytest.mark.slow if number else ())
        for name, texts in KERNELS.items()
        for number, text in enumerate(texts)
    ],
)
def test_a_forward_kernel_is_exact_and_has_no_fault(name, text, rng):
    _check_forward(name, [text], rng)


def test_depthwise_is_exact_and_has_no_fault_with_shared_memory_and_without(rng, monkeypatch):
    """With the layout that is not the first choice of these layers."""
    layouts = depthwise.Forward.layouts

    def others(*given):
        found = layouts(*given)
        return [each for each in found if (each.planes == 0) != (found[0].planes == 0)]

    monkeypatch.setattr(depthwise.Forward, "layouts", others)
    _check_forward("depthwise", DEPTHWISE[:1], rng)


@pytest.mark.slow
def test_more_layers_of_groups_are_exact_and_have_no_fault(rng):
    for kernel, texts in (("depthwise", MORE_DEPTHWISE), ("grouped", MORE_GROUPED)):
        _check_forward(kernel, texts, rng)
        for text in texts:
            names = _check_gradients(ConvProblem.parse(text), rng)
            assert all(name.startswith(kernel) for name in names)


def _check_forward(name, texts, rng):
    backend = EmulatedBackend(name)
    for text in texts:
        problem = ConvProblem.parse(text)
        x, w, bias = inputs(problem, rng)
        found = forward(backend, problem, x, w, bias)
        expected = forward(ReferenceBackend(), problem, x, w, bias)
        assert (found == expected).all(), text
        onto = forward(backend, problem, x, w, bias, onto=expected)
        assert (onto == 2 * expected).all(), text
        assert _faults(backend, problem) == [], text


def _gradients(backend, problem, x, w, dy, onto=None):
    """Return dx, dw and, with a bias, its gradient, written onto NaN or added to other ones."""
    shapes = (problem.x_shape, problem.w_shape, problem.bias_shape)[: 2 + problem.bias]
    empty = [np.full(shape, np.nan, problem.dtype) for shape in shapes]
    outputs = empty if onto is None else [each.copy() for each in onto]
    px, pw, pdy = (each.ctypes.data for each in (x, w, dy))
    pdx, pdw, *pdb = (each.ctypes.data for each in outputs)
    add = onto is not None
    names = [backend.backward_data(problem, pw, pdy, pdx, add).kernel]
    done = backend.backward_weight(problem, px, pdy, pdw, *(pdb or [None]), add, add)
    return outputs, [*names, done.kernel]


def _check_gradients(problem, rng, precision="float32"):
    """Check gradients; return the names of the kernels."""
    backend = EmulatedBackend("general", precision=precision)
    x, w, _ = inputs(problem, rng)
    dy = rng.integers(-4, 5, problem.y_shape).astype(problem.dtype)
    expected, _ = _gradients(ReferenceBackend(), problem, x, w, dy)
    found, names = _gradients(backend, problem, x, w, dy)
    onto, _ = _gradients(backend, problem, x, w, dy, expected)
    for mine, added, theirs in zip(found, onto, expected):
        assert (mine == theirs).all(), problem
        assert (added == 2 * theirs).all(), problem
    assert findings.take() == [], problem
    return names


def _gradients_by(of_x, of_w, texts, quick=0, precision="float32"):
    return first(quick, [(text, of_x, of_w, precision) for text in texts])


# On a GPU the default is a tensor core kernel, which the emulator does not support.
USUAL = (GENERAL[0], STRIDED[0], "b2,c9,h9,w9,m16,k3", GENERAL[1], STRIDED[1])
# Few channels, and more planes of dy than a block processes at once.
MANY_IMAGES = ("b264,c3,h7,w6,m10,k3,p1x1", "b290,c2,h20,w9,m9,k5x3,p1x2,d2x1")
FEW_FILTERS = (POINTWISE[0], "b1,c150,h9,w11,m33,k1", POINTWISE[1])
# All at once and in several parts; by fours and single values.
SUMS_FOR_W = (
    *("b3,c9,h5,w5,m33,k3,p1", "b2,c20,h6,w14,m37,k1", "b1,c5,h20,w21,m9,k1"),
    "b1,c33,h9,w11,m70,k3x2,s2x1,p1x0,d1x2",
)


@pytest.mark.parametrize(
    ("text", "of_x", "of_w", "precision"),
    [
        *_gradients_by("general", ("general", "implicit_gemm_simt"), (*USUAL, *MORE_STRIDED), 1),
        *_gradients_by("general_strict", "general_strict", USUAL, 1, "strict"),
        *_gradients_by("depthwise", "depthwise", DEPTHWISE, 1),
        *_gradients_by("grouped", "grouped", GROUPED[:-2]),
        *_gradients_by("grouped_backward_data", "", (*MANY_IMAGES, "b1,c1,h11,w33,m13,k9,p4")),
        *_gradients_by("pointwise_simt_backward_data", "", FEW_FILTERS, 1),
        *_gradients_by("", "implicit_gemm_simt_backward_weight", SUMS_FOR_W),
    ],
)
def test_gradients_are_exact_and_have_no_fault(text, of_x, of_w, precision, rng):
    names = _check_gradients(ConvProblem.parse(text), rng, precision)
    assert names[0].startswith(of_x)
    assert names[1].startswith(of_w)


@pytest.mark.parametrize(
    "text",
    first(1, ["b3,c4,h6,w5,m4,k3,p1,s2", "b2,c4,h6,w7,m4,k3,p1,g4", "b40,c2,h5,w5,m2,k3,p1,g2"]),
)
def test_padding_is_not_multiplied_with_infinity(text, rng):
    """At corners of dy most taps are padding, which textbook loops skip."""
    problem = ConvProblem.parse(text)
    x, w, _ = inputs(problem, rng)
    dy = rng.integers(-4, 5, problem.y_shape).astype(problem.dtype)
    dy[0, 0, 0, 0], dy[0, 1, -1, -1] = np.nan, np.inf
    backend = EmulatedBackend("general")
    found, _ = _gradients(backend, problem, x, w, dy)
    expected, _ = _gradients(ReferenceBackend(), problem, x, w, dy)
    np.testing.assert_equal(found, expected)


def test_ptx_is_refused_with_its_line(rng):
    problem = ConvProblem.parse("b1,c4,h9,w9,m8,k3")
    backend = EmulatedBackend("10_tf32")
    with pytest.raises(KernelNotSupported, match=r"tf32_strips.cuh:\d+: PTX \(asm\) cannot run"):
        backend.prepare(problem, "forward")
