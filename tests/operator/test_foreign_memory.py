"""Parameters in memory that is not MXNet's own: its owner writes to it, or it is read-only."""

import numpy as np
import pytest
from gluon_nets import with_parameters_of

import ece408_op
from ece408_op.operator import native_handles

CHANNELS = 64  # 3x3 weights larger than is compared, or cached


def from_numpy(mx, values):
    return mx.nd.from_numpy(values[:])  # a view, so that the owner's array stays writable


def from_dlpack(mx, values):
    return mx.nd.from_dlpack(values.__dlpack__())


def a_slice(mx, values):
    whole = np.zeros((3, *values.shape), np.float32)
    whole[1] = values
    return mx.nd.from_numpy(whole)[1]


def reshaped(mx, values):
    return mx.nd.from_numpy(values.reshape(-1)).reshape(values.shape).detach()


def in_shared_memory(mx, values):
    return mx.nd.array(values, ctx=mx.Context("cpu_shared", 0))


@pytest.mark.parametrize("make", [from_numpy, from_dlpack, a_slice, reshaped, in_shared_memory])
def test_foreign_memory_is_known(mx, make):
    assert native_handles.is_foreign(make(mx, np.ones((4, 3), np.float32)))


@pytest.mark.parametrize(
    "own", [lambda a: a, lambda a: a[1], lambda a: a.reshape((-1,)), lambda a: a * 1]
)
def test_mxnets_memory_is_known(mx, own):
    array = own(mx.nd.ones((2, 3)))
    assert not native_handles.is_foreign(array)
    array[:] = 3
    assert not native_handles.is_foreign(array)


def make_net(mx, channels, parts):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(channels, 3, in_channels=3), nn.BatchNorm(in_channels=channels))
        net.add(*[nn.HybridLambda("arctan") for _ in range(parts - 1)])
        net.add(nn.Conv2D(CHANNELS, 3, in_channels=channels))
    mx.random.seed(3)
    net.initialize(mx.init.Uniform(0.5))
    return net


def expect(mx, found, net, x):
    """Return the result of MXNet's own convolution on copies of a net's parameters."""
    plain = make_net(mx, net[0].weight.shape[0], len(net) - 2)
    expected = with_parameters_of(net, plain)(x).asnumpy()
    np.testing.assert_allclose(found.asnumpy(), expected, atol=1e-4 * np.abs(expected).max())


def several_times(net, x):
    for _ in range(4):
        found = net(x)
    return found


@pytest.fixture
def x(mx, rng):
    return mx.nd.array(rng.uniform(-1, 1, (1, 3, 9, 9)))


@pytest.mark.parametrize("make", [from_numpy, from_dlpack])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("channels", [8, CHANNELS])
@pytest.mark.parametrize("which", ["0.weight", "0.bias", "1.gamma", "1.running_var", "-1.weight"])
def test_what_the_owner_writes_is_followed(mx, x, rng, make, parts, channels, which):
    net = make_net(mx, channels, parts)
    ece408_op.swap(net)
    net.hybridize()
    several_times(net, x)  # caches of the earlier arrays are not used for them
    layer, name = which.split(".")
    parameter = getattr(net[int(layer) % len(net)], name)
    values = rng.uniform(0.5, 1, parameter.shape).astype(np.float32)
    parameter._data[0] = make(mx, values)
    for factor in (1, 2, -3):
        values *= abs(factor) if name == "running_var" else factor
        expect(mx, several_times(net, x), net, x)
    # MXNet writes to it as well, and counts the write.
    parameter.data()[:] = 1
    expect(mx, several_times(net, x), net, x)
    values *= 2
    expect(mx, several_times(net, x), net, x)


@pytest.mark.parametrize("trains", [False, True])
def test_what_the_owner_writes_is_followed_by_executors(mx, x, rng, trains):
    values = rng.uniform(-1, 1, (16, 3, 3, 3)).astype(np.float32)
    w = mx.nd.from_numpy(values[:])
    executor = bound(mx, x, w, trains)
    smaller = executor.reshape(x=(1, 3, 7, 7), partial_shaping=True)
    for _ in range(3):
        for each, given in ((executor, x), (smaller, x[:, :, :7, :7])):
            found = each.forward(is_train=False, x=given)[0].asnumpy()
            expected = convolved(mx, given, values.copy())
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
        values *= 2


