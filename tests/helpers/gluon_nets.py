"""Small nets for the emulated GPU, and checks of them."""

from __future__ import annotations

import json

import numpy as np

SHAPE = (2, 2, 8, 8)


def make_net(mx, *, middle=None, seed=3):
    """Build a net of few operators, so that the emulator compiles few; `middle` is inserted in the
    middle."""
    nn = mx.gluon.nn
    mx.random.seed(seed)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    if middle is not None:
        net.add(nn.HybridLambda(middle))
    net.add(nn.Conv2D(6, 3, padding=1), nn.Activation("relu"), nn.Flatten(), nn.Dense(3))
    net.initialize(mx.init.Xavier(magnitude=3))
    net(mx.nd.zeros(SHAPE))
    return net


def sort(F, data):
    """Use an operator without a GPU kernel."""
    return F.sort(data, axis=1)


def make_symbol(mx):
    sym = mx.sym
    net = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c1")
    net = sym.Activation(net, act_type="relu", name="r1")
    net = sym.FullyConnected(net, num_hidden=3, name="fc")
    return sym.SoftmaxOutput(net, name="softmax")


def parameters_of(mx, symbol, shape=SHAPE, seed=5):
    rng = np.random.default_rng(seed)
    shapes, _, _ = symbol.infer_shape(data=shape)
    return {
        name: mx.nd.array(rng.standard_normal(size))
        for name, size in zip(symbol.list_arguments(), shapes)
        if name not in ("data", "softmax_label")
    }


def operators(symbol):
    """Return the operators of a Symbol, each once, with "part 0" and so on for parts on the GPU."""
    nodes = [node for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]
    parts = [node.get("attrs", {}).get("__ece408_part__") for node in nodes]
    return list({f"part {part}" if part else n["op"]: None for n, part in zip(nodes, parts)})


def expect(found, expected):
    np.testing.assert_allclose(found.asnumpy(), expected.asnumpy(), rtol=2e-5, atol=2e-6)


def raising(error):
    def function(*arguments):
        raise error

    return function
