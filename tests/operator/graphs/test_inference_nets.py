"""Networks with everything that belongs to a part, beside MXNet's own."""

import numpy as np
import pytest
from cases import first
from studies import zoo

import ece408_op

# Each kind of block lacks some of its layers.
pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used:UserWarning")
C = 8


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
    y = ece408_op.Convolution(x, name="c", kernel=(3, 3), num_filter=C, pad=(1, 1))
    symbol = mx.sym.clip(y, -1, 1)
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


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_are_computed_are_not_kept(mx, static, rng):
    """Factors of a normalisation that depend on the data, in arrays that MXNet reuses."""
    data = mx.sym.Variable("data")
    gamma = mx.sym.slice_axis(mx.sym.mean(data, axis=(0, 2, 3)), axis=0, begin=0, end=C)
    y = mx.sym.BatchNorm(
        ece408_op.Convolution(data, name="a", kernel=(3, 3), num_filter=C, pad=(1, 1)),
        gamma=gamma,
        name="n",
        fix_gamma=False,
    )
    for symbol in (mx.sym.relu(y), y):
        net = mx.gluon.SymbolBlock(symbol, data)
        net.initialize(mx.init.Uniform(1))
        batches = [mx.nd.array(rng.normal(size=(2, C, 6, 5))) for _ in range(4)]
        expected = [net(x).asnumpy() for x in batches]
        net.hybridize(static_alloc=static, static_shape=static)
        for x, y in zip(batches, expected):
            np.testing.assert_allclose(net(x).asnumpy(), y, rtol=1e-4, atol=1e-5)
