"""Hybridized blocks whose nodes run in parts, beside the same blocks of MXNet's own layers."""

import json
import sys
import threading

import numpy as np
import pytest
from programs import together

import ece408_op
from ece408_op import errors
from ece408_op.errors import Ece408Error
from ece408_op.operator.graphs import graph_json, partition
from ece408_op.operator.parts_at_work import Parts

SHAPE = (1, 3, 10, 9)
INVOKE = "MXInvokeCachedOpEx"
FLAGS = ({}, {"static_alloc": True, "static_shape": True})


@pytest.fixture(params=["one_part", "with_another_operator"])
def is_one_part(request):
    return request.param == "one_part"


@pytest.fixture
def nets(mx, is_one_part):
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
            return y if is_one_part else F.arctan(y)

    mx.random.seed(5)
    net = Net(prefix="net_")
    net.initialize(mx.init.Uniform(0.3))
    beside = Net(prefix="net_", params=net.collect_params())
    ece408_op.swap(net)
    return net, beside


@pytest.fixture
def data(mx, rng):
    return lambda shape=SHAPE: mx.nd.array(rng.normal(size=shape))


def agree(nets, given):
    net, beside = nets
    np.testing.assert_allclose(net(given).asnumpy(), beside(given).asnumpy(), rtol=1e-4, atol=1e-4)


def repeat(nets, data, times=2):
    for _ in range(times):
        agree(nets, data())


@pytest.fixture
def net(nets, data):
    """Return the hybridized block, whose parameters are cached."""
    nets[0].hybridize()
    repeat(nets, data)
    return nets[0]


def operators(symbol, **shapes):
    """Return the operators that MXNet runs for a graph in inference, sorted."""
    mx = pytest.importorskip("mxnet")
    arguments, _, states = symbol.infer_shape(**shapes)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    arrays = {name: mx.nd.zeros(shape) for name, shape in zip(names, [*arguments, *states])}
    choice = partition.for_inference(symbol, graph_json.read(symbol), arrays)
    found, opened = partition.in_parts(choice, arrays)
    nodes = json.loads(found.tojson())["nodes"]
    assert sorted(found.list_inputs()) == sorted(symbol.list_inputs())
    assert (opened is None) == all(node["op"] != "ece408_part" for node in nodes)
    return sorted(node["op"] for node in nodes if node["op"] != "null")


def _convolution(x, name="c", **own):
    return ece408_op.Convolution(x, name=name, kernel=(3, 3), num_filter=8, pad=(1, 1), **own)


def test_what_follows_a_convolution_of_ours_is_one_node_with_it(mx):
    sym = mx.sym
    y = sym.relu(sym.BatchNorm(_convolution(sym.BatchNorm(sym.var("data")))))
    y = sym.Concat(sym.Pooling(y, kernel=(3, 3), pad=(1, 1)), _convolution(y, "d") + y, dim=1)
    y = sym.softmax(sym.FullyConnected(sym.Dropout(y), num_hidden=5))
    assert operators(y, data=(2, 8, 9, 7)) == ["ece408_part"]


def test_what_mxnet_computes_stays(mx):
    sym, data = mx.sym, mx.sym.var("data")
    native = sym.Convolution(data, kernel=(3, 3), num_filter=8, pad=(1, 1), name="native")
    before = sym.relu(sym.BatchNorm(native))
    expected = ["BatchNorm", "Convolution", "ece408_part", "relu"]
    assert operators(sym.tanh(_convolution(before)), data=(2, 8, 9, 7)) == expected
    between = _convolution(sym.arctan(_convolution(data)), "d")
    assert operators(between, data=(2, 8, 9, 7)) == ["arctan", "ece408_part", "ece408_part"]
    # Of no convolution.
    both = sym.Group([_convolution(data), sym.exp(data)])
    assert operators(both, data=(2, 8, 9, 7)) == ["ece408_part", "exp"]


@pytest.mark.parametrize(
    "own", [{"backend": "reference"}, {"precision": "strict"}, {"precision": 1e-6}]
)
def test_a_layer_with_requests_of_its_own_is_in_no_part(mx, own):
    y = _convolution(_convolution(_convolution(mx.sym.var("data")), "d", **own), "e")
    expected = ["ece408_convolution", "ece408_part", "ece408_part"]
    assert operators(y, data=(2, 8, 9, 7)) == expected


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


