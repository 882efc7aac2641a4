"""Whole networks on the GPU, in the emulator, compared with MXNet's results on the CPU."""

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import first
from gluon_nets import (
    SHAPE,
    changes,
    expect,
    make_net,
    make_symbol,
    operators,
    parameters_of,
    raising,
    sort,
    with_parameters_of,
)

import ece408_op
from ece408_op import errors, settings
from ece408_op.errors import (
    CheckpointMismatch,
    InvalidSetting,
    NotEnoughMemory,
    OperatorFailed,
    UnsupportedProblem,
)
from ece408_op.network.gpu_weights import Weights
from ece408_op.operator import array_memory, networks, parts_at_work

STATIC = {"static_alloc": True, "static_shape": True}


pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def x(mx):
    return mx.nd.array(np.random.default_rng(7).standard_normal(SHAPE))


def module_of(mx, symbol, parameters, batch=SHAPE[0]):
    module = mx.mod.Module(symbol)
    module.bind([("data", (batch, *SHAPE[1:]))], [("softmax_label", (batch,))], for_training=False)
    module.set_params(parameters, {})
    return module


def answers(mx, module, x):
    module.forward(mx.io.DataBatch([x], [mx.nd.zeros(x.shape[0])]), is_train=False)
    return module.get_outputs()[0]


# --- entry points


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("static", [{}, STATIC])
def test_hybridized(mx, x, static, swapped):
    net = make_net(mx)
    expected = net(x)
    if swapped:
        ece408_op.swap(net)
    net.hybridize(backend="ece408", **static)
    for _ in range(2):
        expect(net(x), expected)
    assert operators(net._cached_graph[1]) == ["part 0"]


@pytest.mark.parametrize("middle", [None, sort])
def test_to_gpu_leaves_the_net_as_it_is(mx, x, middle, frozen):
    net = make_net(mx, middle=middle)
    expected = net(x)
    network = frozen(net)
    for _ in range(2):
        expect(network(x), expected)
    expect(net(x), expected)
    assert not net._active


def test_a_block_that_rearranges_its_arguments(mx, x, frozen):
    class Scaled(mx.gluon.HybridBlock):
        """A block that omits an argument between two others, as models of BERT do."""

        def __init__(self):
            super().__init__()
            self.net = make_net(mx)

        def __call__(self, x, scale=None):
            self.sign = -1
            return super().__call__(x, [], scale) * 3

        def hybrid_forward(self, F, x, shift=None, scale=None):
            y = self.net(x)
            y = y if not shift else F.broadcast_add(y, shift)
            return self.sign * (y if scale is None else F.broadcast_mul(y, scale))

    scale = mx.nd.array([[1], [5]])
    net = Scaled()
    network = frozen(net)
    for given in ([x, scale], [x], [x], [x, scale]):
        expect(network(*given), net(*given))
        assert network.report.parts
        with mx.autograd.train_mode():
            expect(network(*given), net(*given))


@pytest.mark.parametrize("has_states", [False, True])
def test_an_rnn_layer_begins_with_states_of_its_own(mx, has_states, frozen):
    layer = mx.gluon.rnn.LSTM(5, bidirectional=True)
    layer.initialize()
    x = mx.nd.array(np.random.default_rng(2).standard_normal((4, 2, 3)))
    given = (x, layer.begin_state(2)) if has_states else (x,)
    found, expected = frozen(layer)(*given), layer(*given)
    if has_states:
        expect(found[1][1], expected[1][1])
        found, expected = found[0], expected[0]
    expect(found, expected)


def test_hooks_are_called(mx, x, frozen):
    net, seen = make_net(mx), []
    network = frozen(net)
    net.register_forward_pre_hook(lambda block, given: seen.append(given[0]))
    net.register_forward_hook(lambda block, given, outputs: seen.append(outputs))
    found = network(x)
    assert seen[0] is x
    assert seen[1] is found


def test_symbols_and_modules(mx, x, frozen):
    symbol = make_symbol(mx)
    parameters = parameters_of(mx, symbol)
    expected = answers(mx, module_of(mx, symbol, parameters), x)
    optimized = symbol.optimize_for("ece408", parameters, {})
    assert operators(optimized) == ["part 0"]
    expect(answers(mx, module_of(mx, optimized, parameters), x), expected)
    expect(frozen(symbol, parameters)(x), expected)
    expect(frozen(ece408_op.swap(symbol), parameters, {})(x), expected)


