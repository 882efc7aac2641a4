"""The compiled operator, used whenever MXNet runs our graphs without gradients."""

import json
import time

import numpy as np
import pytest
from programs import together

import ece408_op
from ece408_op import dispatch, errors, settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.cli import doctor
from ece408_op.errors import InvalidProblem, InvalidSetting
from ece408_op.operator import compiled_operator
from ece408_op.operator.graphs import graph_json
from ece408_op.operator.graphs.compiled_graphs import compiled
from ece408_op.operator.python_operator import ConvolutionOp

CASES = [
    ({"kernel": (3, 3), "num_filter": 5}, (2, 3, 9, 7), "float32"),
    ({"kernel": (5, 5), "num_filter": 8, "no_bias": True}, (3, 4, 12, 31), "float32"),
    ({"kernel": (3, 2), "num_filter": 4, "stride": (2, 1), "pad": (1, 3)}, (1, 2, 8, 5), "float64"),
    (
        {"kernel": (3, 3), "num_filter": 6, "num_group": 3, "dilate": (2, 1)},
        (2, 6, 9, 9),
        "float32",
    ),
    ({"kernel": (1, 1), "num_filter": 16}, (1, 16, 20, 20), "float16"),
    ({"kernel": (4,), "num_filter": 3, "stride": (2,), "pad": (1,)}, (2, 5, 11), "float32"),
]


@pytest.fixture(autouse=True)
def _operator_is_there(mx):
    assert compiled_operator.missing() is None


@pytest.fixture
def python_calls(noted):
    """Record the calls of the operator written in Python."""
    return noted(ConvolutionOp, "forward")


def _block(mx, attributes, shape, dtype, convolution=ece408_op.Convolution):
    class Net(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            spatial = attributes["kernel"]
            filters, groups = attributes["num_filter"], attributes.get("num_group", 1)
            with self.name_scope():
                sizes = (filters, shape[1] // groups, *spatial)
                self.weight = self.params.get("weight", shape=sizes, dtype=dtype)
                if not attributes.get("no_bias"):
                    self.bias = self.params.get("bias", shape=(filters,), dtype=dtype)

        def hybrid_forward(self, F, x, weight, bias=None):
            take = convolution if convolution is not None else F.Convolution
            return take(x, weight, bias, name="layer", **attributes)

    net = Net()
    net.initialize()
    net.hybridize()
    return net


def _set_weights(mx, rng, *nets):
    for name, parameter in nets[0].collect_params().items():
        values = rng.integers(-2, 3, parameter.shape)
        for net in nets:
            net.collect_params()[name].set_data(mx.nd.array(values, dtype=parameter.dtype))


def _data(mx, rng, shape, dtype="float32"):
    return mx.nd.array(rng.integers(-2, 3, shape), dtype=dtype)


@pytest.mark.parametrize(("attributes", "shape", "dtype"), CASES)
def test_nets_are_right_without_python(mx, rng, python_calls, attributes, shape, dtype):
    ours = _block(mx, attributes, shape, dtype)
    eager = _block(mx, attributes, shape, dtype)
    eager.hybridize(False)
    _set_weights(mx, rng, ours, eager)
    for batch in (shape[0], shape[0] + 2):
        x = _data(mx, rng, (batch, *shape[1:]), dtype)
        for net in (ours, eager):
            y = net(x).asnumpy()
            with mx.autograd.record():
                np.testing.assert_array_equal(y, net(x).asnumpy())
            assert python_calls == []
            with mx.autograd.record(train_mode=False):
                np.testing.assert_array_equal(y, net(x).asnumpy())
            # A graph under autograd.record is compiled for training.
            assert len(python_calls) == (net is ours)
            python_calls.clear()


@pytest.mark.parametrize(("attributes", "shape", "dtype"), CASES)
@pytest.mark.parametrize("simple", [False, True])
def test_an_executor_without_gradients_is_right(
    mx, rng, monkeypatch, python_calls, attributes, shape, dtype, simple
):
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="layer", **attributes)
    shapes, outputs, _ = symbol.infer_shape(data=shape)
    arrays = {n: _data(mx, rng, s, dtype) for n, s in zip(symbol.list_arguments(), shapes)}
    if simple:
        types = dict.fromkeys(arrays, np.dtype(dtype).type)
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", type_dict=types, data=shape)
        executor.copy_params_from(arrays)
    else:
        executor = symbol.bind(mx.cpu(), arrays)
    found = executor.forward()[0].asnumpy()
    assert python_calls == []
    assert found.shape == outputs[0]
    monkeypatch.setattr(compiled_operator, "_missing", "this executor does without it")
    expected = symbol.bind(mx.cpu(), arrays).forward()[0].asnumpy()
    assert len(python_calls) == 1
    np.testing.assert_array_equal(found, expected)


def test_a_module_for_prediction_and_its_reshape(mx, rng, python_calls):
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")
    module = mx.mod.Module(symbol, data_names=["data"], label_names=None)
    module.bind([("data", (2, 3, 8, 8))], for_training=False)
    module.init_params(mx.init.One())
    for batch in (2, 5):
        x = _data(mx, rng, (batch, 3, 8, 8))
        module.forward(mx.io.DataBatch([x]))
        found = module.get_outputs()[0].asnumpy()
        w = mx.nd.ones((4, 3, 3, 3))
        expected = mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=4, no_bias=True).asnumpy()
        np.testing.assert_array_equal(
            found, expected + module.get_params()[0]["c_bias"].asnumpy()[0]
        )
    assert python_calls == []


