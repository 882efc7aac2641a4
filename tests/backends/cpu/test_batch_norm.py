"""Batch normalisation and its gradients, against float64."""

import ctypes

import numpy as np
import pytest

from ece408_op.backends.cpu import native

SHAPES = [(1, 1, 1), (2, 3, 49), (3, 5, 196), (1, 2, 4096 + 17), (2, 7, 300), (16, 2, 3)]
EPSILON = 1e-5


class _Batch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("images", "channels", "pixels")],
        ("epsilon", ctypes.c_double),
        ("is_relu", ctypes.c_int),
    ]


def _run(name, batch, arrays, threads, isa):
    addresses = [None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
    function = getattr(native.library(), name)
    assert function(ctypes.byref(batch), *addresses, threads, native.ISA_CODES[isa]) == 0


def _ours(values, is_relu, threads, isa):
    """Return y, mean, inverse deviation, then the gradients for x, the addend, gamma and beta."""
    x, added, gamma, beta, dy = values
    batch = _Batch(*x.shape, EPSILON, is_relu)
    channels = x.shape[1]
    y, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    dadded = None if added is None else np.full_like(x, np.nan)
    mean, inverse, dgamma, dbeta = np.full((4, channels), np.nan, np.float32)
    forward = (x, added, gamma, beta, y, mean, inverse)
    _run("ece408_batch_norm_forward", batch, forward, threads, isa)
    backward = (x, y, dy, gamma, mean, inverse, dx, dadded, dgamma, dbeta)
    _run("ece408_batch_norm_backward", batch, backward, threads, isa)
    return [y, mean, inverse, dx, dadded, dgamma, dbeta]


def _exact(values, is_relu):
    x, added, gamma, beta, dy = (None if a is None else a.astype(np.float64) for a in values)
    gamma = np.ones(x.shape[1]) if gamma is None else gamma
    axes, each = (0, 2), (None, slice(None), None)
    mean, variance = x.mean(axes), x.var(axes)
    inverse = 1 / np.sqrt(variance + EPSILON)
    normal = (x - mean[each]) * inverse[each]
    y = normal * gamma[each] + beta[each] + (0 if added is None else added)
    if is_relu:
        dy = np.where(y > 0, dy, 0)
        y = np.maximum(y, 0)
    dbeta, dgamma = dy.sum(axes), (dy * normal).sum(axes)
    count = x.size / x.shape[1]
    dx = dy - dbeta[each] / count - normal * dgamma[each] / count
    dx *= gamma[each] * inverse[each]
    return [y, mean, inverse, dx, None if added is None else dy, dgamma, dbeta]


def _values(rng, shape, adds, scaled, offset=0.0):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x = normal(*shape) + np.float32(offset)
    added = normal(*shape) if adds else None
    return x, added, normal(shape[1]) if scaled else None, normal(shape[1]), normal(*shape)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_relu", [False, True])
def test_results_are_those_of_float64(rng, isa, adds, is_relu):
    for shape in SHAPES:
        values = _values(rng, shape, adds, scaled=not adds)
        found, exact = _ours(values, is_relu, 2, isa), _exact(values, is_relu)
        # The terms of a gradient for x may cancel.
        terms = np.abs(exact[2]).max() * np.abs(values[-1]).max()
        for number, array in enumerate(exact):
            if array is not None:
                scale = max(np.abs(array).max(), 1e-2, terms if number == 3 else 0)
                np.testing.assert_allclose(found[number], array, rtol=0, atol=3e-6 * scale)


@pytest.mark.parametrize("isa", native.isas())
def test_a_deviation_that_is_small_beside_the_mean(rng, isa):
    values = _values(rng, (4, 3, 1000), False, True, offset=1000.0)
    found, exact = _ours(values, False, 2, isa), _exact(values, False)
    # The mean is rounded to a float, which shifts normalised values by 3e-5.
    for number, tolerance in ((1, 1e-7), (2, 1e-5), (0, 2e-4)):
        np.testing.assert_allclose(found[number], exact[number], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("isa", native.isas())
def test_no_result_depends_on_the_number_of_threads(rng, isa):
    values = _values(rng, (3, 9, 333), True, True)
    one, many = (_ours(values, True, threads, isa) for threads in (1, 5))
    for a, b in zip(one, many):
        np.testing.assert_array_equal(a, b)
