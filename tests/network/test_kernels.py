"""Convolution kernels in networks: they change results in the epilogue, and leave gaps between
images."""

import dataclasses

import numpy as np
import pytest
from harness import forward, inputs
from one_plan import on_gpu

from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.usefixtures("emulated")

PROBLEMS = {
    "12_one_channel": "b2,c1,h9,w11,m3,k3,bias",
    "13_column_pairs": "b2,c1,h8,w10,m3,k3,bias",
    "15_winograd": "b2,c1,h9,w12,m3,k3,bias",
    "6_register_tiles": "b2,c3,h9,w11,m5,k3,bias",
    "depthwise": "b2,c3,h9,w36,m3,k3,p1x1,g3,bias",
    "general": "b2,c4,h9,w11,m6,k3,s2x2,p1x1,g2,bias",
}
# Values that differ each time.
HALVED = "{const float t=v<0.f?0.f:v;v=t*0.5f;}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_changed_once_and_may_lie_apart(name, rng):
    problem, kernel = ConvProblem.parse(PROBLEMS[name]), catalog.get(name)
    assert kernel.family.activates(True)
    x, w, bias = inputs(problem, rng)
    sums = forward(ReferenceBackend(), problem, x, w, bias)
    for accumulate in (False, True):
        image = sums[0].size + (4 * sums[0, 0].size if kernel.family.spaced else 0)
        y = rng.integers(-9, 10, (problem.batch, image)).astype(np.float32)
        plan = kernel.plan(problem, (7, 5), accumulate)
        defines = (*plan.defines, ("OUT_IMAGE", f"{image}u"), ("ACTIVATE(v)", HALVED))
        plan = dataclasses.replace(plan, defines=defines)
        found = on_gpu(plan, {"x": x, "w": w, "bias": bias, "y": y})["y"]
        before = y[:, : sums[0].size].reshape(sums.shape) if accumulate else 0
        expected = np.maximum(sums + before, 0) / 2
        assert (found[:, : sums[0].size].reshape(sums.shape) == expected).all()
        assert (found[:, sums[0].size :] == y[:, sums[0].size :]).all()


def test_kernels_that_cannot_change_results_say_so():
    for name, accumulate, can in (
        *(("8_channel_atomics", False, False), ("16_copy_engine", True, False)),
        *(("16_copy_engine", False, True), ("18_split_half", True, True)),
        ("implicit_gemm_prepacked", True, True),
    ):
        assert catalog.get(name).family.activates(accumulate) == can