def test_training_and_inference_take_turns(mx, rng):
    """Calls under autograd.record have gradients, and the other calls see their updates."""
    attributes, shape = {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8)
    nets = [_block(mx, attributes, shape, "float32", c) for c in (ece408_op.Convolution, None)]
    _set_weights(mx, rng, *nets)
    trainers = [
        mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}) for net in nets
    ]
    for _ in range(5):
        x = _data(mx, rng, shape)
        before = []
        for net, trainer in zip(nets, trainers):
            before.append(net(x).asnumpy())
            with mx.autograd.record():
                loss = (net(x) * x.sum()).sum()
            loss.backward()
            trainer.step(1024)
        np.testing.assert_allclose(*before, rtol=1e-4, atol=1e-4)


def test_exported_and_held_graphs_stay_what_they_are(mx, rng, tmp_path):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    net(_data(mx, rng, (2, 3, 8, 8))).wait_to_read()
    net.export(str(tmp_path / "net"))
    text = (tmp_path / "net-symbol.json").read_text()
    assert "ece408_conv" in text
    assert compiled_operator.NAME not in text


def test_a_compiled_graph_has_the_same_arguments_and_outputs(mx):
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="c", kernel=(3, 3), num_filter=4)
    shapes = {"data": (2, 3, 8, 8), "c_weight": (4, 3, 3, 3), "c_bias": (4,)}
    graph = graph_json.read(symbol)
    found = compiled(symbol, graph, shapes)
    operators = {node["op"] for node in json.loads(found.tojson())["nodes"]}
    assert operators == {"null", compiled_operator.NAME}
    assert found.list_arguments() == symbol.list_arguments()
    assert found.list_outputs() == symbol.list_outputs()
    assert compiled(symbol, graph, {"data": (2, 3, 8, 8)}) is None


@pytest.mark.parametrize(("attributes", "shape", "dtype"), CASES)
def test_op_times_are_those_of_the_compiled_operator(
    mx, rng, monkeypatch, attributes, shape, dtype
):
    monkeypatch.setattr(dispatch, "forward", _never)
    net = _block(mx, attributes, shape, dtype)
    x = _data(mx, rng, shape, dtype)
    net(x).wait_to_read()
    seen = []
    with ece408_op.op_times(seen.append) as log:
        start = time.perf_counter()
        net(x).wait_to_read()
        elapsed = time.perf_counter() - start
        assert log == seen
    net(x).wait_to_read()
    (entry,) = log
    problem = entry.problem
    assert (entry.layer, entry.direction, entry.backend) == ("net_layer", "forward", "cpu")
    assert (problem.batch, problem.filters) == (shape[0], attributes["num_filter"])
    isa = native.isas()[0]
    assert entry.kernel == f"{native.choose(problem, 'forward', isa)}_{isa}"
    assert 0 < entry.seconds < elapsed
    assert (entry.gpu, entry.precision) == (None, "float32")


