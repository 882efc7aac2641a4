"""Partition of networks: the parts that run on the GPU, in the emulator, and those left to the
CPU."""

import json

import numpy as np
import pytest
from gluon_nets import SHAPE, expect, make_net, make_symbol, operators, parameters_of, raising, sort

import ece408_op
from ece408_op import errors, settings
from ece408_op.errors import InvalidProblem
from ece408_op.operator import networks
from ece408_op.operator.graphs import partition

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def x(mx):
    return mx.nd.array(np.random.default_rng(7).standard_normal(SHAPE))


@pytest.mark.parametrize("way", ["hybridize", "to_gpu", "symbol"])
def test_an_unsupported_operator_in_the_middle(mx, x, way, frozen):
    net = make_net(mx, middle=sort)
    expected = net(x)
    if way == "to_gpu":
        network = frozen(net)
        expect(network(x), expected)
        assert network.report.parts == [3, 4]
        assert [name.rstrip("0123456789")[-4:] for name in network.report.left] == ["sort"]
        return
    if way == "hybridize":
        net.hybridize(backend="ece408")
        expect(net(x), expected)
        symbol = net._cached_graph[1]
    else:
        symbol = _graph(mx, net).optimize_for("ece408")
        arrays = {n: p.data() for n, p in net.collect_params().items()}
        states = {n: arrays[n] for n in symbol.list_auxiliary_states()}
        arguments = {n: arrays.get(n, x) for n in symbol.list_arguments()}
        executor = symbol.bind(mx.cpu(), arguments, aux_states=states)
        expect(executor.forward()[0], expected)
    assert operators(symbol) == ["part 0", "sort", "part 1"]


def _graph(mx, net):
    return net(mx.sym.Variable("data"))


def test_another_size_takes_no_other_partition(mx, x, frozen, monkeypatch):
    net = make_net(mx)
    network = frozen(net)
    expect(network(x), net(x))
    parts = network.report.parts
    monkeypatch.setattr(partition, "choose", raising(AssertionError("chosen again")))
    for shape in ((3, *SHAPE[1:]), (1, *SHAPE[1:]), SHAPE):
        other = mx.nd.random.normal(shape=shape)
        expect(network(other), net(other))
        assert network.report.parts == parts
        assert network.report.bytes_in == 4 * other.size


def test_a_size_that_is_not_computed_as_a_whole(mx, frozen, monkeypatch):
    """Arrays beyond a limit, as those of 2**31 elements are, stay with MXNet, and only these."""
    sym = mx.sym
    c = sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=2, name="lim_c")
    larger = sym.UpSampling(c, scale=4, sample_type="nearest", name="lim_up")
    symbol = sym.mean(larger, axis=(2, 3), name="lim_mean")
    parameters = parameters_of(mx, symbol, (1, 3, 4, 4))
    network = frozen(symbol, parameters)
    monkeypatch.setattr("ece408_op.network.builder._MOST_ELEMENTS", 1000)
    for size, left in ((4, []), (5, []), (6, ["lim_up"])):
        x = mx.nd.random.normal(shape=(1, 3, size, size))
        expected = symbol.bind(mx.cpu(), {"data": x, **parameters}).forward()[0]
        expect(network(x), expected)
        assert left == [name for name in network.report.left if name == "lim_up"]


def test_a_way_round_an_unsupported_operator(mx, x):
    """A part must not depend on itself through other nodes."""
    sym = mx.sym
    first = sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=2, name="c1")
    symbol = sym.Group([sym.Convolution(first + sym.sort(first), kernel=(1, 1), num_filter=3,
                                        name="c2"), first])  # fmt: skip
    parameters = parameters_of(mx, symbol)
    expected = symbol.bind(mx.cpu(), {"data": x, **parameters}).forward()
    found = symbol.optimize_for("ece408").bind(mx.cpu(), {"data": x, **parameters}).forward()
    for each, its in zip(found, expected):
        expect(each, its)


