"""Packed weights that the compiled operator caches between calls: every change is noticed."""

import ctypes

import numpy as np
import pytest
from gluon_nets import changes, with_parameters_of

import ece408_op
from ece408_op.backends.cpu import native
from ece408_op.operator import array_memory, compiled_operator

SHAPE = (2, 8, 18, 16)
# 1x1 with and without a stride, windows of stride 1, of stride 2, and in groups.
LAYERS = (
    {"channels": 24, "kernel_size": 1, "in_channels": 8},
    {"channels": 40, "kernel_size": 3, "in_channels": 24, "padding": 1},
    {"channels": 40, "kernel_size": 3, "in_channels": 40, "padding": 1, "strides": 2},
    {"channels": 40, "kernel_size": 5, "in_channels": 40, "padding": 2, "use_bias": False},
    {"channels": 36, "kernel_size": 1, "in_channels": 40, "strides": 2},
    {"channels": 36, "kernel_size": 3, "in_channels": 36, "padding": 1, "groups": 4},
)
FLAGS = ({}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True})


@pytest.fixture(autouse=True)
def _operator_is_there(mx):
    assert compiled_operator.missing() is None


def make_net(mx, seed=1):
    mx.random.seed(seed)
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    for layer in LAYERS:
        net.add(mx.gluon.nn.Conv2D(**layer, bias_initializer=mx.init.Uniform(1)))
    net.initialize(mx.init.Xavier(magnitude=3))
    return net


def of_mxnet(mx, net, x):
    """Return the result of MXNet's own convolutions on x with the net's parameters."""
    return with_parameters_of(net, make_net(mx))(x).asnumpy()


def expect(found, expected):
    np.testing.assert_allclose(
        found.asnumpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )


@pytest.fixture
def x(mx, rng):
    return mx.nd.array(rng.uniform(-1, 1, SHAPE))


@pytest.mark.parametrize("flags", FLAGS)
def test_changes_of_a_block_are_noticed(mx, x, flags, tmp_path):
    net = make_net(mx)
    ece408_op.swap(net)
    net.hybridize(**flags)
    for _ in range(3):
        expect(net(x), of_mxnet(mx, net, x))

    def of_bias():
        net[1].bias.data()[:] += 1

    for change in [of_bias, *changes(mx, net, make_net, SHAPE, tmp_path / "other.params")]:
        before = net(x).asnumpy()
        change()
        found = net(x)
        assert not np.allclose(found.asnumpy(), before, rtol=1e-4), change.__name__
        expect(found, of_mxnet(mx, net, x))
        expect(net(x), of_mxnet(mx, net, x))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("moves", [False, True])
def test_weights_made_anew_are_noticed(mx, x, flags, moves):
    """MXNet allocates memory for new weights when it writes them, possibly that of freed ones.
    Memory is also freed when MXNet's own convolution converts weights to another layout."""
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(96, 5, in_channels=8, use_bias=False))
    ece408_op.swap(net)
    net.hybridize(**flags)
    weight = net[0].weight
    for seed in range(60):
        mx.random.seed(seed)
        net.initialize(mx.init.Uniform(1), force_reinit=True)
        found = net(x)
        if moves:
            _of_mxnet(mx, x, weight.data())
        expect(found, _of_mxnet(mx, x, weight.data().copy()))


def _of_mxnet(mx, x, w):
    return mx.nd.Convolution(x, w, kernel=(5, 5), num_filter=96, no_bias=True).asnumpy()


def _convolution(x, w, **more):
    return ece408_op.Convolution(x, w, kernel=(1, 1), num_filter=16, no_bias=True, **more)


def _expected(mx, x, w):
    # Of a copy: MXNet may convert these weights to a layout of its own.
    return mx.nd.Convolution(x, w.copy(), kernel=(1, 1), num_filter=16, no_bias=True).asnumpy()


@pytest.fixture
def draw(mx, rng):
    return lambda: mx.nd.array(rng.uniform(-1, 1, (16, 8, 1, 1)))


def _block(mx, flags, of):
    """Return a hybridized block without parameters: its weights are inputs."""

    class Block(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, x, w):
            return _convolution(x, of(F, w))

    block = Block()
    block.hybridize(**flags)
    return block


@pytest.mark.parametrize("flags", FLAGS)
def test_other_weights_in_their_place_are_noticed(mx, x, draw, flags):
    """Each array is freed when the next one is made, at the same address and with as many
    writes."""
    block = _block(mx, flags, lambda F, w: w)
    addresses, again = set(), 0
    for _ in range(500):
        w = draw()
        again += array_memory.pointer(w) in addresses
        addresses.add(array_memory.pointer(w))
        expect(block(x, w), _expected(mx, x, w))
        del w
        mx.nd.waitall()
        if again == 10:
            return
    pytest.fail("no array came to lie in another one's place")