def _never(*arguments, **keywords):
    raise AssertionError("Python computes")


def test_op_times_follow_settings(mx, rng):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    x = _data(mx, rng, (2, 3, 8, 8))
    with ece408_op.op_times() as log:
        for isa in native.isas():
            with settings.override(isa=isa):
                net(x).wait_to_read()
        with settings.override(backend="reference"):
            net(x).wait_to_read()
    assert [entry.kernel.split("_")[-1] for entry in log] == [*native.isas(), "reference"]


def test_op_times_of_many_threads(mx, rng):
    nets = [_block(mx, {"kernel": (3, 3), "num_filter": m}, (2, 3, 8, 8), "float32")
            for m in range(1, 7)]  # fmt: skip
    x = _data(mx, rng, (2, 3, 8, 8))

    def work(net):
        for _ in range(20):
            net(x).wait_to_read()

    with ece408_op.op_times() as log:
        together(work, nets)
    filters = [entry.problem.filters for entry in log]
    assert sorted(filters) == sorted(20 * list(range(1, 7)))


def test_what_takes_op_times_fails_where_the_result_is_read(mx, rng):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    x = _data(mx, rng, (2, 3, 8, 8))
    failing = pytest.raises(errors.OperatorFailed, match=r"ValueError: .* is not in list")
    with ece408_op.op_times([].index), failing, errors.surfaced():
        net(x).asnumpy()


def test_what_can_be_done_ahead_is_done_when_a_graph_is_bound(mx, noted):
    """On a GPU a kernel is compiled then, so that the first op time excludes it."""
    prepared = noted(dispatch, "prepare", lambda p, _, direction="forward": f"{p} {direction}")
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4)
    with settings.override():
        symbol.simple_bind(mx.cpu(), grad_req="null", data=(2, 3, 8, 7))
    assert prepared == ["b2,c3,h8,w7,m4,k3x3,bias forward"]


def test_settings_are_followed_from_call_to_call(mx, rng, noted, monkeypatch):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    _set_weights(mx, rng, net)
    x = _data(mx, rng, (2, 3, 8, 8))
    expected = net(x).asnumpy()
    computed = noted(ReferenceBackend, "forward")
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert len(computed) == 0
    with settings.override(backend="reference"):
        np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert len(computed) == 1
    net(x).wait_to_read()
    assert len(computed) == 1
    with monkeypatch.context() as environment:
        environment.setenv("ECE408_BACKEND", "reference")
        np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert len(computed) == 2
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    assert len(computed) == 2


def test_errors_are_in_this_packages_words(mx, rng, monkeypatch):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    net(_data(mx, rng, (2, 3, 8, 8))).wait_to_read()
    with pytest.raises(InvalidProblem, match="weight has shape"), errors.surfaced():
        net(_data(mx, rng, (2, 4, 8, 8))).asnumpy()
    with pytest.raises(InvalidProblem, match="covers 3x3 pixels"), errors.surfaced():
        net(_data(mx, rng, (2, 3, 2, 8))).asnumpy()
    monkeypatch.setenv("ECE408_ISA", "mmx")
    with pytest.raises(InvalidSetting, match="unknown instruction set 'mmx'"), errors.surfaced():
        net(_data(mx, rng, (2, 3, 8, 8))).asnumpy()
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), kernel=(9, 9), num_filter=4)
    with pytest.raises(InvalidProblem, match="covers 9x9 pixels"), errors.surfaced():
        symbol.simple_bind(mx.cpu(), grad_req="null", data=(2, 3, 8, 8))


def _layer(mx, convolution):
    return convolution(mx.sym.Variable("data"), name="c", kernel=(3, 3), num_filter=4)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "shapes",
    [
        {"data": [2, 3, 8, 8]},
        {"dta": (2, 3, 8, 8)},
        {"data": (2, 3)},
        {"data": (2, 3, 8, 8), "c_weight": (4, 9, 3, 3)},
        {"c_weight": (4, 3, 3, 3), "c_bias": (4,)},
        {},
    ],
)
def test_wrong_shapes_are_left_to_simple_bind(mx, capfd, shapes):
    for convolution in (mx.sym.Convolution, ece408_op.Convolution):
        with pytest.raises(RuntimeError, match="simple_bind error"):
            _layer(mx, convolution).simple_bind(mx.cpu(), grad_req="null", **shapes)
    assert capfd.readouterr().out == ""


