"""Graphs with our operator resemble MXNet's own: shapes, attributes, names, partitions."""

import json
import subprocess

import numpy as np
import pytest
from cases import every

import ece408_op
from ece408_op import errors

ATTRIBUTES = {"kernel": (3, 3), "num_filter": 8, "pad": (1, 1)}


def _both(mx):
    return mx.sym.Convolution, ece408_op.Convolution


def _integers(mx, rng, shape):
    return mx.nd.array(rng.integers(-2, 3, shape))


def _outputs(mx, symbol, arrays, mode):
    """Return a graph's outputs by an executor, with or without gradients, or by a hybridized
    block."""
    names = symbol.list_arguments()
    if mode in ("executor", "training"):
        given = {name: arrays[name] for name in names}
        room = {name: mx.nd.zeros_like(a) for name, a in given.items()}
        executor = symbol.bind(mx.cpu(), given, room if mode == "training" else None)
        outputs = executor.forward(is_train=mode == "training")
        if mode == "training":
            executor.backward([mx.nd.ones(y.shape) for y in outputs])
        return [a.asnumpy() for a in outputs] + [
            room[name].asnumpy() for name in names if mode == "training"
        ]
    block = mx.gluon.SymbolBlock(symbol, [mx.sym.Variable("data")])
    for name, parameter in block.collect_params().items():
        parameter.shape = arrays[name].shape
        parameter.initialize()
        parameter.set_data(arrays[name])
    block.hybridize(static_alloc=mode == "static", static_shape=mode == "static")
    outputs = block(arrays["data"])
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [y.asnumpy() for y in outputs]


MODES = ["executor", "training", "hybridized", "static"]


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@every(output=[0, 1], role=["data", "weight", "bias"])
def test_an_input_may_be_any_output_of_an_operator(mx, rng, mode, role, output):
    shapes = {"data": (2, 4, 9, 9), "w": (8, 4, 3, 3), "b": (8,)}
    doubled = {"data": "data", "weight": "w", "bias": "b"}[role]
    axis = 1 if role == "data" else 0
    shape = list(shapes[doubled])
    shape[axis] *= 2
    arrays = {name: _integers(mx, rng, size) for name, size in shapes.items()}
    arrays[doubled] = _integers(mx, rng, tuple(shape))
    found = []
    for convolution in _both(mx):
        inputs = {"data": "data", "weight": "w", "bias": "b"}
        given = {each: mx.sym.Variable(name) for each, name in inputs.items()}
        given[role] = mx.sym.split(given[role], num_outputs=2, axis=axis)[output]
        symbol = convolution(**given, name="c", **ATTRIBUTES)
        found.append(_outputs(mx, symbol, arrays, mode))
    np.testing.assert_equal(*found)


def test_shapes_follow_from_outputs_as_with_mxnets_own(mx):
    for convolution in _both(mx):
        data = mx.sym.Variable("a", shape=(0, 10, 0, 0))
        y = convolution(data, num_filter=21, kernel=(3, 3), pad=(1, 1), name="c")
        whole = y + mx.sym.Variable("c", shape=(5, 21, 32, 32))
        arguments, outputs, _ = whole.infer_shape()
        assert arguments[0] == (5, 10, 32, 32)
        assert outputs == [(5, 21, 32, 32)]
        one, two = mx.sym.var("one", shape=(2, 3, 10, 10)), mx.sym.var("two")
        first = convolution(one, two, no_bias=True, kernel=(2, 2), num_filter=1)
        second = convolution(two, no_bias=True, kernel=(1, 1), num_filter=1)
        found = mx.sym.Group([first, second]).infer_shape()
        assert found[0][1] == (1, 3, 2, 2)


def test_types_follow_from_outputs_as_with_mxnets_own(mx):
    found = []
    for convolution in _both(mx):
        y = convolution(mx.sym.Variable("data"), name="c", **ATTRIBUTES)
        found.append((y + mx.sym.Variable("more", dtype="float64")).infer_type())
    assert found[0] == found[1]


