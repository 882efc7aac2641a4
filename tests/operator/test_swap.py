import json
import logging

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import CheckpointMissing, InvalidSetting
from ece408_op.operator.swapping import swap_symbol

SHAPE = (2, 3, 20, 20)


@pytest.fixture
def symbol(mx):
    """Return a stock network with every kind of convolution that a Symbol supports."""
    sym = mx.sym
    with mx.name.NameManager(), mx.AttrScope(ctx_group="dev1"):
        net = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=16, name="plain")
    net = sym.Activation(net, act_type="relu", name="relu")
    net = sym.Convolution(
        net, kernel=(3, 3), num_filter=16, num_group=16, pad=(1, 1), no_bias=True, name="depthwise",
        cudnn_tune="off", workspace=512, layout="NCHW",
    )  # fmt: skip
    net = sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool")
    net = sym.Convolution(net, kernel=(1, 1), stride=(2, 2), num_filter=16, name="strided")
    other = sym.Convolution(
        net, kernel=(3, 3), dilate=(1, 1), pad=(1, 1), num_filter=4, name="head"
    )
    volume = sym.expand_dims(net, axis=2, name="volume")
    solid = sym.Convolution(volume, kernel=(1, 1, 1), num_filter=2, name="solid")
    return sym.Group([other, sym.sum(solid, name="total")])


def _random_parameters(mx, rng, symbol, shape):
    shapes, _, _ = symbol.infer_shape(data=shape)
    return {
        name: mx.nd.array(rng.integers(-2, 3, size))
        for name, size in zip(symbol.list_arguments(), shapes)
        if name != "data"
    }


def _run(mx, symbol, params, x):
    executor = symbol.bind(mx.cpu(), {**params, "data": x})
    return [output.asnumpy() for output in executor.forward()]


def test_a_symbol_keeps_names_shapes_and_results(mx, symbol, rng):
    swapped, report = swap_symbol(symbol)
    assert report.swapped == ["plain", "depthwise", "strided", "head"]
    assert report.left == {
        "solid": "a kernel of 3 dimensions is not supported; only 1-D and 2-D convolutions are"
    }
    assert swapped.list_arguments() == symbol.list_arguments()
    assert swapped.list_outputs() == symbol.list_outputs()
    assert swapped.infer_shape(data=SHAPE) == symbol.infer_shape(data=SHAPE)
    assert set(symbol.get_internals().list_outputs()) <= set(swapped.get_internals().list_outputs())
    params = _random_parameters(mx, rng, symbol, SHAPE)
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    with ece408_op.op_times() as log:
        ours = _run(mx, swapped, params, x)
    np.testing.assert_equal(ours, _run(mx, symbol, params, x))
    assert sorted(entry.layer for entry in log) == sorted(report.swapped)


def test_attributes_stay_but_for_the_layers_name(mx, symbol):
    swapped = ece408_op.swap(symbol)
    before, after = symbol.attr_dict(), swapped.attr_dict()
    for name in ("plain", "depthwise", "strided"):
        kept = {k: v for k, v in after[name].items() if k not in ("op_type", "layer")}
        dropped = ("cudnn_tune", "workspace", "layout")
        assert kept == {k: v for k, v in before[name].items() if k not in dropped}
        assert after[name]["layer"] == name
    assert after["relu"] == before["relu"]
    assert after["plain_weight"] == before["plain_weight"]


def test_only_some_layers_and_a_backend(mx, symbol, caplog):
    with caplog.at_level(logging.INFO, logger="ece408_op"):
        swapped = ece408_op.swap(symbol, backend="reference", only=["plain", "str*"])
    nodes = {node["name"]: node for node in json.loads(swapped.tojson())["nodes"]}
    assert nodes["plain"]["op"] == nodes["strided"]["op"] == "Custom"
    assert nodes["plain"]["attrs"]["backend"] == "reference"
    assert nodes["depthwise"]["op"] == "Convolution"
    assert "swapped 2: plain, strided" in caplog.text
    assert "left depthwise: not among the requested layers" in caplog.text


def test_what_cannot_be_meant(mx, symbol):
    with pytest.raises(InvalidSetting, match=r"only='conv9' fits no convolution; there are: plain"):
        ece408_op.swap(symbol, only="conv9")
    with pytest.raises(InvalidSetting, match="unknown backend 'quantum'"):
        ece408_op.swap(symbol, backend="quantum")
    with pytest.raises(InvalidSetting, match="cannot swap a str"):
        ece408_op.swap("resnet18")


