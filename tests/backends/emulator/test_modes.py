"""A process that checks kernels, counts them, and runs them at full speed."""

import pytest

from ece408_op.backends.emulator.library import MODES

PROGRAM = """
import numpy as np
from ece408_op.backends.emulator import counts, findings
from ece408_op.backends.emulator.emulator_backend import EmulatedBackend
from ece408_op.backends.emulator.library import Emulation
from ece408_op.problem import ConvProblem

problem = ConvProblem.parse("b2,c2,h9,w9,m2,k3")
x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))
for mode in {order}:
    y = np.zeros(problem.y_shape, np.float32)
    arrays = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
    EmulatedBackend("2_constant_weights", Emulation(mode)).forward(problem, *arrays, False)
    assert (y == 18).all(), mode
    assert findings.take() == [], mode
    assert bool(counts.take()["counts"]) == (mode == "counted")
"""


# In a separate process: the first mode determines the memory layout. Each follows each other.
@pytest.mark.parametrize("first", range(len(MODES)))
def test_modes_follow_each_other_in_any_order(run_python, kept, first):
    a, b, c = [*MODES, *MODES][first : first + 3]
    result = run_python(PROGRAM.format(order=(a, a, b, c, a, c, b, a)), ECE408_CACHE=str(kept))
    assert result.returncode == 0, result.stderr
