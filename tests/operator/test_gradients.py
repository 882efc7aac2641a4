"""Gradients against finite differences, and training against training with MXNet's own."""

from __future__ import annotations

import numpy as np
import pytest

import ece408_op
from ece408_op.course.dataset import data

STEPS = 200
BATCH = 32


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel": (3, 2)},
        {"kernel": (2, 3), "stride": (2, 1), "pad": (1, 2), "dilate": (2, 1)},
        {"kernel": (3, 3), "num_group": 2, "pad": (1, 1), "no_bias": True},
    ],
    ids=["plain", "strided", "grouped"],
)
def test_numerical_gradients(mx, backend, attributes):
    symbol = mx.sym.Custom(
        mx.sym.Variable("data"), op_type="ece408_conv", num_filter=4, name="c",
        backend=backend, **attributes,
    )  # fmt: skip
    shapes, _, _ = symbol.infer_shape(data=(2, 4, 6, 5))
    rng = np.random.default_rng(2)
    location = [rng.standard_normal(shape) for shape in shapes]
    with ece408_op.errors.surfaced():
        mx.test_utils.check_numeric_gradient(
            symbol, location, numeric_eps=1e-5, rtol=1e-5, atol=1e-7, dtype=np.float64
        )


def _lenet(mx, layer):
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        layer(20, 5, activation="tanh", in_channels=1),
        nn.MaxPool2D(),
        layer(50, 5, activation="tanh", in_channels=20),
        nn.MaxPool2D(),
        nn.Dense(128, activation="tanh", in_units=800),
        nn.Dense(10, in_units=128),
    )
    return net


def _losses(mx, layer, images, labels, mode):
    mx.random.seed(3)
    net = _lenet(mx, layer)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    if mode == "hybridized":
        net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    criterion = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step in range(STEPS):
        chosen = slice(step * BATCH, (step + 1) * BATCH)
        with mx.autograd.record():
            loss = criterion(net(images[chosen]), labels[chosen])
        loss.backward()
        trainer.step(BATCH)
        losses.append(float(loss.mean().asscalar()))
    return np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["imperative", "hybridized"])
def test_training_follows_the_same_loss_curve(mx, fashion_mnist, mode):
    pixels, classes = data.load("t10k", limit=STEPS * BATCH)
    images = mx.nd.array(pixels[:, None] / np.float32(255))
    labels = mx.nd.array(classes)
    native = _losses(mx, mx.gluon.nn.Conv2D, images, labels, mode)
    with ece408_op.errors.surfaced(), ece408_op.op_times() as log:
        ours = _losses(mx, ece408_op.Conv2D, images, labels, mode)
    assert np.abs(ours - native).max() <= 1e-4
    assert ours[-20:].mean() < 0.6 * ours[0]
    assert {entry.direction for entry in log} == {"forward", "backward_data", "backward_weight"}
