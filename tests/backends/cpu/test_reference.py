"""The reference against an independent implementation in NumPy, and against finite differences."""

import numpy as np
import pytest
from cases import every
from harness import check_exact, forward, integers
from scipy.signal import correlate

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.bench import oracle
from ece408_op.errors import InvalidProblem
from ece408_op.problem import ITEM_BYTES, ConvProblem

PROBLEMS = [
    *("b2,c1,h7,w9,m3,k3x3", "b1,c1,h1,w1,m1,k1x1", "b3,c4,h8,w5,m6,k3x2,bias"),
    *("b2,c3,h9,w11,m4,k3x3,s2x3", "b2,c2,h6,w7,m3,k3x3,p1x2,bias", "b2,c2,h3,w3,m2,k3x3,p4x3"),
    *("b1,c2,h12,w11,m3,k3x2,d3x4", "b2,c3,h13,w14,m5,k3x4,s2x3,p2x1,d2x3,bias"),
    *("b2,c6,h7,w8,m4,k3x3,g2,bias", "b2,c5,h8,w8,m5,k3x3,p1x1,g5"),
    *("b2,c4,h9,w7,m8,k2x3,s3x2,p2x2,d2x1,g4,bias", "b1,c2,h5,w6,m2,k1x1,s4x5,p1x0"),
]
EACH_DTYPE = [ConvProblem.parse(f"{text},{dtype}") for text in PROBLEMS for dtype in ITEM_BYTES]

reference = ReferenceBackend()


def backward_data(problem, w, dy, dx):
    reference.backward_data(problem, w.ctypes.data, dy.ctypes.data, dx.ctypes.data, False)
    return dx


def backward_weight(problem, x, dy, dw, dbias, accumulate_w=False, accumulate_bias=False):
    dw_at, dbias_at = (None if a is None else a.ctypes.data for a in (dw, dbias))
    at = (x.ctypes.data, dy.ctypes.data, dw_at, dbias_at)
    reference.backward_weight(problem, *at, accumulate_w, accumulate_bias)


def poisoned(shape, dtype):
    return np.full(shape, np.nan, dtype)


@every(problem=EACH_DTYPE)
def test_every_direction_is_exact_on_whole_numbers(problem, rng):
    check_exact(reference, problem, rng, native.isas()[:1])


def test_forward_agrees_with_scipy(rng):
    problem = ConvProblem.parse("b2,c3,h9,w8,m4,k3x5,float64")
    x, w = rng.standard_normal(problem.x_shape), rng.standard_normal(problem.w_shape)
    expected = [[correlate(image, filter_, "valid")[0] for filter_ in w] for image in x]
    np.testing.assert_allclose(forward(reference, problem, x, w), expected, rtol=1e-12, atol=1e-12)


def test_sums_are_taken_in_double(rng):
    problem = ConvProblem.parse("b1,c40,h9,w9,m2,k9x9")
    x = rng.standard_normal(problem.x_shape).astype("float32")
    w = rng.standard_normal(problem.w_shape).astype("float32")
    expected = oracle.forward(problem, x, w, None).astype("float32")
    np.testing.assert_allclose(forward(reference, problem, x, w), expected, rtol=1.2e-7)


def test_each_gradient_is_added_on_its_own(rng):
    problem = ConvProblem.parse("b2,c2,h6,w7,m3,k3x3,p1x2,bias")
    x, dy = (integers(rng, shape, "float32") for shape in (problem.x_shape, problem.y_shape))
    dw0, dbias0 = (integers(rng, s, "float32") for s in (problem.w_shape, problem.bias_shape))
    for add_w, add_bias in ((True, False), (False, True)):
        dw, dbias = dw0.copy(), dbias0.copy()
        backward_weight(problem, x, dy, dw, dbias, add_w, add_bias)
        np.testing.assert_array_equal(dw, add_w * dw0 + oracle.backward_weight(problem, x, dy))
        np.testing.assert_array_equal(dbias, add_bias * dbias0 + oracle.backward_bias(problem, dy))


@every(text=PROBLEMS)
def test_gradients_are_the_slopes_of_forward(text, rng):
    """Slopes of sum(dy * y), by central differences along random directions."""
    problem = ConvProblem.parse(f"{text},float64")
    x, w = rng.standard_normal(problem.x_shape), rng.standard_normal(problem.w_shape)
    bias = rng.standard_normal(problem.bias_shape) if problem.bias else None
    dy = rng.standard_normal(problem.y_shape)
    dx = backward_data(problem, w, dy, poisoned(problem.x_shape, "float64"))
    dw, dbias = (poisoned(s, "float64") for s in (problem.w_shape, problem.bias_shape))
    backward_weight(problem, x, dy, dw, dbias)

    def slope(step_x, step_w, step_bias):
        def loss(sign):
            b = None if bias is None else bias + sign * step_bias
            return np.vdot(dy, forward(reference, problem, x + sign * step_x, w + sign * step_w, b))

        return (loss(1e-3) - loss(-1e-3)) / 2e-3

    step = rng.standard_normal(x.shape)
    assert slope(step, 0, 0) == pytest.approx(np.vdot(dx, step), rel=1e-7, abs=1e-8)
    step = rng.standard_normal(w.shape)
    assert slope(0, step, 0) == pytest.approx(np.vdot(dw, step), rel=1e-7, abs=1e-8)
    if problem.bias:
        step = rng.standard_normal(problem.bias_shape)
        assert slope(0, 0, step) == pytest.approx(np.vdot(dbias, step), rel=1e-7, abs=1e-8)


def test_results_do_not_depend_on_threads(rng):
    problem = ConvProblem.parse("b5,c3,h12,w11,m7,k3x3,p1x1,bias")
    x, w, bias, dy = (
        rng.standard_normal(s).astype("float32")
        for s in (problem.x_shape, problem.w_shape, problem.bias_shape, problem.y_shape)
    )
    results = []
    for threads in (1, 2, 3):
        with settings.override(threads=threads):
            dw, dbias = (poisoned(s, "float32") for s in (w.shape, bias.shape))
            backward_weight(problem, x, dy, dw, dbias)
            dx = backward_data(problem, w, dy, poisoned(x.shape, "float32"))
            results.append([forward(reference, problem, x, w, bias), dx, dw, dbias])
    for other in results[1:]:
        for first, second in zip(results[0], other):
            np.testing.assert_array_equal(first, second)


def test_float16_is_rounded_once(rng):
    """Also if rounding to float32 first would land on the wrong side of a tie."""
    problem = ConvProblem.parse("b1,c3,h1,w1,m1,k1,float16")
    x = np.array([1, 2**-11, 2**-24], np.float16).reshape(problem.x_shape)
    w = np.array([1, 1, 2**-13], np.float16).reshape(problem.w_shape)
    assert forward(reference, problem, x, w).item() == np.float16(1 + 2**-10)
    noise = ConvProblem.parse("b2,c9,h9,w9,m4,k5,float16")
    x, w = (
        rng.standard_normal(shape).astype("float16") for shape in (noise.x_shape, noise.w_shape)
    )
    expected = oracle.forward(noise, x, w, None).astype("float16")
    np.testing.assert_array_equal(forward(reference, noise, x, w), expected)


@pytest.mark.parametrize(
    ("text", "bias"), [("b1,c1,h3,w3,m1,k3,bias", None), ("b1,c1,h3,w3,m1,k3", 1)]
)
def test_a_bias_must_be_there_just_when_the_problem_has_one(text, bias):
    with pytest.raises(InvalidProblem, match="bias"):
        reference.forward(ConvProblem.parse(text), 1, 1, bias, 1, False)