def test_a_symbol_block(mx, x, tmp_path, frozen):
    net = make_net(mx)
    net.hybridize()
    expected = net(x)
    net.export(str(tmp_path / "net"))
    files = [str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0000.params")]
    block = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    expect(frozen(block)(x), expected)
    block.hybridize(backend="ece408")
    expect(block(x), expected)


def test_what_is_saved_is_read_again(mx, x, tmp_path):
    net = make_net(mx)
    expected = net(x)
    net.optimize_for(x, backend="ece408")
    expect(net(x), expected)
    net.export(str(tmp_path / "net"))
    files = [str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0000.params")]
    block = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    expect(block(x), expected)


def test_pixels(mx, frozen):
    net = make_net(mx)
    pixels = np.random.default_rng(0).integers(0, 255, SHAPE, dtype=np.uint8)
    network = frozen(net)
    found = network(mx.nd.array(pixels, dtype=np.uint8))
    expect(found, net(mx.nd.array(pixels.astype(np.float32))))
    assert network.report.bytes_in == pixels.nbytes


def test_other_models_are_refused(mx, frozen):
    with pytest.raises(InvalidSetting, match="a str cannot be taken to the CPU or the GPU; give"):
        frozen("model")
    with pytest.raises(CheckpointMismatch, match=r"with 1 arrays, and these .*: data, c1_weight"):
        frozen(make_symbol(mx))(mx.nd.zeros(SHAPE))


# --- parameters that change


@pytest.mark.parametrize("way", ["hybridize", "to_gpu"])
def test_changed_parameters_are_noticed(mx, x, tmp_path, way, frozen):
    net = make_net(mx)
    network = _hybridized(net) if way == "hybridize" else frozen(net)
    network(x).wait_to_read()

    def average():
        net[1].running_mean.data()[:] = 0.25

    for change in [*changes(mx, net, make_net, SHAPE, tmp_path / "other.params"), average]:
        before = network(x).asnumpy()
        change()
        found = network(x)
        assert not np.allclose(found.asnumpy(), before, rtol=1e-4), change.__name__
        expect(found, with_parameters_of(net, make_net(mx))(x))


def test_arrays_put_in_place_of_others_are_noticed(mx, x, frozen):
    symbol = make_symbol(mx)
    parameters = parameters_of(mx, symbol)
    network = frozen(symbol, parameters)
    network(x)
    for seed in range(4):
        parameters.update(parameters_of(mx, symbol, seed=seed))
        expected = answers(mx, module_of(mx, symbol, parameters), x)
        expect(network(x), expected)


def test_what_has_not_changed_is_not_sent_again(mx, x, noted):
    """Also if MXNet's own convolution has converted weights to a layout of its own."""
    sent = noted(Weights, "_bring")
    for make in (_hybridized, ece408_op.to_gpu):
        net = make_net(mx)
        net.hybridize()
        net(x).wait_to_read()
        network = make(net)
        counts = []
        for _ in range(4):
            network(x).wait_to_read()
            counts.append(len(sent))
        assert 0 < counts[-1] == counts[-2]


def _hybridized(net):
    net.hybridize(backend="ece408")
    return net


def test_weights_are_read_while_they_are_there(mx, noted):
    """MXNet copies weights that its convolution has converted for the duration of a call."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    # oneDNN uses its own layouts from 16 channels on.
    net.add(nn.Conv2D(16, 3, in_channels=16), nn.Conv2D(16, 3, in_channels=16))
    net.initialize(mx.init.Xavier(magnitude=3))
    net.hybridize()
    x = mx.nd.random.normal(shape=(1, 16, 5, 5))
    content = lambda weights, number, array: ctypes.string_at(array.address, array.nbytes)  # noqa: E731
    read = noted(Weights, "_bring", content)
    network = ece408_op.to_gpu(net)
    for call in range(5):
        expected = net(x)
        expect(network(x), expected)
        assert read or call
        values = {p.data().asnumpy().tobytes() for p in net.collect_params().values()}
        assert values.issuperset(read)
        read.clear()


@pytest.mark.parametrize("way", ["hybridize", "to_gpu"])
def test_weights_are_read_when_they_are_written(mx, x, way, noted, frozen):
    net = make_net(mx)
    weight = net[0].weight
    network = _hybridized(net) if way == "hybridize" else frozen(net)
    is_written = threading.Event()
    in_time = noted(array_memory, "pointer", lambda array: is_written.is_set())
    late_copy(mx, weight.data() * 2, is_written).copyto(weight.data())
    threading.Timer(0.5, is_written.set).start()
    found = network(x)
    assert in_time
    assert all(in_time)
    plain = make_net(mx)
    plain[0].weight.set_data(plain[0].weight.data() * 2)
    expect(found, plain(x))


def late_copy(mx, array, event):
    """Return a copy of an array, made as soon as the event is set."""

    class Late(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            event.wait()
            self.assign(out_data[0], req[0], in_data[0])

    class LateProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Late()

    mx.operator.register("late_copy")(LateProp)
    return mx.nd.Custom(array, op_type="late_copy")


def test_an_array_in_a_parameter_list_is_replaced(mx, x, frozen):
    net = make_net(mx)
    network = frozen(net)
    network(x)
    weight = net[0].weight
    weight._data[0] = weight.data() * 2
    plain = make_net(mx)
    plain[0].weight.set_data(plain[0].weight.data() * 2)
    expect(network(x), plain(x))


def test_what_fails_while_weights_are_copied(mx, x, monkeypatch):
    network = ece408_op.to_gpu(make_net(mx))
    failure = NotEnoughMemory("there is none; take a smaller batch")
    with monkeypatch.context() as patched:
        patched.setattr(Weights, "_bring", raising(failure))
        with pytest.raises(NotEnoughMemory, match="there is none"):
            network(x)
    expect(network(x), make_net(mx)(x))


def test_a_change_is_noticed_after_a_call_that_failed(mx, x, monkeypatch):
    net = make_net(mx)
    network = ece408_op.to_gpu(net)
    network(x)
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)
    with monkeypatch.context() as patched:
        patched.setattr(networks.OnGpu, "compute", raising(ValueError("not now")))
        with pytest.raises(OperatorFailed):
            network(x)
    expect(network(x), net(x))


@pytest.mark.parametrize("middle", [None, sort])
@pytest.mark.parametrize("static", [{}, STATIC])
def test_parameters_of_several_contexts(mx, x, middle, static):
    contexts = [mx.cpu(0), mx.cpu(1)]
    net, plain = make_net(mx, middle=middle), make_net(mx, middle=middle)
    for each in (net, plain):
        each.collect_params().reset_ctx(contexts)
    net.hybridize(backend="ece408", **static)
    inputs = [x.as_in_context(context) for context in contexts]
    for factor in (1, 2, -3, 5):
        for each in (net, plain):
            each[0].weight.data(contexts[factor % 2])[:] *= factor
        for _ in range(2):
            for given in inputs:
                expect(net(given), plain(given))


def test_shared_parameters(mx, x, frozen):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    layer = nn.Conv2D(2, 3, padding=1, in_channels=2)
    net.add(layer, nn.Activation("relu"), layer, nn.Conv2D(2, 3, params=layer.params))
    net.initialize(mx.init.Xavier(magnitude=3))
    expected = net(x)
    expect(frozen(net)(x), expected)
    net.hybridize(backend="ece408")
    expect(net(x), expected)


# --- calls


def test_other_batches(mx, frozen):
    net = make_net(mx)
    network = frozen(net)
    hybridized = make_net(mx)
    hybridized.hybridize(backend="ece408")
    for batch in (2, 5, 1, 2):
        x = mx.nd.random.normal(shape=(batch, *SHAPE[1:]))
        expected = net(x)
        expect(network(x), expected)
        expect(hybridized(x), expected)


def test_several_outputs(mx, x, frozen):
    sym = mx.sym
    first = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c1")
    second = sym.Activation(first, act_type="relu", name="r1")
    symbol = sym.Group([second, first, sym.FullyConnected(second, num_hidden=3, name="fc"), first])
    parameters = parameters_of(mx, symbol)
    # MXNet's executors return an inner output among several after relu.
    y = mx.nd.Convolution(
        x, parameters["c1_weight"], parameters["c1_bias"], kernel=(3, 3), num_filter=4
    )
    last = [parameters["fc_weight"], parameters["fc_bias"]]
    expected = [y.relu(), y, mx.nd.FullyConnected(y.relu(), *last, num_hidden=3), y]
    optimized = symbol.optimize_for("ece408").bind(mx.cpu(), {"data": x, **parameters})
    for found in (optimized.forward(), frozen(symbol, parameters)(x)):
        assert len(found) == 4
        for each, its in zip(found, expected):
            expect(each, its)


@pytest.mark.parametrize("way", ["hybridize", "to_gpu"])
def test_threads(mx, way, frozen):
    net = make_net(mx)
    inputs = [mx.nd.random.normal(shape=SHAPE) for _ in range(6)]
    expected = [net(x).asnumpy() for x in inputs]
    network = _hybridized(net) if way == "hybridize" else frozen(net)
    network(inputs[0])
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda x: network(x).asnumpy(), inputs * 5))
    for each, its in zip(found, expected * 5):
        np.testing.assert_allclose(each, its, rtol=2e-5, atol=2e-6)


def test_hundreds_of_calls_leave_nothing_behind(mx, x, monkeypatch, frozen):
    net = _hybridized(make_net(mx))
    network = frozen(make_net(mx))
    net(x).wait_to_read()
    network(x)
    # The results do not matter here.
    monkeypatch.setattr("ece408_op.network.Network.compute", lambda *_: None)

    def call(times):
        for _ in range(times):
            net(x).wait_to_read()
            network(x).wait_to_read()
        gc.collect()
        return _resident_bytes(), len(parts_at_work._opened), threading.active_count()

    before = call(100)
    after = call(300)
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 2 << 20


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_networks_end_with_what_they_were_made_for(mx, x):
    gc.collect()
    before = len(parts_at_work._opened)
    for _ in range(3):
        net = _hybridized(make_net(mx))
        net(x).wait_to_read()
        symbol = make_symbol(mx)
        executor = symbol.optimize_for("ece408").simple_bind(mx.cpu(), data=SHAPE, grad_req="null")
        executor.forward()[0].wait_to_read()
    del net, executor
    gc.collect()
    mx.nd.waitall()
    assert len(parts_at_work._opened) == before


@pytest.mark.gpu
def test_on_the_gpu(mx, x, frozen):
    with settings.override(backend=None):
        for middle in (None, sort):
            net = make_net(mx, middle=middle)
            expected = net(x)
            expect(frozen(net)(x), expected)
            expect(_hybridized(net)(x), expected)
        net = mx.gluon.model_zoo.vision.resnet18_v1()
        net.initialize(mx.init.Xavier(magnitude=2.3))
        images = mx.nd.random.uniform(shape=(5, 3, 224, 224))
        expected = net(images).asnumpy()
        found = frozen(net)(images).asnumpy()
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_thousand_calls_on_the_gpu_leave_nothing_behind(mx, x, frozen):
    """In one chunk, and in several whose first steps run while images arrive."""
    from ece408_op.backends.cuda.runtime import device

    def taken():
        gc.collect()
        with device.get(0).active():
            return _resident_bytes(), device.get(0).free_bytes(), threading.active_count()

    with settings.override(backend=None):
        network = frozen(make_net(mx))
        images = mx.nd.random.uniform(shape=(100000, *SHAPE[1:]))
        first, of_many = network(x).asnumpy(), network(images).asnumpy()

        def call(times):
            for _ in range(times):
                assert (network(x).asnumpy() == first).all()
            for _ in range(times // 10):
                assert (network(images).asnumpy() == of_many).all()
            return taken()

        before, after = call(200), call(1000)
    # The driver may give memory back in between that was taken before.
    assert after[1] >= before[1]
    assert after[2] == before[2]
    assert after[0] - before[0] < 4 << 20


def test_a_repeated_call_does_without_mxnets_engine(mx, x, monkeypatch, frozen):
    net = make_net(mx)
    network = frozen(net)
    expected = net(x)
    for _ in range(3):
        expect(network(x), expected)
    with monkeypatch.context() as patched:
        patched.setattr(mx.base._LIB, "MXInvokeCachedOpEx", raising(AssertionError("invoked")))
        found = network(x)
    expect(found, expected)


# --- gradients


@pytest.mark.parametrize("way", ["hybridize", "to_gpu"])
def test_gradients_are_mxnets(mx, x, way, frozen):
    plain, net = make_net(mx), make_net(mx)
    network = _hybridized(net) if way == "hybridize" else frozen(net)
    network(x)
    for each in (plain, network):
        with mx.autograd.record():
            y = each(x)
        y.backward()
    for its, ours in zip(plain.collect_params().values(), net.collect_params().values()):
        expect(ours.data(), its.data())
        if its.grad_req != "null":
            expect(ours.grad(), its.grad())
    with mx.autograd.train_mode():
        expect(network(x), plain(x))
    expect(network(x), plain(x))


def test_an_executor_with_gradients(mx, x):
    symbol = make_symbol(mx)
    parameters = parameters_of(mx, symbol)
    executors = []
    for each in (symbol, symbol.optimize_for("ece408", parameters, {})):
        executor = each.simple_bind(mx.cpu(), data=SHAPE, softmax_label=SHAPE[:1])
        executor.copy_params_from(parameters)
        executors.append(executor)
    for is_train in (False, True, False):
        plain, ours = (each.forward(is_train, data=x)[0] for each in executors)
        expect(ours, plain)
        if is_train:
            for each in executors:
                each.backward()
            for name in parameters:
                expect(executors[1].grad_dict[name], executors[0].grad_dict[name])


def test_arrays_put_into_dictionaries_of_an_executor_are_not_used(mx, x):
    symbol = make_symbol(mx)
    parameters = parameters_of(mx, symbol)
    found = []
    for each in (symbol, symbol.optimize_for("ece408", parameters, {})):
        executor = each.simple_bind(mx.cpu(), data=SHAPE, softmax_label=SHAPE[:1])
        executor.copy_params_from({**parameters, "data": x})
        bound = dict(executor.grad_dict)
        for name, array in parameters.items():
            executor.arg_dict[name] = mx.nd.zeros(array.shape)
            executor.grad_dict[name] = mx.nd.full(array.shape, 7)
        executor.forward(is_train=True)
        executor.backward()
        found.append([*executor.outputs, *bound.values(), *executor.grad_dict.values()])
    for its, ours in zip(*found):
        expect(ours, its)


# --- failures


def test_what_fails_inside_is_told_in_one_line(mx, x, monkeypatch, capsys):
    net, network = _hybridized(make_net(mx)), ece408_op.to_gpu(make_net(mx))
    for each in (net, network):
        each(x).wait_to_read()
    failure = UnsupportedProblem("no such thing; do another")
    monkeypatch.setattr("ece408_op.network.Network.compute", raising(failure))
    with pytest.raises(UnsupportedProblem, match="no such thing"):
        network(x)
    with pytest.raises(UnsupportedProblem, match="no such thing"), errors.surfaced():
        net(x).wait_to_read()
    with pytest.raises(mx.MXNetError):
        net(x).wait_to_read()
    assert capsys.readouterr() == ("", "ece408: error: no such thing; do another\n")
    monkeypatch.undo()
    with settings.override(backend="emulator"):
        expect(net(x), network(x))


def test_forks(run_python, kept, frozen):
    code = f"""
import os, ece408_op, mxnet as mx
from mxnet.gluon import nn
ece408_op.settings.configure(backend="emulator")
net = nn.HybridSequential()
net.add(nn.Conv2D(4, 3, padding=1), nn.Flatten(), nn.Dense(3))
net.initialize()
x = mx.nd.ones((2, 2, 8, 8))
net.hybridize(backend="ece408")
network = ece408_op.{frozen.__name__}(net)
for _ in range(20):
    y, z = net(x), network(x)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(abs(y - z).max().asscalar() < 1e-5)
net(x)
"""
    result = run_python(code, ECE408_CACHE=str(kept))
    assert (result.stdout, result.returncode) == ("True\n", 0), result.stderr


@pytest.mark.parametrize("order", first(1, ["ece408_op, mxnet", "mxnet, ece408_op"]))
def test_either_may_be_imported_first(run_python, order):
    code = f"""
import numpy; numpy.bool = bool
import {order}
ece408_op.settings.configure(backend="emulator")
mx = mxnet
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
optimized = net.optimize_for("ece408")
print("__ece408_part__" in optimized.tojson())
"""
    result = run_python(code)
    assert result.stdout == "True\n", result.stderr
