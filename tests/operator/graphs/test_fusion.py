"""Networks whose normalisation, sums, bounds, concatenations and pooling our operators compute."""

from __future__ import annotations

import json

import numpy as np
import pooling
import pytest
from cases import every, first
from studies import zoo

import ece408_op
from ece408_op.operator import compiled_operator
from ece408_op.operator.graphs import fusion, graph_json
from ece408_op.operator.graphs.compiled_graphs import compiled

# Each kind of block lacks some of its layers.
pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used:UserWarning")
C = 8


def _operators(symbol):
    """Return the operators of a graph in order, without variables."""
    return [node["op"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]


def _fused(mx, symbol, **shapes):
    arguments, _, auxiliary = symbol.infer_shape(**(shapes or {"data": (2, C, 9, 9)}))
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    shapes = dict(zip(names, [*arguments, *auxiliary]))
    return compiled(symbol, graph_json.read(symbol), shapes, fusion.fuse)


def _convolution(mx, x, name="c"):
    return ece408_op.Convolution(x, name=name, kernel=(3, 3), num_filter=C, pad=(1, 1))


OURS, CONCAT, POOL = compiled_operator.NAME, compiled_operator.CONCAT, compiled_operator.POOL
DENSE = compiled_operator.DENSE


def test_a_whole_residual_block_is_two_nodes(mx):
    x = mx.sym.Variable("data")
    y = mx.sym.Activation(mx.sym.BatchNorm(_convolution(mx, x, "a")), act_type="relu")
    y = mx.sym.BatchNorm(_convolution(mx, y, "b"))
    symbol = mx.sym.Activation(x + y, act_type="relu", name="last")
    found = _fused(mx, symbol)
    assert _operators(found) == [OURS, OURS]
    assert found.list_outputs() == symbol.list_outputs() == ["last_output"]
    assert sorted(found.list_inputs()) == sorted(symbol.list_inputs())


def test_concatenations_and_what_follows_them_are_one_node(mx):
    x = mx.sym.Variable("data")
    parts = [_convolution(mx, x, name) for name in "ab"]
    concatenated = mx.sym.Concat(*parts, x, dim=1)
    y = mx.sym.clip(mx.sym.BatchNorm(concatenated), 0, 6)
    assert _operators(_fused(mx, y)) == [OURS, OURS, CONCAT]
    # Its own values are requested as well, so the normalisation is a separate pass.
    assert _operators(_fused(mx, mx.sym.Group([y, concatenated]))) == [OURS, OURS, CONCAT, CONCAT]


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (lambda mx, y: mx.sym.BatchNorm(y, axis=2), ["BatchNorm"]),
        (lambda mx, y: mx.sym.BatchNorm(y, output_mean_var=True)[0], ["BatchNorm"]),
        (lambda mx, y: mx.sym.Activation(y, act_type="tanh"), ["Activation"]),
        (lambda mx, y: mx.sym.Concat(y, y, dim=2), ["Concat"]),
        (lambda mx, y: mx.sym.Group([mx.sym.Activation(y, act_type="relu"), y]), ["Activation"]),
        (lambda mx, y: mx.sym.clip(y, 0, 6) + y, ["clip", "elemwise_add"]),
        (
            lambda mx, y: mx.sym.BatchNorm(mx.sym.Activation(y, act_type="relu"), name="n"),
            [CONCAT],
        ),
    ],
)
def test_what_does_not_fit_stays(mx, build, left):
    symbol = build(mx, _convolution(mx, mx.sym.Variable("data")))
    found = _fused(mx, symbol)
    assert _operators(found) == [OURS, *left]
    assert found.list_outputs() == symbol.list_outputs()