def _recurrent(mx, convolution):
    """Return zeros of an unknown batch, as initial states of cells."""
    state = mx.sym.zeros(shape=(0, 8, 6, 6))
    data = mx.sym.Variable("data")
    inner = convolution(state, name="h2h", **ATTRIBUTES)
    return mx.sym.tanh(convolution(data, name="i2h", **ATTRIBUTES) + inner)


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_states_of_an_unknown_batch(mx, rng, grad_req):
    executors = []
    for convolution in _both(mx):
        executor = _recurrent(mx, convolution).simple_bind(
            mx.cpu(), data=(2, 3, 6, 6), grad_req=grad_req
        )
        for name, array in executor.arg_dict.items():
            array[:] = mx.nd.array(np.random.default_rng(len(name)).random(array.shape) / 9)
        executors.append(executor)
    x = mx.nd.array(rng.random((2, 3, 6, 6)))
    results = [executor.forward(data=x)[0].asnumpy() for executor in executors]
    np.testing.assert_allclose(*results, rtol=1e-5)
    larger = executors[1].reshape(allow_up_sizing=True, data=(5, 3, 6, 6))
    five = larger.forward(data=mx.nd.concat(x, x, x[:1], dim=0))[0].asnumpy()
    np.testing.assert_array_equal(five[:2], results[1])
    np.testing.assert_array_equal(five[2:4], results[1])
    assert larger.arg_dict["h2h_weight"] is executors[1].arg_dict["h2h_weight"]


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
def test_blocks_with_states_of_an_unknown_batch(mx, rng):
    blocks = []
    for convolution in _both(mx):
        block = mx.gluon.SymbolBlock(_recurrent(mx, convolution), [mx.sym.Variable("data")])
        block.initialize(mx.init.Constant(0.01))
        block.hybridize()
        blocks.append(block)
    for batch in (2, 4, 2):
        x = mx.nd.array(rng.random((batch, 3, 6, 6)))
        np.testing.assert_allclose(*(block(x).asnumpy() for block in blocks), rtol=1e-5)
        for block in blocks:
            with mx.autograd.record():
                y = block(x)
            y.backward()
        gradients = [next(iter(block.collect_params().values())).grad() for block in blocks]
        np.testing.assert_allclose(*(g.asnumpy() for g in gradients), rtol=1e-4)


def _gradients_of_a_chain(mx, convolution, values, before, is_hybrid):
    """Return gradients of two convolutions with one weight, after `before` and followed by an
    average."""

    class Chain(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=values[1].shape)

        def hybrid_forward(self, F, x, weight):
            given = {"kernel": (3, 3), "pad": (1, 1), "num_filter": len(values[1]), "no_bias": True}
            y = before(F, x)
            for _ in range(2):
                y = convolution(F)(y, weight, **given)
            return F.Pooling(y, global_pool=True, kernel=(1, 1), pool_type="avg")

    chain = Chain()
    chain.initialize()
    chain.weight.set_data(mx.nd.array(values[1]))
    if is_hybrid:
        chain.hybridize()
    x = mx.nd.array(values[0])
    x.attach_grad()
    with mx.autograd.record():
        y = chain(x)
    y.backward()
    return x.grad.asnumpy(), chain.weight.grad().asnumpy()


def _loop(F, x):
    return F.contrib.foreach(lambda step, states: (step * 2, states), x, [F.sum(x)])[0]


@pytest.mark.parametrize("before", [lambda F, x: x, _loop], ids=["alone", "after a loop"])
def test_a_convolution_right_after_another(mx, rng, before):
    """MXNet's pooling has its gradient in a blocked layout."""
    for channels in (3, 5):
        shapes = (2, channels, 8, 8), (channels, channels, 3, 3)
        values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        expected = _gradients_of_a_chain(mx, lambda F: F.Convolution, values, before, False)
        for _ in range(30):
            given = (mx, lambda F: ece408_op.Convolution, values, before, True)
            for found, right in zip(_gradients_of_a_chain(*given), expected):
                np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3 * abs(right).max())


