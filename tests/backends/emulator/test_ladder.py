"""Our own CUDA kernels that need no PTX, without a GPU: exact, and with no fault."""

from __future__ import annotations

import numpy as np
import pytest
from harness import forward, inputs

from ece408_op import settings
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.emulator import findings
from ece408_op.backends.emulator.backend import EmulatedBackend
from ece408_op.errors import KernelCompileFailed
from ece408_op.problem import ConvProblem

SMALL = ("b3,c5,h13,w18,m9,k3", "b2,c6,h11,w8,m7,k4,bias")
ONE_CHANNEL = ("b3,c1,h17,w22,m12,k5", "b2,c1,h12,w14,m5,k3")
GENERAL = (
    "b2,c6,h9,w11,m8,k3x2,s2x1,p1x0,d1x2,g2,bias",
    "b3,c4,h10,w7,m6,k5,s3,p2,float16",
    "b1,c2,h5,w6,m3,k3,p1,float64",
)
KERNELS = {
    **dict.fromkeys(("1_naive", "2_constant_weights", "3_shared_tiles", "4_im2col"), SMALL),
    **dict.fromkeys(("5_implicit_gemm", "6_register_tiles", "7_channel_tree"), SMALL),
    **dict.fromkeys(("8_channel_atomics", "9_half"), SMALL),
    **dict.fromkeys(("12_one_channel", "13_column_pairs", "15_winograd"), ONE_CHANNEL),
    "general": GENERAL,
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


@pytest.mark.parametrize("name", KERNELS)
def test_a_forward_kernel_is_exact_and_has_no_fault(name, rng):
    backend = EmulatedBackend(name)
    for text in KERNELS[name]:
        problem = ConvProblem.parse(text)
        x, w, bias = inputs(problem, rng)
        found = forward(backend, problem, x, w, bias)
        expected = forward(ReferenceBackend(), problem, x, w, bias)
        assert (found == expected).all(), text
        onto = forward(backend, problem, x, w, bias, onto=expected)
        assert (onto == 2 * expected).all(), text
        assert _faults(backend, problem) == [], text


def _gradients(backend, problem, x, w, dy):
    """dx, dw and, if there is a bias, its gradient, onto NaN."""
    shapes = (problem.x_shape, problem.w_shape, problem.bias_shape)
    dx, dw, db = (np.full(shape, np.nan, problem.dtype) for shape in shapes)
    px, pw, pdy, pdx, pdw, pdb = (each.ctypes.data for each in (x, w, dy, dx, dw, db))
    backend.backward_data(problem, pw, pdy, pdx, False)
    backend.backward_weight(problem, px, pdy, pdw, pdb if problem.bias else None, False, False)
    return (dx, dw, db) if problem.bias else (dx, dw)


def test_gradients_are_exact_and_have_no_fault(rng):
    backend = EmulatedBackend("general")
    for text in GENERAL[:2]:
        problem = ConvProblem.parse(text)
        x, w, _ = inputs(problem, rng)
        dy = rng.integers(-4, 5, problem.y_shape).astype(problem.dtype)
        found = _gradients(backend, problem, x, w, dy)
        for mine, theirs in zip(found, _gradients(ReferenceBackend(), problem, x, w, dy)):
            assert (mine == theirs).all(), text
    assert findings.take() == []


def test_ptx_is_refused_with_its_line(rng):
    problem = ConvProblem.parse("b1,c4,h9,w9,m8,k3")
    backend = EmulatedBackend("10_tf32")
    with pytest.raises(KernelCompileFailed, match=r"10_tf32.cu:\d+: PTX \(asm\) cannot run"):
        backend.prepare(problem, "forward")