def test_the_report(mx):
    symbol = make_symbol(mx)
    report = ece408_op.gpu_report(symbol, data=SHAPE)
    assert (report.parts, report.nodes, report.left) == ([4], 4, {})
    assert report.bytes_out == SHAPE[0] * 3 * 4
    text = str(ece408_op.gpu_report(mx.sym.sort(symbol, name="odd")))
    assert text.startswith("on the GPU: 4 of 5 nodes, in parts of: 4\non the CPU: odd: ")
    lrn = mx.sym.LRN(mx.sym.FullyConnected(mx.sym.Variable("x"), num_hidden=3), nsize=3, name="n")
    assert not ece408_op.gpu_report(lrn).left
    assert ece408_op.gpu_report(lrn, training=True).left == {"n": "its gradient is not computed"}
    alone = ece408_op.gpu_report(mx.sym.Activation(mx.sym.Variable("data"), act_type="relu"))
    assert alone.parts == []


def test_what_cannot_be_computed_on_its_arrays_is_left_with_the_reason(mx, x, frozen):
    sym = mx.sym
    first = sym.Flatten(
        sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=4, name="c")
    )
    places = sym.topk(first, k=4, ret_typ="indices", dtype="int32", name="places")
    largest = sym.Cast(places + 1, dtype="float32", name="cast")
    random = sym.LeakyReLU(
        sym.FullyConnected(largest, num_hidden=3, name="fc"), act_type="rrelu", name="rrelu"
    )
    parameters = parameters_of(mx, random)
    expected = random.bind(mx.cpu(), {"data": x, **parameters}).forward()
    network = frozen(random, parameters)
    expect(network(x)[0], expected[0])
    left = network.report.left
    assert left["cast"] == "arrays of int32 are not computed"
    assert left["rrelu"] == "output 1 is not computed"
    whole = ece408_op.gpu_report(random, data=SHAPE)
    assert (whole.parts, whole.left) == (network.report.parts, left)


def test_integers_of_one_input_leave_the_rest_on_the_gpu(mx, frozen):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(nn.Embedding(9, 4), nn.Dense(6, flatten=False), nn.Dense(2))
    net.initialize(mx.init.Xavier(magnitude=3))
    tokens = mx.nd.array([[1, 2, 8], [0, 5, 7]], dtype="int32")
    expected = net(tokens)
    network = frozen(net)
    expect(network(tokens), expected)
    assert network.report.parts == [2]
    net.hybridize(backend="ece408")
    expect(net(tokens), expected)


def test_nodes_of_one_name_are_all_reported(mx):
    x = mx.sym.sort(mx.sym.sort(mx.sym.Variable("data"), name="odd"), name="odd")
    assert list(ece408_op.gpu_report(x).left) == ["odd", "odd (2)"]


def test_another_number_of_inputs_is_refused(mx, x, frozen):
    net = make_net(mx)
    network = frozen(net)
    network(x)
    for each in (net, network):
        with pytest.raises(TypeError, match="positional arguments"):
            each(x, x)
    symbol = make_symbol(mx)
    network = frozen(symbol, parameters_of(mx, symbol))
    network(x)
    with pytest.raises(InvalidProblem, match=r"takes 1 arrays \(data\), and is called with 2"):
        network(x, x)