def test_pooling_follows_what_is_ours(mx):
    y = mx.sym.Activation(_convolution(mx, mx.sym.Variable("data")), act_type="relu")
    pooled = mx.sym.Pooling(y, kernel=(2, 2), stride=(2, 2))
    average = mx.sym.Pooling(pooled, kernel=(1, 1), global_pool=True, pool_type="avg")
    found = _fused(mx, mx.sym.BatchNorm(mx.sym.Concat(pooled, pooled, dim=1)))
    assert _operators(found) == [OURS, POOL, CONCAT]
    assert _operators(_fused(mx, mx.sym.Group([average, y]))) == [OURS, POOL, POOL]
    native = mx.sym.Pooling(mx.sym.Variable("data"), kernel=(2, 2))
    assert _operators(_fused(mx, _convolution(mx, native))) == ["Pooling", OURS]


@pytest.mark.parametrize("between", ["tanh", "leaky", "dropout", "clip"])
def test_operators_on_single_elements_may_lie_before_pooling(mx, rng, between):
    def followed(symbol):
        symbol = {
            "tanh": lambda: mx.sym.Activation(symbol, act_type="tanh"),
            "leaky": lambda: mx.sym.LeakyReLU(symbol, slope=0.3),
            "dropout": lambda: mx.sym.Dropout(mx.sym.sigmoid(symbol)),
            "clip": lambda: mx.sym.clip(mx.sym.tanh(symbol), -0.5, 0.5),
        }[between]()
        windows = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
        return mx.sym.Pooling(symbol, name="p", **windows)

    data, same = mx.sym.Variable("data"), {"kernel": (1, 1), "num_filter": 4, "no_bias": 1}
    symbol = followed(ece408_op.Convolution(data, name="c", **same))
    inputs = {
        "data": mx.nd.array(rng.normal(0, 2, (2, 4, 7, 9))),
        "c_weight": mx.nd.array(np.eye(4).reshape(4, 4, 1, 1)),
    }
    shapes = {name: array.shape for name, array in inputs.items()}
    ours = compiled(symbol, graph_json.read(symbol), shapes, fusion.fuse)
    first, *rest = _operators(ours)
    assert first == OURS
    # Of the maximum; tanh of fewer elements.
    assert rest == [POOL, "Activation"] if between == "tanh" else rest[-1] == POOL
    assert len(rest) > 1
    found = ours.bind(mx.cpu(), inputs, grad_req="null").forward()[0].asnumpy()
    expected = followed(data).bind(mx.cpu(), {"data": inputs["data"]}, grad_req="null").forward()
    assert (found == expected[0].asnumpy()).all()


@pytest.mark.parametrize("window", [{"pool_type": "sum"}, {"pool_type": "lp", "p_value": 2}])
def test_other_pooling_stays(mx, window):
    pooled = mx.sym.Pooling(_convolution(mx, mx.sym.Variable("data")), kernel=(2, 2), **window)
    assert _operators(_fused(mx, pooled)) == [OURS, "Pooling"]


def _pooled(mx, source, x, **window):
    """Return the output of pooling of x, after an identity convolution or without one."""
    inputs = {"data": mx.nd.array(x)}
    symbol = mx.sym.Variable("data")
    if source == "ours":
        channels = x.shape[1]
        symbol = ece408_op.Convolution(
            symbol, name="c", kernel=(1, 1), num_filter=channels, no_bias=1
        )
        inputs["c_weight"] = mx.nd.array(np.eye(channels).reshape(channels, channels, 1, 1))
    symbol = mx.sym.Pooling(symbol, name="p", **window)
    if source == "ours":
        shapes = {name: array.shape for name, array in inputs.items()}
        symbol = compiled(symbol, graph_json.read(symbol), shapes, fusion.fuse)
        assert _operators(symbol) == [OURS, POOL]
    return symbol.bind(mx.cpu(), inputs, grad_req="null").forward()[0].asnumpy()


