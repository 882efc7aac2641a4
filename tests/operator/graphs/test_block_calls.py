"""Hybridized blocks with repeated calls, beside the same block run layer by layer."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import Ece408Error

SHAPE = (2, 3, 9, 8)
FLAGS = ({}, {"static_alloc": True, "static_shape": True})


@pytest.fixture
def nets(mx):
    """Return a block of two inputs and two outputs, and one that shares its parameters."""

    class Net(mx.gluon.HybridBlock):
        def __init__(self, **keywords):
            super().__init__(**keywords)
            with self.name_scope():
                self.norm = mx.gluon.nn.BatchNorm(in_channels=8)
                self.conv = mx.gluon.nn.Conv2D(8, 3, padding=1, in_channels=3)

        def hybrid_forward(self, F, x, scale):
            y = self.norm(self.conv(x))
            return F.broadcast_mul(y, scale), F.relu(y)

    mx.random.seed(3)
    net = Net(prefix="net_")
    net.initialize(mx.init.Uniform(1))
    beside = Net(prefix="net_", params=net.collect_params())
    ece408_op.swap(net)
    return net, beside


@pytest.fixture
def data(mx, rng):
    def make(shape=SHAPE):
        return mx.nd.array(rng.normal(size=shape)), mx.nd.array(rng.normal(size=(1, 8, 1, 1)))

    return make


@pytest.fixture
def asked(mx, monkeypatch):
    """Return names of the parameters whose array Gluon has requested."""
    names = []
    plain = mx.gluon.Parameter.data

    def counting(self, ctx=None):
        names.append(self.name)
        return plain(self, ctx)

    monkeypatch.setattr(mx.gluon.Parameter, "data", counting)
    return names


def agree(nets, data):
    net, beside = nets
    for found, expected in zip(net(*data), beside(*data)):
        np.testing.assert_allclose(found.asnumpy(), expected.asnumpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_call_that_repeats_the_last_one_asks_no_parameter(nets, data, asked, flags):
    nets[0].hybridize(**flags)
    for _ in range(2):  # the first call makes the graph
        agree(nets, data())
    for _ in range(3):
        given = data()
        del asked[:]
        nets[0](*given)
        assert asked == []
        agree(nets, given)


def _write_in_place(mx, net):
    net.conv.weight.data()[:] *= 2


def _set_data(mx, net):
    net.norm.gamma.set_data(mx.nd.full(8, 3))


def _other_arrays(mx, net):
    net.initialize(mx.init.Uniform(2), force_reinit=True)


def _other_context(mx, net):
    net.collect_params().reset_ctx([mx.cpu(1), mx.cpu(0)])
    net.collect_params().reset_ctx(mx.cpu(0))


def _list_of_arrays(mx, net):
    net.conv.bias._data[0] = mx.nd.arange(8)


def _train(mx, net):
    x, scale = mx.nd.ones(SHAPE), mx.nd.ones((1, 8, 1, 1))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with mx.autograd.record():
            loss = sum(each.mean() for each in net(x, scale))
        loss.backward()
        trainer.step(1)


def _predict_while_recording(mx, net):
    with mx.autograd.record(train_mode=False):
        net(mx.nd.ones(SHAPE), mx.nd.ones((1, 8, 1, 1)))


def _another_shape(mx, net):
    net(mx.nd.ones((1, 3, 5, 6)), mx.nd.ones((1, 8, 1, 1)))


def _other_arrays_to_the_graph(mx, net):
    """As by a program that calls the block's CachedOp directly."""
    data = mx.nd.ones(SHAPE), mx.nd.ones((1, 8, 1, 1))
    inputs = [data[each] if is_given else each.data() * 3 for is_given, each in net._cached_op_args]
    net._cached_op(*inputs)[0].wait_to_read()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "change",
    [
        _write_in_place,
        _set_data,
        _other_arrays,
        _other_context,
        _list_of_arrays,
        _train,
        _predict_while_recording,
        _another_shape,
        _other_arrays_to_the_graph,
    ],
)
def test_changes_between_calls_are_noticed(mx, nets, data, change, flags):
    nets[0].hybridize(**flags)
    for _ in range(2):
        for _ in range(3):
            agree(nets, data())
        change(mx, nets[0])
    agree(nets, data())


def test_a_loaded_file_is_noticed(nets, data, tmp_path):
    net, _ = nets
    net.hybridize()
    net.save_parameters(str(tmp_path / "saved"))
    given = data()
    agree(nets, given)
    before = net(*given)[0].asnumpy()
    net.conv.weight.data()[:] = 1
    agree(nets, given)
    net.load_parameters(str(tmp_path / "saved"))
    np.testing.assert_array_equal(net(*given)[0].asnumpy(), before)


def test_data_is_not_held(nets, data):
    nets[0].hybridize()
    given = data()
    before = [sys.getrefcount(each) for each in given]
    for _ in range(3):
        nets[0](*given)
    assert [sys.getrefcount(each) for each in given] == before


def test_wrong_data_is_refused_and_right_data_taken_afterwards(mx, nets, data):
    net, _ = nets
    net.hybridize()
    for _ in range(2):
        agree(nets, data())
    x, scale = data()
    with pytest.raises((mx.MXNetError, Ece408Error)):
        net(mx.nd.ones((2, 4, 9, 8)), scale)[0].wait_to_read()
    with pytest.raises(ValueError, match="argument structure"):
        net([x, x], scale)
    agree(nets, (x, scale))


def test_a_monitor_hears_the_calls(mx, nets, data):
    net, _ = nets
    net.hybridize()
    for _ in range(2):
        agree(nets, data())
    heard = []
    net.register_op_hook(lambda node, name, array: heard.append(node))
    net(*data())[0].wait_to_read()
    assert heard


def test_threads_may_call_at_once(mx, nets, data):
    net, _ = nets
    net.hybridize(static_alloc=True, static_shape=True)
    pairs = [data() for _ in range(4)]
    expected = [net(*each)[0].asnumpy() for each in pairs]
    wrong = []

    def call(given, result):
        for _ in range(50):
            found = net(*given)[0].asnumpy()
            if not np.array_equal(found, result):
                wrong.append(found)

    threads = [threading.Thread(target=call, args=each) for each in zip(pairs, expected)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