def _other_context(mx, net):
    net.collect_params().reset_ctx([mx.cpu(1), mx.cpu(0)])
    net.collect_params().reset_ctx(mx.cpu(0))


def _predict_while_recording(mx, net):
    with mx.autograd.record(train_mode=False):
        net(mx.nd.ones(SHAPE))


def _other_arrays_to_the_graph(mx, net):
    """As by a program that calls the block's CachedOp directly."""
    data = [mx.nd.ones(SHAPE)]
    inputs = [data[each] if is_given else each.data() * 3 for is_given, each in net._cached_op_args]
    net._cached_op(*inputs).wait_to_read()


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
        _other_context,
        _predict_while_recording,
        _other_arrays_to_the_graph,
        _move_averages_without_gradients,
    ],
)
def test_changes_are_noticed(mx, nets, data, change, flags):
    nets[0].hybridize(**flags)
    for _ in range(2):
        repeat(nets, data)
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


def test_a_call_in_flight_has_the_parameters_that_it_was_given(mx, net, nets, data):
    """Its data is pending when parameters are written, and then cached again."""
    is_there = threading.Event()

    def forward(x, y):
        is_there.wait()
        y[:] = x

    _operator(mx, "parts_test_waits", forward)
    beside, given = nets[1], data()
    before = beside(given).asnumpy()
    first = net(mx.nd.Custom(given, op_type="parts_test_waits"))
    net.norm.gamma.set_data(mx.nd.full(32, 2))
    threading.Timer(0.5, is_there.set).start()
    second = [net(given) for _ in range(4)]
    np.testing.assert_allclose(first.asnumpy(), before, rtol=1e-4, atol=1e-4)
    after = beside(given).asnumpy()
    for each in second:
        np.testing.assert_allclose(each.asnumpy(), after, rtol=1e-4, atol=1e-4)


def test_data_that_is_written_after_a_call_is_not_read_by_it(mx, net, nets, data):
    for _ in range(20):
        given = data()
        expected = nets[1](given).asnumpy()
        found = net(given)
        given[:] = 1
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-4, atol=1e-4)


def test_failed_data_and_writes_are_raised(mx, net, nets, data):
    _failing(mx, "parts_test_fails")
    with pytest.raises(mx.MXNetError, match="CustomOpFBFunc"):
        net(mx.nd.Custom(data(), op_type="parts_test_fails")).wait_to_read()
    agree(nets, data())
    bias = net.first.bias.data()
    mx.nd.Custom(bias * 1, op_type="parts_test_fails", out=bias)
    with pytest.raises(mx.MXNetError, match="CustomOpFBFunc"):
        net(data()).wait_to_read()


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


@pytest.mark.parametrize("flags", FLAGS)
def test_other_shapes_between_calls(nets, data, flags):
    """More than have a program at once."""
    nets[0].hybridize(**flags)
    for batch in [*range(1, 12), *range(11, 0, -1)]:
        agree(nets, data((batch, *SHAPE[1:])))


@pytest.mark.parametrize("flags", FLAGS)
def test_a_setting_that_changes_is_obeyed(nets, data, monkeypatch, flags):
    net, _ = nets
    net.hybridize(**flags)
    repeat(nets, data)
    for backend in ("reference", "cpu"):
        monkeypatch.setenv("ECE408_BACKEND", backend)
        with ece408_op.op_times() as times:
            agree(nets, data())
        assert {each.backend for each in times} == {backend}
    for precision in ("strict", "float32"):
        with ece408_op.settings.override(precision=precision), ece408_op.op_times() as times:
            agree(nets, data())
        assert {each.precision for each in times} == {precision}


def test_one_call_in_each_mode_is_logged(net, data):
    with ece408_op.op_times() as times:
        net(data()).wait_to_read()
    assert [each.layer for each in times] == ["net_conv0_fwd", "net_conv1_fwd", "net_conv2_fwd"]
    assert all(each.seconds > 0 and each.backend == "cpu" for each in times)


def test_what_the_step_refuses_is_raised(mx, nets, data, monkeypatch):
    """A setting that is found to be wrong in a call."""
    net, _ = nets
    net.hybridize(static_alloc=True, static_shape=True)
    repeat(nets, data)
    monkeypatch.setenv("ECE408_ISA", "mmx")
    with pytest.raises(Ece408Error, match="unknown instruction set 'mmx'"), errors.surfaced():
        net(data()).asnumpy()
    monkeypatch.delenv("ECE408_ISA")
    agree(nets, data())