@every(**pooling.AXES)
def test_pooling_agrees_with_mxnets_own(mx, kind, convention, window, rng):
    for height, width, given in pooling.layers(window, kind, convention):
        x = rng.standard_normal((2, 3, height, width))
        expected, found = (_pooled(mx, source, x, **given) for source in ("native", "ours"))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_of_whole_planes(mx, kind, rng):
    x = rng.standard_normal((3, 5, 7, 9))
    found = _pooled(mx, "ours", x, kernel=(1, 1), global_pool=True, pool_type=kind)
    expected = (np.max if kind == "max" else np.mean)(x, axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_pooling_of_border_alone_is_left_to_mxnet(mx):
    """Windows without pixels: the graph runs unchanged."""
    net = mx.gluon.nn.HybridSequential()
    net.add(ece408_op.Conv2D(2, 1, in_channels=3))
    net.add(mx.gluon.nn.MaxPool2D((1, 1), (3, 3), (0, 0), ceil_mode=True))
    net.initialize()
    x = mx.nd.ones((1, 3, 5, 5))
    expected = net(x).asnumpy()
    net.hybridize()
    np.testing.assert_array_equal(net(x).asnumpy(), expected)


def test_dense_layers_follow_what_is_ours(mx):
    x = mx.sym.Variable("data")
    y = _convolution(mx, x)
    dense = mx.sym.FullyConnected(mx.sym.Flatten(y), num_hidden=7, name="d")
    twice = mx.sym.FullyConnected(mx.sym.Activation(dense, act_type="relu"), num_hidden=3)
    found = _fused(mx, mx.sym.Dropout(twice, name="last"))
    assert _operators(found) == [OURS, DENSE, DENSE, "Dropout"]
    # For each row of pixels, and for an array that no node of ours computes.
    rows = mx.sym.FullyConnected(y, num_hidden=3, flatten=False)
    assert _operators(_fused(mx, rows)) == [OURS, "FullyConnected"]
    native = mx.sym.FullyConnected(x, num_hidden=3)
    both = mx.sym.Group([y, native])
    assert sorted(_operators(_fused(mx, both))) == ["FullyConnected", OURS]
    # Normalisation and sums are separate passes.
    rest = mx.sym.elemwise_add(mx.sym.BatchNorm(dense), dense)
    assert _operators(_fused(mx, rest)) == [OURS, DENSE, CONCAT, "elemwise_add"]


@pytest.mark.parametrize("bounds", ["none", "relu", "clip"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("images", "channels", "filters"),
    [(1, 3, 5), (1, 1024, 100), (3, 17, 16), (70, 33, 10), (200, 4, 70), (1000, 84, 10)],
)
def test_dense_layers_agree_with_mxnets_own(mx, images, channels, filters, bias, bounds, rng):
    """Whole numbers, whose sums are exact."""
    data = mx.sym.Variable("data")
    ours = ece408_op.Convolution(data, name="c", kernel=(1, 1), num_filter=channels, no_bias=1)
    symbols = []
    for y in (data, ours):
        y = mx.sym.FullyConnected(y, name="d", num_hidden=filters, no_bias=not bias)
        if bounds != "none":
            y = mx.sym.relu(y) if bounds == "relu" else mx.sym.clip(y, -30, 30)
        symbols.append(y)
    inputs = {
        "data": mx.nd.array(rng.integers(-4, 5, (images, channels, 1, 1))),
        "d_weight": mx.nd.array(rng.integers(-4, 5, (filters, channels))),
        "d_bias": mx.nd.array(rng.integers(-4, 5, filters)),
        "c_weight": mx.nd.array(np.eye(channels).reshape(channels, channels, 1, 1)),
    }
    shapes = {name: array.shape for name, array in inputs.items()}
    symbols[1] = compiled(symbols[1], graph_json.read(symbols[1]), shapes, fusion.fuse)
    assert _operators(symbols[1]) == [OURS, DENSE]
    expected, found = (
        symbol.bind(
            mx.cpu(), {name: inputs[name] for name in symbol.list_arguments()}, grad_req="null"
        ).forward()[0]
        for symbol in symbols
    )
    np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())


class _Kinds:
    """Blocks with everything that is fused, and operators that prevent it."""

    @staticmethod
    def make(mx, ours, seed):
        nn = mx.gluon.nn
        rng = np.random.default_rng(seed)
        convolution = ece408_op.Conv2D if ours else nn.Conv2D

        class Block(mx.gluon.HybridBlock):
            def __init__(self, number):
                super().__init__(prefix=f"block{number}_")
                kinds = "chain residual concat two preactivated pooled dropped gated"
                self.kind = rng.choice(kinds.split())
                self.bounds = rng.choice(["relu", "relu6", "none"])
                with self.name_scope():
                    keywords = {"in_channels": C, "use_bias": bool(rng.integers(2))}
                    self.first = convolution(C, 3, padding=1, **keywords)
                    self.second = convolution(C, 1, **keywords)
                    # In a plain block of MXNet's own, which reads fused arrays.
                    self.native = nn.Conv2D(C, 3, padding=1, in_channels=C)
                    scale = bool(rng.integers(2))
                    self.norm = nn.BatchNorm(in_channels=C, scale=scale, epsilon=1e-3)
                    self.wide = nn.BatchNorm(in_channels=2 * C)
                    self.narrow = convolution(C, 1, in_channels=2 * C)
                    self.reduced = nn.Dense(3, in_units=C, use_bias=bool(rng.integers(2)))
                    self.gate = nn.Dense(C, in_units=3)

            def bounded(self, F, x):
                if self.bounds == "none":
                    return x
                return F.relu(x) if self.bounds == "relu" else F.clip(x, 0, 6)

            def hybrid_forward(self, F, x):
                y = self.norm(self.first(x))
                if self.kind == "chain":
                    return self.native(self.bounded(F, y))
                if self.kind == "residual":
                    return self.bounded(F, x + y)
                if self.kind == "pooled":
                    y = F.Pooling(self.bounded(F, y), kernel=(3, 3), pad=(1, 1), pool_type="avg")
                    return self.second(y)
                if self.kind == "gated":
                    mean = F.Pooling(y, kernel=(1, 1), global_pool=True, pool_type="avg")
                    gate = F.sigmoid(self.gate(self.bounded(F, self.reduced(mean))))
                    return F.broadcast_mul(y, F.reshape(gate, (0, 0, 1, 1)))
                if self.kind == "dropped":
                    return self.bounded(F, F.Dropout(y, p=0.5)) + self.second(y)
                if self.kind == "two":
                    return self.bounded(F, y) + self.second(y)
                concatenated = F.concat(y, self.second(x), dim=1)
                if self.kind == "concat":
                    return self.narrow(self.bounded(F, concatenated))
                return self.narrow(self.bounded(F, self.wide(concatenated))) + self.native(x)

        net = nn.HybridSequential(prefix="net_")
        if seed % 2:
            net.add(nn.BatchNorm(in_channels=C))
        for number in range(3):
            net.add(Block(number))
        net.initialize()
        return net


def _set_parameters(mx, rng, *nets):
    for parameters in zip(*(net.collect_params().values() for net in nets)):
        low = 0.5 if "var" in parameters[0].name else -0.5
        values = mx.nd.array(rng.uniform(low, 1, parameters[0].shape))
        for parameter in parameters:
            parameter.set_data(values)


@pytest.mark.parametrize("static", first(1, [False, True]))
def test_random_networks_agree_with_mxnets_own(mx, static):
    for seed in range(12):
        native, ours = (_Kinds.make(mx, is_ours, seed) for is_ours in (False, True))
        ours.hybridize(static_alloc=static, static_shape=static)
        rng = np.random.default_rng(seed)
        for change in range(3):
            _set_parameters(mx, rng, native, ours)
            x = mx.nd.array(rng.uniform(-1, 1, (1 + change, C, 9, 7)))
            kept = x.asnumpy()
            expected = native(x).asnumpy()
            # Often enough for its parameters to be cached.
            for _ in range(6):
                assert zoo.error(ours(x).asnumpy(), expected) < 5e-5, (seed, change)
            np.testing.assert_array_equal(x.asnumpy(), kept)


def test_training_moves_the_averages_that_inference_uses(mx):
    # A seed without Dropout, which training makes random.
    native, ours = (_Kinds.make(mx, is_ours, 9) for is_ours in (False, True))
    ours.hybridize()
    rng = np.random.default_rng(0)
    _set_parameters(mx, rng, native, ours)
    x = mx.nd.array(rng.uniform(-1, 1, (4, C, 9, 9)))
    for _ in range(3):
        assert zoo.error(ours(x).asnumpy(), native(x).asnumpy()) < 5e-5
        for net in (native, ours):
            with mx.autograd.record():
                loss = net(x).sum()
            loss.backward()
            with mx.autograd.train_mode():
                net(x).wait_to_read()
    means = [
        [p.data().asnumpy() for p in net.collect_params(".*running_mean").values()]
        for net in (native, ours)
    ]
    for a, b in zip(*means):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_infinities_and_nan_go_where_they_go_without_fusion(mx):
    x = mx.sym.Variable("data")
    symbol = mx.sym.clip(_convolution(mx, x), -1, 1)
    net = mx.gluon.SymbolBlock(symbol, x)
    net.initialize(mx.init.One())
    data = np.zeros((1, C, 5, 5), "float32")
    data[0, 0, 0, 0], data[0, 0, 4, 4] = np.nan, np.inf
    eager = net(mx.nd.array(data)).asnumpy()
    net.hybridize()
    np.testing.assert_array_equal(net(mx.nd.array(data)).asnumpy(), eager)
    assert np.isnan(eager[0, :, :2, :2]).all()


def test_nan_ends_in_pooling_of_largest_values(mx):
    """As in MXNet's own in plain layout, in every way to run the graph."""
    x = mx.sym.Variable("data")
    y = mx.sym.relu(ece408_op.Convolution(x, name="c", kernel=(1, 1), num_filter=1, no_bias=True))
    symbol = mx.sym.Pooling(y, kernel=(2, 2), stride=(2, 2), pool_type="max")
    nan, inf, lowest = np.nan, np.inf, np.finfo(np.float32).min
    rows = [[nan, 1, 2, nan, nan, nan, -inf, nan], [2, 3, nan, 1, nan, nan, nan, inf]]
    inputs = {"data": mx.nd.array([[rows]]), "c_weight": mx.nd.ones((1, 1, 1, 1))}
    for has_gradients in (False, True):
        gradients = {name: array.copy() for name, array in inputs.items() if has_gradients}
        executor = symbol.bind(mx.cpu(), inputs, gradients)
        for is_train in (False, True):
            found = executor.forward(is_train)[0].asnumpy()
            np.testing.assert_array_equal(found, [[[[3, 2, lowest, inf]]]])


@pytest.mark.parametrize("bounds", [(1, -1), (0, np.nan), (np.nan, 0), (-1, 1), (2, 2)])
def test_bounds_in_any_order(mx, bounds):
    x = mx.sym.Variable("data")
    y = ece408_op.Convolution(x, name="c", kernel=(1, 1), num_filter=1, no_bias=True)
    symbol = mx.sym.clip(y, *bounds)
    data = mx.nd.array([np.nan, np.inf, -np.inf, -1, 0, 0.5, 3]).reshape((1, 1, 1, 7))
    executor = symbol.bind(mx.cpu(), {"data": data, "c_weight": mx.nd.ones((1, 1, 1, 1))})
    np.testing.assert_array_equal(
        executor.forward()[0].asnumpy(), mx.nd.clip(data, *bounds).asnumpy()
    )


def test_half_precision_is_not_fused_but_right(mx):
    net = mx.gluon.nn.HybridSequential()
    net.add(ece408_op.Conv2D(C, 3, in_channels=C), mx.gluon.nn.Activation("relu"))
    net.initialize()
    net.cast("float16")
    x = mx.nd.random.uniform(-1, 1, (2, C, 8, 8)).astype("float16")
    eager = net(x).asnumpy()
    net.hybridize()
    np.testing.assert_array_equal(net(x).asnumpy(), eager)
