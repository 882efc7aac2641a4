"""Each operator in the emulator, against MXNet's on the CPU."""

from __future__ import annotations

import pytest
from gpu_networks import Case, error

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 2e-6


def _operators(sym):
    """Symbols on "data" of shape (3, 4, 5, 6) by name: few launches for many operators."""
    x, y = sym.Variable("data"), sym.Variable("weight", shape=(1, 4, 1, 1))

    def act(kind):
        return sym.Activation(x, act_type=kind)

    def leaky(kind, **attributes):
        return sym.LeakyReLU(x, act_type=kind, **attributes)

    return {
        "activations": [
            act("relu") + 2 * act("tanh") + 3 * act("sigmoid"),
            act("softrelu") - act("softsign") + sym.relu(x) * sym.tanh(2 - x) + sym.sigmoid(x),
            sym.clip(x, -0.5, 0.25) - sym.exp(x) / sym.sqrt(3 + x),
        ],
        "leaky": [
            leaky("leaky", slope=0.3) + 2 * leaky("elu", slope=0.7) + 3 * leaky("selu"),
            leaky("gelu") - leaky("rrelu", lower_bound=0.1, upper_bound=0.4)[0],
        ],
        "prelu": [sym.LeakyReLU(x, sym.Variable("gamma", shape=(4,)), act_type="prelu")],
        "scalars": [(1 - x) / 3 + 2 * x - 0.5, 1 / (x + 3)],
        "arithmetic": [sym.elemwise_add(x, x * x) - sym.add_n(x, 2 * x, 3 * x) / (2 + x)],
        "spread": [
            sym.broadcast_add(x, y),
            sym.broadcast_mul(sym.broadcast_sub(x, y), sym.broadcast_div(x, 3 + y)),
            sym.broadcast_mul(x, sym.mean(x, axis=(2, 3), keepdims=True)),
            sym.broadcast_mul(x, sym.mean(x, axis=1, keepdims=True)),
            sym.broadcast_mul(x, sym.mean(sym.mean(x, axis=1, keepdims=True), 3, keepdims=True)),
        ],
        "norm": [sym.BatchNorm(x, fix_gamma=False, name="a"), sym.BatchNorm(x, axis=3, name="b")],
        "pool": [
            sym.Pooling(x, kernel=(2, 3), stride=(2, 1), pad=(1, 1), pool_type="max"),
            sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg"),
        ],
        "pool_borders": [
            sym.Pooling(
                *(x,),
                kernel=(3, 2),
                stride=(2, 3),
                pad=(1, 0),
                pool_type="avg",
                pooling_convention="full",
                count_include_pad=include,
            )
            for include in (True, False)
        ],
        "global": [
            sym.Pooling(x, global_pool=True, pool_type=kind, kernel=(1, 1))
            for kind in ("avg", "max")
        ],
        "means": [sym.mean(x, axis=(2, 3)), sym.mean(x, axis=1, keepdims=True), sym.sum(x, axis=3)],
        "softmax": [sym.softmax(x), sym.softmax(x, axis=1, temperature=2), sym.log_softmax(x)],
        "softmaxes": [sym.SoftmaxActivation(x, mode="channel"), sym.SoftmaxActivation(x)],
        "lrn": [sym.LRN(x, nsize=3, alpha=0.1, knorm=1)],
        "views": [sym.Flatten(x) + 1, sym.reshape(x, shape=(0, -3, -1)) + 1],
        "moves": [sym.transpose(x, axes=(0, 2, 3, 1)), sym.swapaxes(x, dim1=1, dim2=3)],
        "pads": [
            sym.Pad(x, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 3, 1), constant_value=2)
            for mode in ("constant", "edge", "reflect")
        ],
        "concats": [sym.concat(x, x + 1, 2 * x, dim=1), sym.concat(x, x, dim=3)],
        "kept": [sym.Dropout(x) * sym.BlockGrad(x) + sym.Cast(x, dtype="float32")],
    }


NAMES = (
    *("activations", "leaky", "prelu", "scalars", "arithmetic", "spread", "norm"),
    *("pool", "pool_borders", "global", "means", "softmax", "softmaxes", "lrn", "views", "moves"),
    *("pads", "concats", "kept"),
)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_computes_what_mxnet_does(mx, name):
    case = Case(mx.sym.Group(_operators(mx.sym)[name]), data=(3, 4, 5, 6))
    network = case.network()
    for number, (found, expected) in enumerate(zip(case.run(network), case.expected())):
        assert error(found, expected) < BELOW, number