def bound(mx, x, w, trains):
    symbol = convolution(mx.sym.Variable("x"), mx.sym.Variable("w"))
    gradients = {"x": mx.nd.zeros_like(x)} if trains else None
    request = {"x": "write", "w": "null"} if trains else "null"
    return symbol.bind(mx.cpu(), {"x": x.copy(), "w": w}, args_grad=gradients, grad_req=request)


def convolution(x, w):
    return ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)


def convolved(mx, x, values):
    return mx.nd.Convolution(
        x, mx.nd.array(values), kernel=(3, 3), num_filter=16, no_bias=True
    ).asnumpy()


READ_ONLY = """
import os
import numpy as np
import ece408_op, mxnet as mx

path = os.environ["WEIGHTS"]
np.save(path, np.ones((8, 3, 3, 3), np.float32))
x = mx.nd.ones((1, 3, 9, 9))
keywords = {"kernel": (3, 3), "num_filter": 8, "no_bias": True}

def imperative(w):
    return [ece408_op.Convolution(x, w, **keywords)]

def block(w):
    net = mx.gluon.nn.Conv2D(8, 3, in_channels=3, use_bias=False)
    net.initialize()
    ece408_op.swap(net)
    net.weight._data[0] = w
    net.hybridize()
    return [net(x) for _ in range(12)]

def executor(w, trains=False):
    symbol = ece408_op.Convolution(mx.sym.Variable("x"), mx.sym.Variable("w"), **keywords)
    executor = symbol.bind(
        mx.cpu(), {"x": x, "w": w}, args_grad={"x": x * 0} if trains else None,
        grad_req={"x": "write", "w": "null"} if trains else "null",
    )
    found = [executor.forward(is_train=trains)[0].copy()]
    if trains:
        executor.backward(mx.nd.ones(found[0].shape))
    return [*found, executor.forward(is_train=False)[0]]

def train(w):
    return executor(w, trains=True)

for way in (block, train, imperative, executor):
    found = way(mx.nd.from_numpy(np.load(path, mmap_mode="r")))
    assert all((each.asnumpy() == 27).all() for each in found)
    print(way.__name__)
"""


def test_memory_that_nobody_may_write(run_python, tmp_path):
    result = run_python(READ_ONLY, WEIGHTS=str(tmp_path / "w.npy"))
    assert result.stdout.split() == ["block", "train", "imperative", "executor"], result.stderr


@pytest.mark.parametrize("way", ["to_gpu", "block", "executor"])
@pytest.mark.parametrize("channels", [8, 2 * CHANNELS])
def test_what_the_owner_writes_reaches_the_gpu(mx, emulated, way, channels):
    x = mx.nd.ones((2, channels, 5, 5))
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(channels, 3, in_channels=channels, use_bias=False))
    net.initialize(mx.init.One())
    values = np.ones((channels, channels, 3, 3), np.float32)
    w = mx.nd.from_numpy(values[:])
    net[0].weight._data[0] = w
    run = on_gpu(mx, net, x, w, way)
    for factor in (1, 2, 3):
        values[:] = factor
        assert (run() == factor * 9 * channels).all()
    w += 1  # which MXNet counts
    assert (run() == 4 * 9 * channels).all()
    values[:] = 5
    assert (run() == 5 * 9 * channels).all()


def on_gpu(mx, net, x, w, way):
    if way == "to_gpu":
        ready = ece408_op.to_gpu(net, x)
        return lambda: ready(x).asnumpy()
    if way == "block":
        net.optimize_for(x, backend="ece408")
        net.hybridize(static_alloc=True, static_shape=True)
        return lambda: net(x).asnumpy()
    symbol = net(mx.sym.Variable("x")).optimize_for("ece408")
    names = symbol.list_arguments()
    executor = symbol.bind(mx.cpu(), {name: x if name == "x" else w for name in names})
    return lambda: executor.forward(is_train=False)[0].asnumpy()