def test_attributes_reach_the_node_and_its_variables(mx):
    found = []
    for convolution in _both(mx):
        symbol = convolution(
            mx.sym.Variable("data", attr={"mood": "angry"}), name="conv", kernel=(1, 1),
            num_filter=1, attr={"__mood__": "so so", "wd_mult": "x"}, lr_mult=1,
        )  # fmt: skip
        everything = {"": symbol.list_attr(), **symbol.attr_dict()}
        found.append(
            {
                name: {k: v for k, v in given.items() if k not in ("op_type", "layer")}
                for name, given in everything.items()
            }
        )
    assert found[0] == found[1]
    assert found[1][""]["wd_mult"] == "x"
    assert found[1]["conv_weight"]["__mood__"] == "so so"
    with pytest.raises(TypeError, match="unexpected keyword argument 'strides'"):
        ece408_op.Convolution(mx.sym.Variable("data"), strides=(2, 2), **ATTRIBUTES)


def test_inputs_that_are_not_given_are_variables(mx):
    for convolution in (mx.sym.Convolution, ece408_op.Convolution):
        with mx.name.NameManager():
            symbol = convolution(kernel=(3, 3), num_filter=10)
        names = [f"convolution0_{role}" for role in ("data", "weight", "bias")]
        assert symbol.list_arguments() == names
        weight = convolution(weight=mx.sym.Variable("w"), name="c", no_bias=True, **ATTRIBUTES)
        assert weight.list_arguments() == ["c_data", "w"]


def test_a_graph_has_one_node_for_a_convolution(mx):
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="c", **ATTRIBUTES)
    nodes = json.loads(symbol.tojson())["nodes"]
    assert [node["name"] for node in nodes] == ["data", "c_weight", "c_bias", "c"]
    assert symbol.get_internals().list_outputs()[-1] == "c_output"


@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_a_monitor_hears_the_names_of_mxnets_own(mx, grad_req):
    seen = []
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="conv", **ATTRIBUTES)
    executor = symbol.simple_bind(mx.cpu(), data=(1, 3, 5, 5), grad_req=grad_req)
    executor.set_monitor_callback(lambda name, array: seen.append(name), monitor_all=True)
    executor.forward(is_train=False)[0].wait_to_read()
    expected = ["data", "conv_data", "conv_weight", "conv_weight", "conv_bias", "conv_bias"]
    assert [name.decode() for name in seen] == [*expected, "conv_output"]


def test_summaries_count_our_parameters(mx, capsys):
    for convolution in _both(mx):
        symbol = convolution(mx.sym.Variable("data"), name="c", **ATTRIBUTES)
        mx.viz.print_summary(symbol, {"data": (1, 3, 5, 5)})
    native, ours, _ = capsys.readouterr().out.split("Total params: 224")
    assert "c(Convolution)" in native
    assert "c(Convolution)" in ours