def test_wrong_arguments_are_left_to_bind(mx):
    symbol = _layer(mx, ece408_op.Convolution)
    arrays = [mx.nd.ones(shape) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), (4,))]
    with pytest.raises(TypeError, match="Context type error"):
        symbol.bind("cpu", arrays)
    with pytest.raises(TypeError, match="Only accept list of NDArrays"):
        symbol.bind(mx.cpu(), [*arrays[:2], None])


def test_networks_without_our_operator_are_mxnets(mx, rng):
    shape = (2, 3, 8, 8)
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, shape, "float32", None)
    net(_data(mx, rng, shape)).wait_to_read()
    assert type(net._cached_op) is mx.ndarray.CachedOp
    assert net._cached_op._ours is None
    assert graph_json.read(_layer(mx, mx.sym.Convolution)) is None
    assert graph_json.read(_layer(mx, ece408_op.Convolution)) is not None


def test_a_monitor_sees_every_layer(mx, rng):
    net = _block(mx, {"kernel": (3, 3), "num_filter": 4}, (2, 3, 8, 8), "float32")
    x = _data(mx, rng, (2, 3, 8, 8))
    net(x).wait_to_read()
    seen = []
    net.register_op_hook(lambda node, operator, array: seen.append(node))
    net(x).wait_to_read()
    mx.nd.waitall()
    assert "net_layer_output" in [name.decode() for name in seen]


def test_many_threads_with_graphs_of_their_own(mx, rng):
    attributes = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
    inputs = [_data(mx, rng, (2, 3, 9 + i, 8)) for i in range(6)]
    w = _data(mx, rng, (4, 3, 3, 3))
    expected = [mx.nd.Convolution(x, w, **attributes).asnumpy() for x in inputs]
    symbol = ece408_op.Convolution(mx.sym.Variable("x"), mx.sym.Variable("w"), **attributes)

    def work(i):
        # Binding one symbol on several threads at once sometimes corrupted MXNet's memory.
        for _ in range(40):
            executor = symbol.bind(mx.cpu(), {"x": inputs[i], "w": w})
            np.testing.assert_array_equal(executor.forward()[0].asnumpy(), expected[i])

    together(work, range(len(inputs)))


def test_forks_in_flight_do_not_hang(run_python):
    """The first call of a layer calls Python, which a fork delays."""
    code = """
import os, ece408_op, mxnet as mx
symbol = ece408_op.Convolution(mx.sym.Variable("x"), mx.sym.Variable("w"), kernel=(3, 3),
                               num_filter=4, no_bias=True)
for size in range(8, 38):
    x, w = mx.nd.ones((2, 3, size, size)), mx.nd.ones((4, 3, 3, 3))
    executor = symbol.bind(mx.cpu(), {"x": x, "w": w})
    executor.forward()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if executor.forward()[0].asnumpy().max() == 27 else 1)
    assert os.waitpid(pid, 0)[1] == 0
print("done")
"""
    result = run_python(code)
    assert result.stdout == "done\n", result.stderr


def test_without_the_library_python_computes(run_python):
    code = """
from pathlib import Path
from ece408_op.operator import compiled_operator
compiled_operator.LIBRARY = Path("/nowhere/lib.so")
import ece408_op, mxnet as mx
net = ece408_op.Conv2D(4, 3, in_channels=3)
net.initialize(mx.init.One()); net.hybridize()
print(net(mx.nd.ones((1, 3, 5, 5))).asnumpy().max(), compiled_operator.missing())
"""
    expected = "27.0 /nowhere/lib.so is not there; run `pip install .` in the checkout\n"
    result = run_python(code)
    assert result.stdout == expected, result.stderr


def test_doctor_says_whether_there_is_one(monkeypatch):
    def finding():
        return next(f for f in doctor.diagnose().findings if f.name == "compiled operator")

    assert (finding().status, finding().detail) == ("ok", compiled_operator.LIBRARY.name)
    monkeypatch.setattr(compiled_operator, "_missing", "it does not load")
    assert finding().detail == "it does not load"
