"""Hybridized blocks whose sequences cache small parameters, beside the same block layer by layer.

A block that is one sequence is called without MXNet's CachedOp.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ece408_op
from ece408_op.operator.graphs import direct_calls, held, permuted_cached_op

SHAPE = (1, 3, 10, 9)
FLAGS = ({}, {"static_alloc": True, "static_shape": True})


@pytest.fixture(params=["one_sequence", "with_another_operator"])
def is_one_sequence(request):
    return request.param == "one_sequence"


@pytest.fixture
def nets(mx, is_one_sequence):
    """Return a block, and one that shares its parameters. The weights of one layer are large."""

    class Net(mx.gluon.HybridBlock):
        def __init__(self, **keywords):
            super().__init__(**keywords)
            nn = mx.gluon.nn
            with self.name_scope():
                self.first = nn.Conv2D(32, 3, padding=1, in_channels=3)
                self.norm = nn.BatchNorm(in_channels=32)
                self.large = nn.Conv2D(64, 3, padding=1, in_channels=32, use_bias=False)
                self.small = nn.Conv2D(8, 1, in_channels=32)
                self.pool = nn.MaxPool2D(2)
                self.last = nn.BatchNorm(in_channels=72)
                self.dense = nn.Dense(5, in_units=72 * 5 * 4)

        def hybrid_forward(self, F, x):
            y = F.relu(self.norm(self.first(x)))
            y = F.concat(self.large(y), self.small(y), dim=1)
            y = self.dense(F.relu(self.last(self.pool(y))))
            return y if is_one_sequence else F.softsign(y)

    mx.random.seed(5)
    net = Net(prefix="net_")
    net.initialize(mx.init.Uniform(0.3))
    beside = Net(prefix="net_", params=net.collect_params())
    ece408_op.swap(net)
    return net, beside


@pytest.fixture
def data(mx, rng):
    return lambda shape=SHAPE: mx.nd.array(rng.normal(size=shape))


@pytest.fixture
def counts(monkeypatch):
    """Return how many arrays each repeated call passed to MXNet's CachedOp; 0 for calls without
    it."""
    found = []
    plain, plain_direct = permuted_cached_op._Handles.call, direct_calls.DirectCalls.__call__

    def call(self, op, data):
        found.append(len(self._handles))
        return plain(self, op, data)

    def call_directly(self, *given):
        results = plain_direct(self, *given)
        if results is not None:
            found.append(0)
        return results

    monkeypatch.setattr(permuted_cached_op._Handles, "call", call)
    monkeypatch.setattr(direct_calls.DirectCalls, "__call__", call_directly)
    return found


@pytest.fixture
def fewest(is_one_sequence):
    """Return the least of `counts`, with cached parameters: the data, the large weights, and unread
    inputs; of 16 in all."""
    return 0 if is_one_sequence else 3


def agree(nets, given):
    net, beside = nets
    np.testing.assert_allclose(net(given).asnumpy(), beside(given).asnumpy(), rtol=1e-4, atol=1e-4)


def repeat(nets, data, times=held._FEWEST + 3):
    """Call often enough for parameters to be cached."""
    for _ in range(times):
        agree(nets, data())


@pytest.mark.parametrize("flags", FLAGS)
def test_calls_are_not_given_small_parameters(nets, data, counts, fewest, flags):
    nets[0].hybridize(**flags)
    repeat(nets, data)
    assert set(counts[-2:]) == {fewest}
    before = nets[0](given := data()).asnumpy()
    np.testing.assert_array_equal(nets[0](given).asnumpy(), before)


def _write_small_weights(mx, net):
    net.small.weight.data()[:] *= 2


def _write_large_weights(mx, net):
    net.large.weight.data()[:] *= 2


def _write_one_number(mx, net):
    net.last.beta.data()[3] += 5


def _write_through_a_view(mx, net):
    net.first.weight.data().reshape((-1,))[7] = 9


def _write_by_out(mx, net):
    gamma = net.norm.gamma.data()
    mx.nd.broadcast_add(gamma, mx.nd.ones(1), out=gamma)


def _write_the_dense_layer(mx, net):
    net.dense.bias.data()[:] = 4


def _set_data(mx, net):
    net.norm.running_var.set_data(mx.nd.full(32, 3))


def _other_arrays(mx, net):
    net.initialize(mx.init.Uniform(0.2), force_reinit=True)


def _another_array(mx, net):
    net.first.bias._data[0] = mx.nd.arange(32)


def _cast_to_and_fro(mx, net):
    net.small.weight.data()[:] = 1 / 3
    net.cast("float16")
    net.cast("float32")


def _train(mx, net):
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with mx.autograd.record():
            loss = net(mx.nd.ones(SHAPE)).mean()
        loss.backward()
        trainer.step(1)


def _move_averages_without_gradients(mx, net):
    with mx.autograd.train_mode():
        net(mx.nd.ones(SHAPE)).wait_to_read()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "change",
    [
        _write_small_weights,
        _write_large_weights,
        _write_one_number,
        _write_through_a_view,
        _write_by_out,
        _write_the_dense_layer,
        _set_data,
        _other_arrays,
        _another_array,
        _cast_to_and_fro,
        _train,
        _move_averages_without_gradients,
    ],
)
def test_changes_are_noticed(mx, nets, data, counts, fewest, change, flags):
    nets[0].hybridize(**flags)
    for _ in range(2):
        repeat(nets, data, 3 * held._FEWEST)
        assert counts[-1] == fewest
        change(mx, nets[0])
        agree(nets, data())


def _operator(mx, name, forward):
    """Register an operator whose forward pass is a function of its input and output."""

    class Operator(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            forward(in_data[0], out_data[0])

    class Properties(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Operator()

    mx.operator.register(name)(Properties)


def _failing(mx, name):
    def forward(x, y):
        raise ValueError("no such numbers")

    _operator(mx, name, forward)


def test_a_call_in_flight_has_the_parameters_that_it_was_given(mx, nets, data):
    """Its data is pending when parameters are written, and then cached again."""
    is_there = threading.Event()

    def forward(x, y):
        is_there.wait()
        y[:] = x

    _operator(mx, "held_test_waits", forward)
    net, beside = nets
    net.hybridize()
    repeat(nets, data)
    given = data()
    before = beside(given).asnumpy()
    first = net(mx.nd.Custom(given, op_type="held_test_waits"))
    net.norm.gamma.set_data(mx.nd.full(32, 2))
    threading.Timer(0.5, is_there.set).start()
    second = [net(given) for _ in range(3 * held._FEWEST)]
    np.testing.assert_allclose(first.asnumpy(), before, rtol=1e-4, atol=1e-4)
    after = beside(given).asnumpy()
    for each in second:
        np.testing.assert_allclose(each.asnumpy(), after, rtol=1e-4, atol=1e-4)


def test_data_that_is_written_after_a_call_is_not_read_by_it(mx, nets, data):
    net, beside = nets
    net.hybridize()
    repeat(nets, data)
    for _ in range(20):
        given = data()
        expected = beside(given).asnumpy()
        found = net(given)
        given[:] = 1
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-4, atol=1e-4)


def test_data_that_failed_is_raised(mx, nets, data):
    _failing(mx, "held_test_has_no_data")
    net, _ = nets
    net.hybridize()
    repeat(nets, data)
    with pytest.raises(mx.MXNetError, match="CustomOpFBFunc"):
        net(mx.nd.Custom(data(), op_type="held_test_has_no_data")).wait_to_read()
    agree(nets, data())


def test_results_are_the_callers(mx, nets, data):
    net, _ = nets
    net.hybridize(static_alloc=True, static_shape=True)
    repeat(nets, data)
    given = [data() for _ in range(6)]
    found = [net(each) for each in given]
    copies = [each.asnumpy() for each in found]
    found[0][:] = 3
    for each, copy in zip(given, copies):
        np.testing.assert_array_equal(net(each).asnumpy(), copy)


def test_a_failed_write_is_raised(mx, nets, data):
    _failing(mx, "held_test_fails")
    net, _ = nets
    net.hybridize()
    repeat(nets, data)
    bias = net.first.bias.data()
    mx.nd.Custom(bias * 1, op_type="held_test_fails", out=bias)
    with pytest.raises(mx.MXNetError, match="CustomOpFBFunc"):
        net(data()).wait_to_read()


def test_other_shapes_between_calls(nets, data, counts, fewest):
    nets[0].hybridize()
    repeat(nets, data)
    for _ in range(3):
        for batch in (1, 4):
            agree(nets, data((batch, *SHAPE[1:])))
    assert counts[-2:] == [fewest, 16]


def test_a_setting_that_changes_is_obeyed(nets, data, counts, fewest, monkeypatch):
    net, _ = nets
    net.hybridize()
    repeat(nets, data)
    for backend in ("reference", "cpu"):
        monkeypatch.setenv("ECE408_BACKEND", backend)
        with ece408_op.op_times() as times:
            agree(nets, data())
        assert {each.backend for each in times} == {backend}
    assert counts[-1] == fewest


def test_parameters_that_change_in_each_call_are_seldom_copied(nets, data, monkeypatch):
    copies = []
    plain = held.HeldCalls._hold
    monkeypatch.setattr(
        held.HeldCalls, "_hold", lambda self, *given: copies.append(1) or plain(self, *given)
    )
    net, _ = nets
    net.hybridize()
    for _ in range(40 * held._FEWEST):
        net(data())
        net.norm.beta.data()[:] += 1
    agree(nets, data())
    assert 2 <= len(copies) <= 6


def test_threads_may_call_and_write_at_once(nets, data):
    net, _ = nets
    net.hybridize(static_alloc=True, static_shape=True)
    given = [data() for _ in range(3)]
    repeat(nets, data)
    beta = net.last.beta.data()
    wrong = []

    def results(each):
        """Return the values added to beta, recovered from the sums in each output."""
        found = []
        for value in (0, 1):
            beta[:] = value
            found.append(net(each).asnumpy())
        return found

    expected = [results(each) for each in given]

    def call(each, either):
        for _ in range(60):
            found = net(each).asnumpy()
            if not any(np.allclose(found, one, rtol=1e-4, atol=1e-4) for one in either):
                wrong.append(found)

    def write():
        for value in range(60):
            beta[:] = value % 2

    threads = [threading.Thread(target=call, args=each) for each in zip(given, expected)]
    threads.append(threading.Thread(target=write))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


FORK = """
import os
import ece408_op, mxnet as mx
nn = mx.gluon.nn
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=3), nn.MaxPool2D(2), nn.Conv2D(8, 1, in_channels=8))
net.initialize(mx.init.One())
ece408_op.swap(net)
net.hybridize()
x = mx.nd.ones((1, 3, 8, 8))
for _ in range(9):
    assert net(x).asnumpy().max() == 27 * 8
pid = os.fork()
net[0].bias.data()[:] = 1
for _ in range(9):
    assert net(x).asnumpy().max() == 28 * 8
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
given = mx.nd.from_dlpack(net[0].bias.data().to_dlpack_for_write())
import ctypes
from ece408_op.operator import array_memory
ctypes.memset(array_memory.pointer(given), 0, given.size * 4)
assert net(x).asnumpy().max() == 27 * 8
print("done")
"""


def test_forks_and_shared_memory(run_python):
    result = run_python(FORK)
    assert result.stdout == "done\n", result.stderr