def test_parameters_that_the_cpu_reads_stay_there(mx, frozen):
    """An LSTM's parameters are concatenated on the CPU, which reads them."""
    gluon = mx.gluon

    class Net(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.layer = gluon.nn.Conv2D(4, 3, padding=1)
            self.lstm = gluon.rnn.LSTM(5, 2, bidirectional=True, input_size=12)

        def hybrid_forward(self, F, x):
            return self.lstm(F.transpose(F.reshape(self.layer(x), (0, -3, 0)), (2, 0, 1)))

    net = Net()
    net.initialize()
    x = mx.nd.random.normal(shape=(2, 1, 3, 7))
    expected = net(x)
    network = frozen(net)
    expect(network(x), expected)
    data, read = 2 * 3 * 7 * 4, 2 * 4 * 3 * 7 * 4
    symbol = net(mx.sym.Variable("data"))
    for report in (network.report, ece408_op.gpu_report(symbol, data=x.shape)):
        assert (report.bytes_in, report.bytes_out) == (data, read)


def test_a_graph_of_many_parts_is_cut_in_one_pass(mx, monkeypatch):
    """Each node is visited equally often, whatever the number of parts."""
    calls = []
    made = partition.parts.inside_of
    monkeypatch.setattr(
        partition.parts,
        "inside_of",
        lambda graph, group, *a: calls.extend(group) or made(graph, group, *a),
    )
    x = mx.sym.Variable("data")
    for number in range(20):
        x = mx.sym.sort(mx.sym.FullyConnected(x, num_hidden=3, name=f"fc{number}"))
    assert len(partition.choose(x).groups) == 20
    assert len(calls) == len(set(calls)) == 20


@pytest.mark.parametrize("frozen", [ece408_op.to_gpu, ece408_op.to_cpu])
def test_a_layer_that_requests_another_backend_stays_with_it(mx, x, frozen):
    layer = ece408_op.Conv2D(3, 3, in_channels=2, backend="reference")
    layer.initialize()
    expected = layer(x)
    network = frozen(layer)
    expect(network(x), expected)
    assert list(network.report.left.values()) == ["backend=reference is requested"]


def test_without_a_gpu_mxnet_computes(mx, x, capsys, monkeypatch, frozen):
    monkeypatch.setattr(networks, "_last_said", "")
    monkeypatch.setattr(
        networks.gpu, "require_our_kernels", raising(errors.NoUsableGpu("no NVIDIA driver"))
    )
    net = make_net(mx)
    expected = net(x)
    with settings.override(backend=None):
        expect(frozen(net)(x), expected)
        net.hybridize(backend="ece408")
        expect(net(x), expected)
        assert "part 0" not in operators(net._cached_graph[1])
        parameters = parameters_of(mx, make_symbol(mx))
        frozen(make_symbol(mx), parameters)(x)
    line = "ece408: the network runs on the CPU, by MXNet: no NVIDIA driver\n"
    assert capsys.readouterr() == ("", line)


def test_a_backend_that_is_asked_for(mx, x, capsys):
    net = make_net(mx)
    with settings.override(backend="cpu"):
        expect(ece408_op.to_gpu(net)(x), net(x))
    assert "MXNet: backend cpu is requested (ECE408_BACKEND)\n" in capsys.readouterr().err


def test_a_kernel_that_is_asked_for_is_told_about_once(mx, x, capsys, monkeypatch):
    monkeypatch.setattr(networks, "_said", set())
    net = make_net(mx)
    with settings.override(kernel="1_naive"):
        for _ in range(2):
            expect(ece408_op.to_gpu(net)(x), net(x))
    # Other lines may say that another process compiles the emulator.
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "1_naive" in line] == [
        "ece408: kernel 1_naive is requested, but not used in a whole network on the GPU, which "
        "chooses its own; it is for layers that run one by one"
    ]


def test_types_that_do_not_go_there(mx, x, capsys):
    net = make_net(mx)
    net.cast("float64")
    expected = net(x.astype("float64"))
    net.hybridize(backend="ece408")
    expect(net(x.astype("float64")), expected)
    assert "it has arrays of float64" in capsys.readouterr().err


# --- partitioned again for the arrays of a call


def _with_a_refused_node(mx):
    """Append a mean over axes: float32 is supported, integers are not; attributes do not tell the
    dtype."""
    sym = mx.sym
    first = sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=4, name="c")
    places = sym.argmax(first, axis=1, name="places")
    chosen = sym.Cast(places, dtype="int32", name="whole") + sym.Cast(
        sym.Variable("more"), dtype="int32", name="more_whole"
    )
    ends = sym.Cast(chosen * 2, dtype="float32", name="ends")
    return sym.FullyConnected(sym.Flatten(ends), num_hidden=3, name="fc")


def _arrays_for(mx, symbol, batch):
    rng = np.random.default_rng(3)
    shapes, _, _ = symbol.infer_shape(data=(batch, *SHAPE[1:]), more=(batch, *SHAPE[2:]))
    return {
        name: mx.nd.array(rng.standard_normal(shape))
        for name, shape in zip(symbol.list_arguments(), shapes)
    }


