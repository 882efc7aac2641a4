"""Guards of our operator beside oneDNN's: without them MXNet passes it freed memory."""

import json

import numpy as np
import pytest

import ece408_op
from ece408_op.operator.graphs import graph_json, guards

CHANNELS = 16
# Without guards at least 29 of the calls and 23 of the steps were wrong in each of twelve runs.
CALLS, STEPS, CALLS_AFTER_NATIVE_USE = 100, 40, 300
ATTRIBUTES_OF_A_GRAPH = {"kernel": (3, 3), "num_filter": 4, "pad": (1, 1)}
ATTRIBUTES = {"kernel": (1, 1), "num_filter": CHANNELS, "no_bias": True}


def _unguarded(namespace, x, w):
    return namespace.Custom(x, w, op_type="ece408_conv", **ATTRIBUTES)


def _guarded(namespace, x, w):
    return ece408_op.Convolution(x, w, **ATTRIBUTES)


def _native(namespace, x, w):
    return namespace.Convolution(x, w, **ATTRIBUTES)


def _whole_numbers(mx, rng, *shape):
    return mx.nd.array(rng.integers(-2, 3, shape))


@pytest.fixture
def make_net(mx, monkeypatch):
    """Return a net of native, our, and native convolutions with separate weights."""
    guarded = guards.guarded

    class Net(mx.gluon.HybridBlock):
        def __init__(self, middle):
            super().__init__()
            self._middle = middle
            with self.name_scope():
                for name in ("w0", "w1", "w2"):
                    shape = (CHANNELS, CHANNELS, 1, 1)
                    setattr(self, name, self.params.get(name, shape=shape))

        def hybrid_forward(self, F, x, w0, w1, w2):
            return _native(F, self._middle(F, _native(F, x, w0), w1), w2)

        def set_weights(self, weights):
            for name, weight in weights.items():
                getattr(self, name).set_data(weight)

    def make(middle, mode):
        # A hybridized block makes its graph in its first call, before the next block is made.
        bare = middle is _unguarded
        monkeypatch.setattr(guards, "guarded", (lambda graph, **_: graph) if bare else guarded)
        net = Net(middle)
        net.initialize()
        if mode != "imperative":
            net.hybridize(static_alloc=mode == "static")
        return net

    return make


def _wrong_forwards(mx, rng, ours, native):
    """Tell of each forward pass whether it is wrong, with new weights every fourth time."""
    for call in range(CALLS):
        if call % 4 == 0:
            # Between these, a native convolution has used the weights before.
            weights = {n: _whole_numbers(mx, rng, CHANNELS, CHANNELS, 1, 1) for n in ("w0", "w1")}
            weights["w2"] = weights["w1"]
            ours.set_weights(weights)
            native.set_weights(weights)
        x = _whole_numbers(mx, rng, 2, CHANNELS, 9, 9)
        yield not np.array_equal(ours(x).asnumpy(), native(x).asnumpy())


def _wrong_gradients(mx, rng, ours, native):
    """Tell of each training step whether a gradient of any weight or of the input is wrong."""
    for _ in range(STEPS):
        weights = {f"w{i}": _whole_numbers(mx, rng, CHANNELS, CHANNELS, 1, 1) for i in range(3)}
        pixels = _whole_numbers(mx, rng, 2, CHANNELS, 9, 9)
        gradients = []
        for net in (ours, native):
            net.set_weights(weights)
            x = pixels.copy()
            x.attach_grad()
            with mx.autograd.record():
                y = net(x)
            y.backward()
            arrays = [x.grad, *(getattr(net, name).grad() for name in weights)]
            gradients.append([each.asnumpy() for each in arrays])
        yield not all(np.array_equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("wrong", [_wrong_forwards, _wrong_gradients])
@pytest.mark.parametrize("mode", ["imperative", "hybridized", "static"])
def test_nothing_is_wrong_beside_native_convolutions(
    mx, rng, make_net, mode, wrong, without_compiled_operator
):
    native = make_net(_native, "imperative")
    assert not any(wrong(mx, rng, make_net(_guarded, mode), native))
    # Freed memory is not reused in every run.
    if mode != "static":
        assert any(any(wrong(mx, rng, make_net(_unguarded, mode), native)) for _ in range(20))


def test_a_graph_with_guards_has_them_at_any_depth(mx):
    def body(x, states):
        y = ece408_op.Convolution(x, *states, name="inner", **ATTRIBUTES_OF_A_GRAPH)
        return y, states

    states = [mx.sym.Variable("w") + 1, mx.sym.Variable("b")]
    outer = ece408_op.Convolution(mx.sym.Variable("data"), name="outer", **ATTRIBUTES_OF_A_GRAPH)
    symbol, _ = mx.sym.contrib.foreach(body, outer, states)
    graph = json.loads(symbol.tojson())
    found = guards.guarded(graph)
    inner = next(node["subgraphs"][0] for node in found["nodes"] if "subgraphs" in node)
    # The loop's input (one is a variable), and its output.
    for each, of_loop in ((found, ["tile", "tile", "clip", "clip", "clip"]), (inner, [])):
        added = [n["op"] for n in each["nodes"] if guards.is_guard(n["name"])]
        parameters = ["_contrib_gradientmultiplier"] * 2
        assert added == ["reshape", *parameters, "clip", *of_loop]
    again = graph_json.write(found, symbol)
    assert again.list_inputs() == symbol.list_inputs()
    # The user's array has none.
    assert not guards.is_guard(symbol.tojson())


@pytest.mark.parametrize("mode", ["hybridized", "static"])
def test_the_compiled_operator_needs_no_guards(mx, rng, make_net, mode):
    native = make_net(_native, "imperative")
    assert not any(_wrong_forwards(mx, rng, make_net(_unguarded, mode), native))
    assert not any(_wrong_gradients(mx, rng, make_net(_unguarded, mode), native))


def test_calls_that_are_recorded_need_no_guards(mx, rng, make_net):
    native = make_net(_native, "imperative")
    assert not any(_wrong_gradients(mx, rng, make_net(_guarded, "imperative"), native))


def _wrong_after_native_use(mx, rng, convolution):
    """Tell of each result whether it is wrong, on weights that a native convolution has just
    used."""
    for _ in range(CALLS_AFTER_NATIVE_USE):
        x = _whole_numbers(mx, rng, 2, CHANNELS, 9, 9)
        w = _whole_numbers(mx, rng, CHANNELS, CHANNELS, 1, 1)
        expected = _native(mx.nd, x, w).asnumpy()
        yield not np.array_equal(convolution(mx.nd, x, w).asnumpy(), expected)


def test_weights_that_a_native_convolution_used_before(mx, rng, without_compiled_operator):
    assert not any(_wrong_after_native_use(mx, rng, _guarded))
    assert any(any(_wrong_after_native_use(mx, rng, _unguarded)) for _ in range(20))