def test_wrong_data_is_refused_and_right_data_taken_afterwards(mx, net, nets, data):
    with pytest.raises((mx.MXNetError, Ece408Error)):
        net(mx.nd.ones((2, 4, 9, 8))).wait_to_read()
    agree(nets, data())


def test_a_size_that_was_refused_is_taken_afterwards(nets, data, monkeypatch):
    net, beside = ece408_op.to_cpu(nets[0]), nets[1]
    for given in (data(), data((2, *SHAPE[1:]))):
        with monkeypatch.context() as context:
            context.setenv("ECE408_ISA", "neon")
            with pytest.raises(errors.InvalidSetting, match="unknown instruction set 'neon'"):
                net(given)
        for _ in range(2):
            agree((net, beside), given)


def test_an_operator_that_is_not_told_which_inputs_are_data(mx, data):
    layer = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
    call = mx.nd.CachedOp(ece408_op.swap(mx.sym.Convolution(mx.sym.var("data"), **layer)))
    weight = mx.nd.random.normal(shape=(4, 3, 3, 3))
    # All are alive at once, so that none has another's address.
    for given in [data() for _ in range(4)]:
        # MXNet would leave the weights themselves in a layout of oneDNN's.
        expected = mx.nd.Convolution(given, weight.copy(), **layer).asnumpy()
        np.testing.assert_allclose(call(given, weight).asnumpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_monitor_hears_the_calls(mx, net, data):
    heard = []
    net.register_op_hook(lambda node, name, array: heard.append(node))
    net(data()).wait_to_read()
    assert len(heard) > 8


def test_data_is_not_held(nets, data):
    nets[0].hybridize()
    given = data()
    before = sys.getrefcount(given)
    for _ in range(3):
        nets[0](given)
    assert sys.getrefcount(given) == before


def test_a_repeated_call_with_large_weights_does_without_mxnet(mx, data, monkeypatch):
    net = mx.gluon.nn.HybridSequential()
    net.add(ece408_op.Conv2D(8, 3), mx.gluon.nn.Dense(20_000))  # of 36 MB
    net.initialize()
    net.hybridize()
    net(data()).wait_to_read()
    monkeypatch.setattr(mx.base._LIB, INVOKE, None)
    net(data()).wait_to_read()


@pytest.mark.parametrize(("layer", "name"), [("last", "beta"), ("dense", "weight")])
def test_threads_may_call_and_write_at_once(nets, data, layer, name):
    net, _ = nets
    net.hybridize(static_alloc=True, static_shape=True)
    given = [data() for _ in range(3)]
    repeat(nets, data)
    parameter = getattr(getattr(net, layer), name).data()

    def results(each):
        """Return the outputs with parameters of 0 and of 1."""
        found = []
        for value in (0, 1):
            parameter[:] = value
            found.append(net(each).asnumpy())
        return found

    expected = [results(each) for each in given]

    def call(number):
        for value in range(60):
            if number == len(given):
                parameter[:] = value % 2
                continue
            found = net(given[number]).asnumpy()
            assert any(np.allclose(found, e, rtol=1e-4, atol=1e-4) for e in expected[number])

    together(call, range(len(given) + 1))


@pytest.mark.parametrize("where", ["before_infer", "in_mxnet"])
def test_two_threads_begin(mx, nets, data, monkeypatch, where):
    """One thread calls while the other hands over the parameters, or is in MXNet, whose CachedOps
    infer shapes for one thread at a time."""
    net, beside = nets
    given = data()
    expected = beside(given).asnumpy()
    net.hybridize()
    owner, name = (Parts, "forget") if where == "before_infer" else (mx.base._LIB, INVOKE)
    method = getattr(owner, name)
    inside, together, found = [], [], []
    other = threading.Thread(target=lambda: found.append(net(given).asnumpy()))

    def entered(*arguments):
        together.append(len(inside))
        inside.append(arguments)
        if len(together) == 1:
            other.start()
            # It can end or enter only if nothing makes it wait.
            other.join(0.5)
        result = method(*arguments)
        inside.pop()
        return result

    monkeypatch.setattr(owner, name, entered)
    found.append(net(given).asnumpy())
    other.join()
    assert not any(together)
    assert len(found) == 2
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-4)


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