def test_gradients_through_a_swapped_symbol(mx, rng):
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="a")
    net = mx.sym.Convolution(net, kernel=(2, 2), num_filter=4, no_bias=True, name="b")
    params = _random_parameters(mx, rng, net, SHAPE)
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    gradients = []
    for symbol in (net, ece408_op.swap(net)):
        executor = symbol.simple_bind(mx.cpu(), data=SHAPE)
        executor.copy_params_from(params)
        executor.forward(is_train=True, data=x)
        executor.backward(mx.nd.ones(executor.outputs[0].shape))
        gradients.append([array.asnumpy() for array in executor.grad_arrays])
    np.testing.assert_equal(*gradients)


@pytest.fixture
def make_net(mx):
    """Return a Gluon net with a layer that cannot be swapped, and whole-numbered weights."""
    nn = mx.gluon.nn

    def make():
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(16, 3, activation="relu"), nn.MaxPool2D())
            inner = nn.HybridSequential(prefix="inner_")
            with inner.name_scope():
                inner.add(nn.Conv2D(16, 3, padding=1, groups=4, use_bias=False))
                inner.add(nn.Conv2DTranspose(4, 2))
            net.add(inner)
        net.initialize()
        net(mx.nd.zeros(SHAPE))
        rng = np.random.default_rng(5)
        for parameter in net.collect_params().values():
            parameter.set_data(mx.nd.array(rng.integers(-2, 3, parameter.shape)))
        return net

    return make


@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
def test_a_gluon_net_in_place(mx, rng, make_net, run_before, hybridize):
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    expected = make_net()(x).asnumpy()
    net = make_net()
    if hybridize is not None:
        net.hybridize(**hybridize)
    if run_before:
        net(x).wait_to_read()
    report = ece408_op.swap(net)
    assert report.swapped == ["net_conv0", "net_inner_conv0"]
    assert report.left == {"net_inner_conv1": "it is a Conv2DTranspose"}
    for _ in range(3):
        with ece408_op.op_times() as log:
            np.testing.assert_array_equal(net(x).asnumpy(), expected)
        assert [entry.layer for entry in log] == ["net_conv0_fwd", "net_inner_conv0_fwd"]


def test_a_swapped_net_exports_and_comes_back(mx, rng, make_net, tmp_path, run_python):
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    net = make_net()
    ece408_op.swap(net)
    net.hybridize()
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"), epoch=3)
    np.save(tmp_path / "x.npy", x.asnumpy())
    code = (
        "import sys, numpy as np, ece408_op, mxnet as mx\n"
        "net = mx.gluon.SymbolBlock.imports('net-symbol.json', ['data'], 'net-0003.params')\n"
        "with ece408_op.op_times() as log:\n"
        "    np.save('y.npy', net(mx.nd.array(np.load('x.npy'))).asnumpy())\n"
        "assert len(log) == 2\n"
    )
    result = run_python(f"import os; os.chdir({str(tmp_path)!r})\n" + code)
    assert result.returncode == 0, result.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


def test_a_symbol_block_is_swapped_too(mx, rng, make_net, tmp_path):
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    net = make_net()
    net.hybridize()
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    block = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    np.testing.assert_array_equal(block(x).asnumpy(), expected)
    report = ece408_op.swap(block)
    assert len(report.swapped) == 2
    with ece408_op.op_times() as log:
        np.testing.assert_array_equal(block(x).asnumpy(), expected)
    assert len(log) == 2


def test_parameter_files_stay_those_of_gluon(mx, rng, make_net, tmp_path):
    net = make_net()
    ece408_op.swap(net)
    net.save_parameters(str(tmp_path / "swapped.params"))
    other = make_net()
    for parameter in other.collect_params().values():
        parameter.set_data(parameter.data() * 0)
    other.load_parameters(str(tmp_path / "swapped.params"))
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    np.testing.assert_array_equal(other(x).asnumpy(), net(x).asnumpy())


