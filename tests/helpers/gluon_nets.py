"""Small nets for the emulated GPU, and checks of them."""

import itertools
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


def with_parameters_of(net, plain):
    """Give `plain`, a net of the same layers, copies of a net's parameters; return it."""
    for its, ours in zip(plain.collect_params().values(), net.collect_params().values()):
        its.set_data(ours.data().asnumpy())
    return plain


def changes(mx, net, make, shape, path):
    """Return ways of changing a net's parameters; `make(mx, seed=9)` makes one like it."""
    weight, seeds = net[0].weight, itertools.count(10)

    def set_data():
        weight.set_data(weight.data() * 0.5)

    def in_place():
        weight.data()[:] *= 1.5

    def one_value():
        weight.data()[1, 1, 0, 0] = 3

    def from_numpy():
        net[3].weight.data()[:] = np.ones(net[3].weight.shape, np.float32)

    def load():
        make(mx, seed=9).save_parameters(str(path))
        net.load_parameters(str(path))

    def train():
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        with mx.autograd.record():
            loss = net(mx.nd.ones(shape)).sum()
        loss.backward()
        trainer.step(1)

    def again():
        mx.random.seed(next(seeds))
        net.initialize(mx.init.Xavier(magnitude=3), force_reinit=True)

    def twice():
        # New arrays may reuse the addresses of the first ones.
        again()
        again()

    return [set_data, in_place, one_value, from_numpy, load, train, again, again, twice, twice]


def raising(error):
    def function(*arguments):
        raise error

    return function