def test_a_network_is_exported_to_onnx(mx, rng, tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    y = ece408_op.Convolution(mx.sym.Variable("data"), stride=(2, 1), name="c", **ATTRIBUTES)
    symbol = mx.sym.Activation(
        ece408_op.Convolution(y, num_group=2, no_bias=True, name="d", **ATTRIBUTES), act_type="relu"
    )
    shapes, _, _ = symbol.infer_shape(data=(2, 3, 9, 9))
    arrays = {n: _integers(mx, rng, s) for n, s in zip(symbol.list_arguments(), shapes)}
    parameters = {name: array for name, array in arrays.items() if name != "data"}
    path = str(tmp_path / "net.onnx")
    mx.onnx.export_model(symbol, parameters, [(2, 3, 9, 9)], np.float32, path)
    model = onnx.load(path)
    assert [node.op_type for node in model.graph.node] == ["Conv", "Conv", "Relu"]
    found = ReferenceEvaluator(model).run(None, {"data": arrays["data"].asnumpy()})[0]
    np.testing.assert_array_equal(found, symbol.bind(mx.cpu(), arrays).forward()[0].asnumpy())


@pytest.fixture
def partition(mx):
    """Make a node of every square root of a graph."""
    names = mx.base.c_str_array(["sqrt"])
    mx.base.check_call(mx.base._LIB.MXSetSubgraphPropertyOpNamesV2(b"default", 1, names))
    yield lambda symbol: symbol.optimize_for("default")
    mx.base.check_call(mx.base._LIB.MXRemoveSubgraphPropertyOpNamesV2(b"default"))


def test_a_partitioned_graph_runs(mx, rng, partition):
    """MXNet cannot read such nodes from JSON, so they must remain unchanged."""
    found = []
    arrays = {"data": _integers(mx, rng, (2, 3, 9, 9))}
    arrays.update(c_weight=_integers(mx, rng, (8, 3, 3, 3)), c_bias=_integers(mx, rng, (8,)))
    for convolution in _both(mx):
        symbol = convolution(mx.sym.sqrt(mx.sym.Variable("data") ** 2), name="c", **ATTRIBUTES)
        part = partition(symbol)
        assert "_CachedOp" in part.tojson()
        found.append(part.bind(mx.cpu(), arrays).forward()[0].asnumpy())
        block = mx.gluon.SymbolBlock(part, [mx.sym.Variable("data")])
        for name, parameter in block.collect_params().items():
            parameter.shape = arrays[name].shape
            parameter.initialize()
            parameter.set_data(arrays[name])
        block.hybridize()
        found.append(block(arrays["data"]).asnumpy())
    np.testing.assert_equal(found[1:], [found[0]] * 3)


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
@pytest.mark.parametrize("mode", ["executor", "hybridized", "static"])
def test_a_graph_that_mxnet_partitioned_for_onednn_runs(mx, rng, mode):
    """Nodes with subgraphs are not always control flow."""
    symbol = mx.sym.Convolution(mx.sym.Variable("data"), name="a", **ATTRIBUTES)
    symbol = ece408_op.Convolution(mx.sym.relu(symbol), name="b", **ATTRIBUTES)
    shapes, _, _ = symbol.infer_shape(data=(2, 3, 9, 9))
    arrays = {n: _integers(mx, rng, s) for n, s in zip(symbol.list_arguments(), shapes)}
    part = symbol.get_backend_symbol("MKLDNN")
    assert "_sg_mkldnn_conv" in part.tojson()
    np.testing.assert_array_equal(
        _outputs(mx, part, arrays, mode), _outputs(mx, symbol, arrays, mode)
    )


def test_a_graph_is_partitioned_before_its_shapes_are_known(mx, partition):
    for convolution in _both(mx):
        one, two = mx.sym.var("one", shape=(2, 3, 10, 10)), mx.sym.var("two")
        first = convolution(one, two, no_bias=True, kernel=(2, 2), num_filter=1)
        second = convolution(two, no_bias=True, kernel=(1, 1), num_filter=1)
        executor = partition(mx.sym.Group([first, second])).simple_bind(mx.cpu())
        assert [y.shape for y in executor.outputs] == [(2, 1, 9, 9), (1, 1, 2, 2)]


def _graph(operator, attributes, names):
    nodes = [{"op": "null", "name": name, "inputs": []} for name in names]
    edges = [[number, 0, 0] for number in range(len(names))]
    nodes.append({"op": operator, "name": "c", "attrs": attributes, "inputs": edges})
    return {
        "nodes": nodes,
        "arg_nodes": list(range(len(names))),
        "heads": [[len(names), 0, 0]],
        "attrs": {"mxnet_version": ["int", 10901]},
    }


@pytest.mark.parametrize(
    ("operator", "attributes", "inputs"),
    [
        ("ece408_part", {"part": "1"}, 1),
        ("ece408_convolution", {"layer": "-1", "geometry": "2 1 4 1 3 3 1 1 0 0 1 1"}, 3),
        ("ece408_convolution", {"layer": "2 1 4 1 3 3 1 1 0 0 1 1 {}", "key": "0" * 32}, 3),
    ],
)
def test_internal_operators_of_a_file_are_refused(mx, tmp_path, operator, attributes, inputs):
    names = ["data", "c_weight", "c_bias"][:inputs]
    text = json.dumps(_graph(operator, attributes, names))
    with pytest.raises(mx.MXNetError, match=f"custom operator '{operator}'"):
        mx.sym.load_json(text)
    (tmp_path / "net-symbol.json").write_text(text)
    mx.nd.save(str(tmp_path / "net-0000.params"), {"arg:x": mx.nd.ones((1,))})
    with pytest.raises(errors.CheckpointMismatch, match=operator):
        ece408_op.load_checkpoint(tmp_path / "net", 0)


@pytest.mark.parametrize("inputs", [1, 2])
def test_two_variables_of_one_name_in_a_symbol_block(mx, inputs):
    """Gradients are MXNet's, hybridized or not."""
    data, other = mx.sym.Variable("data"), mx.sym.Variable("data")
    x = mx.nd.random.uniform(shape=(2, 3, 6, 6))
    found = []
    for convolution in (mx.sym.Convolution, ece408_op.Convolution):
        first, second = (
            convolution(each, kernel=(3, 3), num_filter=4, name=name)
            for each, name in ((data, "a"), (other, "b"))
        )
        symbol = mx.sym.Activation(first - 2 * second, act_type="relu")
        for is_hybrid in (False, True):
            block = mx.gluon.SymbolBlock(symbol, [mx.sym.Variable("data")] * inputs)
            block.initialize(mx.init.One())
            block.hybridize(is_hybrid)
            given = [x.copy() for _ in range(inputs)]
            for each in given:
                each.attach_grad()
            for _ in range(2):
                with mx.autograd.record():
                    y = block(*given)
                    loss = (y + block.params["a_bias"].data().sum()) ** 2
                loss.backward()
            gradients = [parameter.grad() for parameter in block.collect_params().values()]
            found.append([y, *gradients, *(each.grad for each in given)])
    for other in found[1:]:
        for ours, its in zip(other, found[0]):
            np.testing.assert_allclose(ours.asnumpy(), its.asnumpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def decimal_comma(tmp_path):
    """Return a folder of locales with de_DE, compiled from the sources in Debian's package
    locales."""
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no locale can be made: {error}")
    if not (tmp_path / "de_DE.UTF-8").is_dir():
        pytest.skip(f"no locale can be made: {made.stderr.strip()}")
    return str(tmp_path)


LOCALE = """
import locale
import numpy as np
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
import ece408_op, mxnet as mx
net = mx.gluon.nn.HybridSequential()
net.add(ece408_op.Conv2D(4, 3, in_channels=3), mx.gluon.nn.BatchNorm(epsilon=0.5),
        mx.gluon.nn.HybridLambda(lambda F, x: F.clip(x, -0.75, 1.5)))
net.initialize(mx.init.Constant(0.01))
x = mx.nd.arange(3 * 36).reshape((1, 3, 6, 6)) / 9
expected = net(x).asnumpy()
net.hybridize()
assert np.allclose(net(x).asnumpy(), expected, rtol=1e-5), (net(x).asnumpy(), expected)
print("right with", locale.localeconv()["decimal_point"])
"""


@pytest.mark.slow
def test_a_decimal_comma_changes_nothing(run_python, decimal_comma):
    result = run_python(LOCALE, LOCPATH=decimal_comma)
    assert result.stdout == "right with ,\n", result.stderr


@pytest.mark.parametrize("name", ["größe", 'of "two"\nlines', "卷積"])
def test_names_may_have_any_letters(mx, rng, name):
    """Equal layers of these names are one to the compiled operator, and two in the log."""
    net = mx.gluon.nn.HybridSequential(prefix="")
    names = [f"{name}{number}_" for number in range(2)]
    net.add(*(ece408_op.Conv2D(8, 3, padding=1, in_channels=8, prefix=each) for each in names))
    net.initialize()
    x = mx.nd.array(rng.uniform(-1, 1, (1, 8, 6, 5)))
    expected = net(x).asnumpy()
    net.hybridize()
    with ece408_op.op_times() as log:
        found = net(x).asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [each.layer for each in log] == [f"{each}fwd" for each in names]
    data = mx.sym.Variable(f"{name}_data")
    native = mx.sym.Convolution(data, kernel=(3, 3), num_filter=2, name=name)
    assert ece408_op.swap(native).list_arguments() == native.list_arguments()