def test_an_executor_of_a_graph_cut_without_shapes(mx):
    symbol = _with_a_refused_node(mx)
    cut = symbol.optimize_for("ece408")
    arrays = _arrays_for(mx, symbol, 2)
    plain, ours = (each.bind(mx.cpu(), dict(arrays)) for each in (symbol, cut))
    expect(ours.forward()[0], plain.forward()[0])
    data = mx.nd.ones(SHAPE)
    expect(ours.forward(data=data)[0], plain.forward(data=data)[0])
    arrays["fc_bias"][:] = 9
    expect(ours.forward()[0], plain.forward()[0])
    expect(ours.forward(is_train=True)[0], plain.forward(is_train=True)[0])
    more = {"data": (5, *SHAPE[1:]), "more": (5, *SHAPE[2:])}
    larger = [each.reshape(allow_up_sizing=True, **more) for each in (plain, ours)]
    values = _arrays_for(mx, symbol, 5)
    for each in larger:
        each.copy_params_from(values)
    expect(larger[1].forward()[0], larger[0].forward()[0])


def test_an_executor_with_a_monitor(mx, x):
    """It hears every layer, also of a part."""
    symbol = make_symbol(mx)
    parameters = parameters_of(mx, symbol)
    heard = []
    for each in (symbol, symbol.optimize_for("ece408", parameters, {})):
        executor = each.simple_bind(mx.cpu(), data=SHAPE, softmax_label=SHAPE[:1])
        executor.copy_params_from({**parameters, "data": x})
        executor.forward()
        names = []
        executor.set_monitor_callback(lambda name, array, names=names: names.append(name))
        executor.reshape(data=SHAPE).forward()
        executor.forward()[0].wait_to_read()
        heard.append(names)
    assert len(heard[0]) > 2
    assert heard[0] == heard[1]


def test_a_cached_op_of_a_graph_cut_without_shapes(mx):
    symbol = _with_a_refused_node(mx)
    cut = symbol.optimize_for("ece408")
    ops = []
    for each in (symbol, cut):
        names = each.list_inputs()
        data = [n for n, name in enumerate(names) if name in ("data", "more")]
        others = [n for n in range(len(names)) if n not in data]
        flags = [("data_indices", data), ("param_indices", others)]
        ops.append((names, mx.nd.CachedOp(each, flags)))
    for batch in (2, 3, 2):
        arrays = _arrays_for(mx, symbol, batch)
        plain, ours = (op(*(arrays[name] for name in names)) for names, op in ops)
        expect(ours, plain)


def _with_a_loop(sym, x):
    images = sym.expand_dims(x, axis=1)
    weight = {"weight": sym.Variable("w"), "bias": sym.Variable("b")}

    def step(each, last):
        return sym.Convolution(each, **weight, kernel=(1, 1), num_filter=2), each + last

    return sym.contrib.foreach(step, images, sym.zeros((1, *SHAPE[1:])))[0]


def _with_zeros(sym, x):
    """The number of images of the zeros is unknown."""
    y = sym.Convolution(x, kernel=(1, 1), num_filter=2, name="c")
    return sym.relu(sym.zeros((0, *SHAPE[1:]))) + y + 2


@pytest.mark.parametrize("make", [_with_a_loop, _with_zeros])
@pytest.mark.parametrize("swapped", [False, True])
def test_graphs_whose_parts_mxnet_cannot_infer(mx, x, frozen, make, swapped):
    symbol = make(mx.sym, mx.sym.Variable("data"))
    parameters = parameters_of(mx, symbol)
    network = frozen(ece408_op.swap(symbol) if swapped else symbol, parameters)
    for given in (x, x, mx.nd.concat(x, x, x, dim=0)):
        executor = symbol.bind(mx.cpu(), {"data": given, **parameters})
        expect(network(given), executor.forward()[0])


# --- inputs of which only the shape is read


