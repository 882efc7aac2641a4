"""The operator in many calls, on many threads, and across forks."""

import time

import numpy as np
import pytest
from cases import first
from programs import together

import ece408_op
from ece408_op import errors
from ece408_op.errors import InvalidProblem
from ece408_op.operator import compiled_operator
from ece408_op.operator.conv_attributes import ConvAttributes
from ece408_op.operator.python_operator import ConvolutionProp

ATTRIBUTES = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
TOO_LARGE = ConvAttributes((9, 9), 4, no_bias=True)


def _status(name):
    """Return a number from /proc/self/status: VmRSS in KiB, or Threads."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:"))


@pytest.mark.slow
def test_ten_thousand_calls_without_growth(mx):
    # Failed calls must not leak, either.
    symbol = ece408_op.Convolution(mx.sym.Variable("x"), **{**ATTRIBUTES, "kernel": (9, 9)})
    for _ in range(10):
        with pytest.raises(InvalidProblem), errors.surfaced():
            symbol.simple_bind(mx.cpu(), grad_req="null", x=(1, 3, 8, 8))
        with pytest.raises(mx.MXNetError):
            compiled_operator.call(
                mx, TOO_LARGE, [mx.nd.ones((1, 3, 8, 8)), mx.nd.ones((4, 3, 9, 9))]
            )
    x, w = mx.nd.ones((1, 3, 8, 8)), mx.nd.ones((4, 3, 3, 3))

    def call(times):
        for _ in range(times):
            ece408_op.Convolution(x, w, **ATTRIBUTES).wait_to_read()

    # MXNet's own Convolution also grows by some megabytes during its first thousands of calls.
    call(5000)
    threads, grown = _status("Threads"), []
    # A leak grows each time; the allocator may grow once more.
    for _ in range(3):
        memory = _status("VmRSS")
        call(10000)
        grown.append(_status("VmRSS") - memory)
        # Room for the allocator; 10000 leaked outputs alone would be 5760 KiB.
        if grown[-1] <= 4096:
            break
    else:
        pytest.fail(f"three times 10000 calls took {grown} KiB more")
    # MXNet makes another thread whenever all are busy, which on a loaded machine is a few times.
    assert _status("Threads") <= threads + 8


def test_eight_threads_at_once(mx, rng):
    inputs = [
        (rng.integers(-3, 4, (2, 3, 9 + i, 8)), rng.integers(-3, 4, (4, 3, 3, 3))) for i in range(8)
    ]
    expected = [
        mx.nd.Convolution(mx.nd.array(x), mx.nd.array(w), **ATTRIBUTES).asnumpy() for x, w in inputs
    ]

    def work(i):
        for _ in range(50):
            x, w = (mx.nd.array(array) for array in inputs[i])
            y = ece408_op.Convolution(x, w, **ATTRIBUTES)
            np.testing.assert_array_equal(y.asnumpy(), expected[i])

    together(work, range(8))


FORKING = """
import os, sys
import ece408_op, mxnet as mx, numpy as np
x, w = mx.nd.ones((64, 8, 40, 40)), mx.nd.ones((16, 8, 3, 3))

def convolve(x, backend="reference"):  # slow: it is still at work when the fork comes
    return ece408_op.Convolution(
        x, w, kernel=(3, 3), num_filter=16, no_bias=True, backend=backend
    )
"""

DATA_LOADER = """
class Images(mx.gluon.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return np.full((8, 40, 40), i, dtype=np.float32)

for _ in range(2):
    pending = [convolve(x) for _ in range(3)]          # in flight while the workers are forked
    loader = mx.gluon.data.DataLoader(Images(), batch_size=4, num_workers=2)
    sums = [float(convolve(batch, "cpu").max().asscalar()) for batch in loader]
    assert sums == [72.0 * 3, 72.0 * 7, 72.0 * 11], sums
    assert all(float(y.min().asscalar()) == 72 for y in pending)
print("ok")
"""

CHILD = """
os.environ["ECE408_THREADS"] = "3"
pending = [convolve(x) for _ in range(3)]
child = os.fork()
if child == 0:
    from ece408_op import settings
    from ece408_op.backends.cpu.cpu_backend import CpuBackend
    from ece408_op.problem import ConvProblem
    problem = ConvProblem.parse("b4,c8,h40,w40,m32,k3")
    arrays = [np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape)]
    y = np.empty(problem.y_shape, np.float32)
    CpuBackend().forward(problem, *(a.ctypes.data for a in arrays), None, y.ctypes.data, False)
    os._exit(0 if settings.threads() > 1 and (y == 72).all() else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert all(float(y.min().asscalar()) == 72 for y in pending)
print("ok")
"""


@pytest.mark.parametrize("code", first(1, [DATA_LOADER, CHILD]), ids=["data_loader", "child"])
def test_forks_while_an_operator_is_in_flight(run_python, code):
    result = run_python(FORKING + code)
    assert (result.stdout, result.returncode) == ("ok\n", 0), result.stderr


def test_threads_that_use_one_symbol_take_turns(mx, monkeypatch):
    """MXNet stores the output shapes of a Python operator's node in one place."""
    inside, counts = [], []
    infer_shape = ConvolutionProp.infer_shape

    def noted(self, in_shape):
        inside.append(self)
        counts.append(len(inside))
        time.sleep(0.01)
        inside.remove(self)
        return infer_shape(self, in_shape)

    monkeypatch.setattr(ConvolutionProp, "infer_shape", noted)
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4)
    x = mx.nd.ones((2, 3, 8, 8))

    def work(number):
        symbol.infer_shape(data=x.shape)
        symbol.simple_bind(mx.cpu(), data=x.shape).forward()
        block = mx.gluon.SymbolBlock(symbol, mx.sym.Variable("data"))
        block.initialize()
        block.hybridize()
        block(x).wait_to_read()

    together(work, range(4))
    assert set(counts) == {1}
