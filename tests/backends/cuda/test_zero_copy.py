"""Arrays already on the GPU: work prepared once runs on any of them."""

import numpy as np
from fake_gpu import FakeGpu, FakeLane, FakeLoaded
from harness import inputs

from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda import work, zero_copy
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c3,h9,w7,m4,k3")


def test_work_is_got_ready_once_for_many_arrays(rng, monkeypatch):
    asked = work.forward(PROBLEM, 0, 0, None, 0, False, "1_naive")
    loaded = [FakeLoaded(plan, PROBLEM, "forward", False) for plan in asked.plans(FakeGpu(), 2)]
    ready = zero_copy.Ready(loaded, FakeLane(FakeGpu(), 0, 0))
    x, w, _ = inputs(PROBLEM, rng)
    expected, *found = np.empty((4, *PROBLEM.y_shape), np.float32)
    ReferenceBackend().forward(
        PROBLEM, x.ctypes.data, w.ctypes.data, None, expected.ctypes.data, False
    )
    others = [-x, x, 2 * x]
    for array, y in zip(others, found):
        ready.begin({"x": array.ctypes.data, "w": w.ctypes.data, "y": y.ctypes.data})
    assert all(np.array_equal(y, n * expected) for y, n in zip(found, (-1, 1, 2)))
    monkeypatch.setattr(FakeLane, "seconds", lambda self, first, last: 0.25, raising=False)
    done = ready({"x": x.ctypes.data, "w": w.ctypes.data, "y": found[0].ctypes.data})
    assert np.array_equal(found[0], expected)
    assert (done.kernel, done.gpu.kernel_seconds) == ("1_naive", 0.25)