def test_operators_that_ask_for_shapes(mx, x, frozen):
    """They are computed without a transfer of their second inputs."""
    sym = mx.sym
    c = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=6, name="c", pad=(1, 1))
    half = sym.Pooling(c, kernel=(2, 2), stride=(2, 2), pool_type="max")
    mean = sym.Pooling(c, kernel=(1, 1), global_pool=True, pool_type="avg")
    flat = sym.Flatten(c)
    for symbol in (
        sym.zeros_like(c) + sym.ones_like(c) * c,
        sym.slice_like(c, half, axes=(2, -1)),
        sym.slice_like(c, half),
        sym.broadcast_like(mean, c),
        sym.broadcast_like(mean, c, lhs_axes=(-1,), rhs_axes=(2,)),
        sym.reshape_like(flat, c),
        sym.reshape_like(flat, c, lhs_begin=1, lhs_end=2, rhs_begin=-3, rhs_end=4),
    ):
        parameters = parameters_of(mx, symbol)
        network = frozen(symbol, parameters)
        expect(network(x), symbol.bind(mx.cpu(), {"data": x, **parameters}).forward()[0])
        assert network.report.left == {}
        assert network.report.bytes_in == 4 * x.size


def test_an_array_of_which_the_cpu_needs_the_shape_stays_on_the_gpu(mx, x, frozen):
    sym = mx.sym
    c = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")
    mean = sym.Pooling(c, global_pool=True, kernel=(1, 1), pool_type="avg")
    boxes = sym.contrib.MultiBoxPrior(c, sizes=(0.5, 0.2), ratios=(1, 2))
    symbol = sym.Group([boxes, mean, sym.shape_array(c)])
    parameters = parameters_of(mx, symbol)
    network = frozen(symbol, parameters)
    found = network(x)
    expected = symbol.bind(mx.cpu(), {"data": x, **parameters}).forward()
    for each, its in zip(found, expected):
        expect(each, its)
    # Other nodes read its elements.
    for more, pixels in ((symbol, 1), (sym.Group([symbol, sym.sort(c, axis=1)]), 37)):
        read = 4 * SHAPE[0] * 4 * pixels
        report = ece408_op.gpu_report(more, data=SHAPE)
        assert (report.bytes_in, report.bytes_out) == (4 * x.size, read)
    alone = sym.Group([boxes, sym.shape_array(c)])
    for each, its in zip(frozen(alone, parameters)(x), expected[::2]):
        expect(each, its)


def test_parts_on_the_cpu_need_no_gpu(mx, x):
    net = make_net(mx, middle=sort)
    network = ece408_op.to_cpu(net)
    with settings.override(backend=None):
        for given in (x, x, mx.nd.concat(x, x, dim=0)):
            expect(network(given), net(given))
        report = str(network.report)
    assert report.startswith("by ece408_op: ")
    assert "GPU" not in report


# --- float16


def _as_halves(mx, net, x):
    """Return the results of a float16 net, computed in float32."""
    net.cast("float16")
    net.cast("float32")
    return net(x.astype("float16").astype("float32"))


def test_a_net_of_float16(mx, x, frozen):
    """The CPU has no such layers; on the GPU all but the net's inputs and outputs is float32."""
    expected = _as_halves(mx, make_net(mx), x).asnumpy()
    net = make_net(mx)
    net.cast("float16")
    halves = x.astype("float16")
    with pytest.raises(mx.MXNetError, match="FP16"):
        net(halves).wait_to_read()
    network = frozen(net)
    found = [network(halves)]
    report = network.report
    assert (report.left, report.bytes_in, report.bytes_out) == ({}, 2 * x.size, 2 * 3 * SHAPE[0])
    net.hybridize(backend="ece408")
    found += [net(halves), net(halves)]
    for each in found:
        assert each.dtype == np.float16
        np.testing.assert_allclose(each.asnumpy(), expected, rtol=1e-3, atol=1e-5)
    # Another batch, in which images have no multiple of four elements.
    other = mx.nd.array(np.ones((3, *SHAPE[1:])), dtype="float16")
    np.testing.assert_allclose(network(other).asnumpy()[0], network(other).asnumpy()[2])


