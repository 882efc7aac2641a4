"""Nets that train on several contexts, each of which belongs to one of two emulated GPUs."""

from __future__ import annotations

import compiled_together
import numpy as np
import pytest

from ece408_op import settings
from ece408_op.network import machines
from ece408_op.operator import autograd_state


@pytest.fixture(autouse=True)
def gpus(emulated, monkeypatch):
    made, chosen = compiled_together.several(2), machines.chosen
    monkeypatch.setattr(machines, "chosen", lambda on: chosen(on) if on == "cpu" else made)
    monkeypatch.setattr(autograd_state, "_may_add", False)
    with settings.override(backend="emulator"):
        yield made


def _net(mx, contexts, dropout=0.0):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, padding=1), nn.Activation("tanh"), nn.MaxPool2D(2))
        net.add(nn.Dropout(dropout), nn.Flatten(), nn.Dense(5))
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return net


def _data(mx):
    rng = np.random.default_rng(408)
    return mx.nd.array(rng.uniform(-1, 1, (5, 3, 9, 8))), mx.nd.array([0, 1, 2, 3, 4])


class _Run:
    """A net that trains on some contexts, and its losses."""

    def __init__(self, mx, made, form, contexts=1, backend="ece408", dropout=0.0):
        self.mx, self.losses = mx, []
        self.contexts = [mx.cpu(number) for number in range(contexts)]
        self.net = _net(mx, self.contexts, dropout)
        self.net.hybridize(**({"backend": backend} if backend else {}))
        self.trainer = made(self.net.collect_params(), form[0], dict(form[1]))

    def backward(self):
        x, labels = (
            self.mx.gluon.utils.split_and_load(each, self.contexts, even_split=False)
            for each in _data(self.mx)
        )
        entropy = self.mx.gluon.loss.SoftmaxCrossEntropyLoss()
        with self.mx.autograd.record():
            losses = [entropy(self.net(each), of) for each, of in zip(x, labels)]
        for loss in losses:
            loss.backward()
        self.losses.append(sum(float(loss.sum().asscalar()) for loss in losses))

    def step(self, steps=1, **options):
        for _ in range(steps):
            self.backward()
            self.trainer.step(5, **options)
        return self

    def parameters(self):
        """Return each parameter's values on each context."""
        found = self.net.collect_params().items()
        return {name: [each.asnumpy() for each in p.list_data()] for name, p in found}


def _agree(found, expected):
    """Parameters on several contexts are equal, and nearly those on one."""
    assert found.keys() == expected.keys()
    for name, (right, *_) in expected.items():
        first, *others = found[name]
        np.testing.assert_allclose(first, right, rtol=1e-4, atol=2e-6, err_msg=name)
        assert all(np.array_equal(first, each) for each in others), name


_SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})


def test_each_context_computes_on_its_gpu(mx, gpus):
    """With MXNet's trainer, which adds up the gradients on the CPU."""
    before = [each.recorded for each in gpus]
    ours = _Run(mx, mx.gluon.Trainer, _SGD, contexts=3).step(3)
    assert all(each.recorded > old for each, old in zip(gpus, before))
    right = _Run(mx, mx.gluon.Trainer, _SGD, backend=None).step(3)
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-5)
    _agree(ours.parameters(), right.parameters())


def test_a_module_on_two_contexts(mx, gpus):
    def fit(backend, contexts):
        x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")
        x = mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=5, name="f")
        symbol = mx.sym.SoftmaxOutput(x, name="softmax")
        if backend:
            symbol = symbol.optimize_for(backend)
        module = mx.mod.Module(symbol, context=[mx.cpu(each) for each in range(contexts)])
        x, labels = _data(mx)
        batches = mx.io.NDArrayIter(x[:4], labels[:4], batch_size=4)
        mx.random.seed(3)
        module.fit(batches, num_epoch=3, optimizer_params={"learning_rate": 0.1},
                   initializer=mx.init.Xavier())  # fmt: skip
        return {name: [array.asnumpy()] for name, array in module.get_params()[0].items()}

    before = gpus[1].recorded
    found = fit("ece408", 2)
    assert gpus[1].recorded > before
    _agree(found, fit(None, 1))
