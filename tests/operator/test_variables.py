"""The environment variables that MXNet reads."""

import pytest
from cases import first

BIND = """
import ece408_op, mxnet as mx

before = dict(os.environ)
y = ece408_op.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=1)
y.simple_bind(mx.cpu(), x=(1, 1, 5, 5), group2ctx={"there": mx.cpu(1)})
print([(name, before.get(name), value) for name, value in os.environ.items()
       if value != before.get(name)])
"""


STARTS = [
    ("os.environ.pop('NNVM_EXEC_MATCH_RANGE', None)", ""),
    ("os.environ['NNVM_EXEC_MATCH_RANGE'] = '8'", "8"),
]


@pytest.mark.parametrize(("start", "value"), first(1, STARTS))
def test_no_variable_is_added_once_mxnet_may_compute(run_python, start, value):
    """A new variable may move the environment, which MXNet's threads read in every operator."""
    result = run_python(f"import os\n{start}\n{BIND}")
    assert result.stdout == f"[('NNVM_EXEC_MATCH_RANGE', '{value}', '0')]\n", result.stderr


SIDE_BY_SIDE = """
import contextlib, itertools, os, threading
os.environ.update(ECE408_DEVICES="0,1", ECE408_BACKEND="emulator")
import ece408_op, mxnet as mx
from ece408_op.network.gpu_training import GpuTrainingProgram
from ece408_op.network.machines.emulated import EmulatedMachine

both, calls = threading.Barrier(2, timeout=20), itertools.count()
EmulatedMachine.active = lambda self: contextlib.nullcontext()
EmulatedMachine.load = lambda self, plans: [None] * len(plans)
EmulatedMachine.allocate = lambda self, nbytes: 0

def forward(*_):
    if next(calls) > 1:
        both.wait()

GpuTrainingProgram.forward = forward
contexts = [mx.cpu(0), mx.cpu(1)]
net = mx.gluon.nn.Dense(3)
net.initialize(ctx=contexts)
net.hybridize(backend="ece408")
for _ in range(2):
    with mx.autograd.record():
        results = [net(mx.nd.ones((2, 4), ctx=context)) for context in contexts]
    mx.nd.waitall()
print(next(calls))
"""


def test_contexts_compute_at_the_same_time(run_python):
    result = run_python(SIDE_BY_SIDE)
    assert result.stdout == "4\n", result.stderr