def test_casts_round(mx, x, frozen):
    sym = mx.sym
    c = sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=3, name="c")
    halves = sym.Cast(c, dtype="float16")
    symbol = sym.Group([sym.Cast(halves * 3, dtype="float32"), halves])
    parameters = parameters_of(mx, symbol)
    network = frozen(symbol, parameters)
    found = network(x)
    expected = symbol.bind(mx.cpu(), {"data": x, **parameters}).forward()
    assert network.report.left == {}
    assert [each.dtype for each in found] == [np.float32, np.float16]
    for each, its in zip(found, expected):
        np.testing.assert_allclose(each.asnumpy(), its.asnumpy(), rtol=2e-3)


# --- MXNet's NumPy interface


def test_results_are_arrays_of_the_interface_that_the_net_is_called_with(run_python, kept):
    code = """
import ece408_op, mxnet as mx
from mxnet.gluon import nn
ece408_op.settings.configure(backend="emulator")
mx.npx.set_np()

class Sorted(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.np.sort(x, axis=1)

for last in (nn.Dense(2), Sorted()):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3), last)
    net.initialize()
    x = mx.np.ones((2, 2, 6, 6))
    expected, found = net(x), ece408_op.to_gpu(net)(x)
    print(type(found) is type(expected) is mx.np.ndarray, float(abs(found - expected).max()) < 1e-5)
"""
    result = run_python(code, ECE408_CACHE=str(kept))
    assert result.stdout == "True True\n" * 2, result.stderr


# --- files


def test_files_of_older_versions_are_read(mx, x, tmp_path):
    """In these a node holds each part."""
    symbol = make_symbol(mx)
    held, path = json.loads(symbol.tojson()), tmp_path / "old-symbol.json"
    nodes = [node for node in held["nodes"] if node["op"] == "null"]
    inputs, count = [[n, 0, 0] for n in range(len(nodes))], len(nodes)
    nodes.append({"op": "ece408_network", "name": "p", "inputs": inputs, "subgraphs": [held]})
    path.write_text(json.dumps({"nodes": nodes, "arg_nodes": [], "heads": [[count, 0, 0]]}))
    given = {**parameters_of(mx, symbol), "data": x, "softmax_label": mx.nd.zeros(SHAPE[:1])}
    expected = symbol.bind(mx.cpu(), given).forward()[0]
    for old in (mx.sym.load(str(path)), mx.sym.load_json(path.read_text())):
        assert operators(old) == [f"part {count}"]
        expect(old.bind(mx.cpu(), given).forward()[0], expected)


# --- networks of collections


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 224) for name in (
            "alexnet", "densenet121", "mobilenet1.0", "mobilenetv2_1.0", "resnet18_v1",
            "resnet50_v2", "squeezenet1.1", "vgg11_bn",
        )),
        ("inceptionv3", 299),
    ],
)  # fmt: skip
def test_networks_of_the_zoo_are_one_node(mx, name, size):
    net = mx.gluon.model_zoo.vision.get_model(name)
    net.initialize()
    symbol = net(mx.sym.Variable("data"))
    report = ece408_op.gpu_report(symbol, data=(1, 3, size, size))
    assert (len(report.parts), report.left) == (1, {})
    assert (report.bytes_in, report.bytes_out) == (3 * size * size * 4, 4000)
    assert operators(symbol.optimize_for("ece408")) == ["part 0"]


@pytest.mark.parametrize(
    "name",
    [
        *("resnet50_v1d", "resnest14", "mobilenetv3_large"),
        *("simple_pose_resnet18_v1b", "fcn_resnet50_voc"),
    ],
)
def test_networks_of_gluoncv_are_one_node(mx, name):
    model_zoo = pytest.importorskip("gluoncv.model_zoo")
    whole = "pose" in name or "fcn" in name
    net = model_zoo.get_model(
        name, pretrained=False, **({"pretrained_base": False} if whole else {})
    )
    net.initialize()
    outputs = net(mx.sym.Variable("data"))
    symbol = mx.sym.Group(list(outputs)) if isinstance(outputs, tuple) else outputs
    report = ece408_op.gpu_report(symbol, data=(1, 3, 480, 480))
    assert (len(report.parts), report.left) == (1, {})