@pytest.mark.parametrize("flags", FLAGS)
def test_weights_that_are_computed_are_noticed(mx, x, draw, flags):
    block = _block(mx, flags, lambda F, w: F.sin(w))
    for _ in range(8):
        w = draw()
        expect(block(x, w), _expected(mx, x, mx.nd.sin(w)))


def _executor(mx, x, w):
    symbol = _convolution(mx.sym.Variable("x"), mx.sym.Variable("w"))
    return symbol.bind(mx.cpu(), {"x": x, "w": w}, grad_req="null")


def test_changes_in_executors_are_noticed(mx, x, draw):
    w = draw()
    executor = _executor(mx, x, w)
    for _ in range(3):
        expect(executor.forward()[0], _expected(mx, x, w))
        w[:] = draw()
        expect(executor.forward()[0], _expected(mx, x, w))
        executor.copy_params_from({"w": draw()})
        expect(executor.forward()[0], _expected(mx, x, w))


def test_executors_of_one_graph_have_weights_of_their_own(mx, x, draw):
    w = draw()
    executor = _executor(mx, x, w)
    expected = _expected(mx, x, w)
    expect(executor.forward()[0], expected)
    reshaped = executor.reshape(x=(1, *SHAPE[1:]))
    first, second = x.copy(), x[1:].copy()  # which share their memory in the executors
    for _ in range(2):
        expect(reshaped.forward(x=second)[0], _expected(mx, second, w))
        expect(executor.forward(x=first)[0], expected)
    for _ in range(8):
        w = draw()
        executor = _executor(mx, x, w)
        expect(executor.forward()[0], _expected(mx, x, w))


def test_weights_are_packed_once(mx, x, rng):
    """Writes without MXNet's knowledge are noticed when it next counts a write."""
    net = mx.gluon.nn.Conv2D(16, 1, in_channels=8)
    net.initialize(mx.init.Xavier())
    ece408_op.swap(net)
    net.hybridize()
    before = net(x).asnumpy()
    w = net.weight.data()
    ctypes.memset(array_memory.pointer(w), 0, w.size * 4)
    np.testing.assert_array_equal(net(x).asnumpy(), before)
    w[:] = w * 1
    assert not net(x).asnumpy().any()


# Weights in shared memory are not kept.
SHARED = """
import ctypes
import ece408_op
from ece408_op.backends.cpu import native
import mxnet as mx
from ece408_op.operator import array_memory

class Block(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x, w):
        return ece408_op.Convolution(x, w, kernel=(1, 1), num_filter=16, no_bias=True)

block = Block()
block.hybridize()
x, w = mx.nd.ones((1, 8, 9, 9)), mx.nd.ones((16, 8, 1, 1))
assert (block(x, w).asnumpy() == 8).all()
given = mx.nd.from_dlpack(w.to_dlpack_for_write())
ctypes.memset(array_memory.pointer(given), 0, given.size * 4)
assert not block(x, w).asnumpy().any()
"""


# The first network of a process comes back to a precision.
FIRST = """
import ece408_op
import mxnet as mx

net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(32, 3), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Conv2D(64, 3))
net.initialize()
x = mx.nd.ones((2, 3, 9, 9))
net(x).wait_to_read()
net = ece408_op.to_cpu(net, x)
for precision in ("float32", "strict", "float32"):
    with ece408_op.settings.override(precision=precision):
        net(x).wait_to_read()
"""


@pytest.mark.parametrize("code", [SHARED, FIRST], ids=["shared memory", "first network"])
def test_in_a_process_of_its_own(run_python, code):
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_layers_that_keep_their_weights_have_kernels_for_that(mx, rng):
    net = mx.gluon.nn.Conv2D(128, 3, padding=1, in_channels=128)
    net.initialize()
    ece408_op.swap(net)
    x = mx.nd.array(rng.uniform(-1, 1, (1, 128, 7, 7)))
    with ece408_op.op_times() as log:
        net(x).wait_to_read()
        net.hybridize()
        net(x).wait_to_read()
    isa, problem = native.isas()[0], log[0].problem
    kernels = [native.choose(problem, "forward", isa, kept=kept) for kept in (False, True)]
    assert [entry.kernel for entry in log] == [f"{kernel}_{isa}" for kernel in kernels]
    assert isa == "baseline" or len(set(kernels)) == 2