@pytest.fixture
def stored(mx, rng, tmp_path):
    """Save a checkpoint of a stock network; return its prefix, an input and the answer."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="first")
    net = mx.sym.Convolution(net, kernel=(3, 3), num_filter=4, pad=(1, 1), name="second")
    params = _random_parameters(mx, rng, net, SHAPE)
    mx.model.save_checkpoint(str(tmp_path / "stock"), 4, net, params, {})
    x = rng.integers(-2, 3, SHAPE).astype(np.float32)
    return tmp_path / "stock", x, _run(mx, net, params, mx.nd.array(x))[0]


def test_a_checkpoint_swapped_by_the_command_scores_the_same_elsewhere(
    stored, run_here, run_python, tmp_path
):
    prefix, x, expected = stored
    result = run_here("swap", str(prefix), "4", str(tmp_path / "out" / "ours"))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "swapped 2: first, second\n"
    np.save(tmp_path / "x.npy", x)
    code = (
        "import numpy as np, ece408_op, mxnet as mx\n"
        f"symbol, args, aux = mx.model.load_checkpoint({str(tmp_path / 'out' / 'ours')!r}, 4)\n"
        f"x = mx.nd.array(np.load({str(tmp_path / 'x.npy')!r}))\n"
        "with ece408_op.op_times() as log:\n"
        "    y = symbol.bind(mx.cpu(), {**args, 'data': x}).forward()[0].asnumpy()\n"
        "assert [entry.layer for entry in log] == ['first', 'second']\n"
        f"np.save({str(tmp_path / 'y.npy')!r}, y)\n"
    )
    assert run_python(code).returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


def test_bad_input_of_the_command(stored, run_here, tmp_path):
    prefix, _, _ = stored
    cases = [
        (
            ("swap", str(prefix), "7", "out"),
            CheckpointMissing.exit_code,
            "stock-0007.params is not",
        ),
        (("swap", str(prefix), "x", "out"), 2, "invalid int value: 'x'"),
        (("swap", str(prefix), "4", "out", "--only", "z"), InvalidSetting.exit_code, "only='z'"),
        (("swap", str(prefix), "4", "/dev/null/x"), 10, "cannot write /dev/null"),
        (("swap", str(prefix), "4", str(prefix)), 16, "would be overwritten; give another prefix"),
        (("swap", str(prefix), "4", "out", "--verify"), 16, "add --image, such as --image 3x224x"),
        (("swap", str(prefix), "4", "out", "--verify", "--image", "1x2x2"), 16, "images of 1x2x2"),
    ]
    for arguments, code, message in cases:
        result = run_here(*arguments)
        assert result.returncode == code, result.stderr
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out-symbol.json").exists()


def test_a_symbol_is_unswapped(mx, symbol, rng):
    swapped = ece408_op.swap(symbol)
    native = ece408_op.unswap(swapped)
    nodes = json.loads(native.tojson())["nodes"]
    assert [each["name"] for each in nodes if each["op"] == "Custom"] == []
    assert sum(each["op"] == "Convolution" for each in nodes) == 5
    assert native.list_arguments() == symbol.list_arguments()
    params = _random_parameters(mx, rng, symbol, SHAPE)
    x = mx.nd.array(rng.integers(-2, 3, SHAPE))
    with ece408_op.op_times() as log:
        found = _run(mx, native, params, x)
    assert len(log) == 0
    np.testing.assert_equal(found, _run(mx, symbol, params, x))


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_net_is_unswapped(mx, rng, hybrid):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=2), nn.Conv2D(3, 2, in_channels=4, activation="relu"))
    net.initialize(mx.init.Xavier())
    if hybrid:
        net.hybridize()
    x = mx.nd.array(rng.standard_normal((2, 2, 9, 9)))
    before = net(x).asnumpy()
    ece408_op.swap(net, backend="reference", precision="tf32")
    net(x).wait_to_read()
    assert ece408_op.unswap(net) == [net[0].name, net[1].name]
    assert [type(layer) for layer in net] == [nn.Conv2D, nn.Conv2D]
    with ece408_op.op_times() as log:
        np.testing.assert_array_equal(net(x).asnumpy(), before)
    assert len(log) == 0
    assert ece408_op.unswap(net) == []


def test_what_is_no_network_is_not_unswapped():
    with pytest.raises(InvalidSetting, match="cannot unswap a int"):
        ece408_op.unswap(3)
