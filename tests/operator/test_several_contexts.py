"""Nets that train on several contexts, each of which belongs to one of two emulated GPUs."""

from __future__ import annotations

import pickle

import compiled_together
import numpy as np
import pytest

import ece408_op
from ece408_op import settings
from ece408_op.backends.cuda.runtime import device
from ece408_op.network import machines
from ece408_op.network.update import Updates
from ece408_op.operator import autograd_state


@pytest.fixture
def gpus(emulated, monkeypatch):
    made, chosen = compiled_together.several(2), machines.chosen
    monkeypatch.setattr(machines, "chosen", lambda on: chosen(on) if on == "cpu" else made)
    monkeypatch.setattr(autograd_state, "_may_add", False)
    with settings.override(backend="emulator"):
        yield made


def _net(mx, contexts, more):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, padding=1), nn.Activation("tanh"), nn.MaxPool2D(2))
        net.add(*more(nn), nn.Flatten(), nn.Dense(5))
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(_data(mx)[0])
    return net


def _data(mx):
    rng = np.random.default_rng(408)
    return mx.nd.array(rng.uniform(-1, 1, (5, 3, 9, 8))), mx.nd.array([0, 1, 2, 3, 4])


class _Run:
    """A net that trains on some contexts, by MXNet or by this package, and its losses."""

    def __init__(self, mx, way, form, contexts=1, more=lambda nn: ()):
        self.mx, self.losses = mx, []
        self.contexts = [mx.cpu(number) for number in range(contexts)]
        self.net = _net(mx, self.contexts, more)
        self.net.hybridize(**({} if way == "mxnet" else {"backend": "ece408"}))
        made = ece408_op.Trainer if way == "ours" else mx.gluon.Trainer
        self.trainer = made(self.net.collect_params(), form[0], dict(form[1]))

    def backward(self, parts=None):
        """Both passes of each context's part of the batch, or of the first `parts` contexts."""
        x, labels = (
            self.mx.gluon.utils.split_and_load(each, self.contexts, even_split=False)[:parts]
            for each in _data(self.mx)
        )
        entropy = self.mx.gluon.loss.SoftmaxCrossEntropyLoss()
        with self.mx.autograd.record():
            losses = [entropy(self.net(each), of) for each, of in zip(x, labels)]
        for loss in losses:
            loss.backward()
        self.losses.append(sum(float(loss.sum().asscalar()) for loss in losses))
        return self

    def step(self, steps=1):
        for _ in range(steps):
            self.backward()
            self.trainer.step(5)
        return self

    def parameters(self):
        """Return each parameter's values on each context."""
        found = self.net.collect_params().items()
        return {name: [each.asnumpy() for each in p.list_data()] for name, p in found}

    def bits(self):
        return {name: [a.tobytes() for a in each] for name, each in self.parameters().items()}


def _agree(found, expected, below=2e-6):
    """Parameters on several contexts are equal, and nearly those on one."""
    assert found.keys() == expected.keys()
    for name, (right, *_) in expected.items():
        first, *others = found[name]
        np.testing.assert_allclose(first, right, rtol=1e-4, atol=below, err_msg=name)
        assert all(np.array_equal(first, each) for each in others), name


_SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
_ADAM = ("adam", {"learning_rate": 0.01})


def test_each_context_computes_on_its_gpu(mx, gpus):
    """With MXNet's trainer, which adds up the gradients on the CPU."""
    before = [each.recorded for each in gpus]
    ours = _Run(mx, "drop-in", _SGD, contexts=3).step(3)
    assert all(each.recorded > old for each, old in zip(gpus, before))
    right = _Run(mx, "mxnet", _SGD).step(3)
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-5)
    _agree(ours.parameters(), right.parameters())


def _states(run, file):
    run.trainer.save_states(str(file))
    held = pickle.loads(file.read_bytes())[0]
    flat = [each if isinstance(each, tuple) else [each] for _, each in sorted(held.items())]
    return [each.asnumpy() for several in flat for each in several]


@pytest.mark.parametrize("contexts", [2, 3])
@pytest.mark.parametrize("form", [_SGD, _ADAM], ids=lambda form: form[0])
def test_contexts_train_as_one(mx, gpus, form, contexts, tmp_path):
    """Their batches are of different sizes. A second run has the same bits."""
    ours, again = (_Run(mx, "ours", form, contexts).step(3) for _ in range(2))
    right = _Run(mx, "mxnet", form).step(3)
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-5)
    _agree(ours.parameters(), right.parameters())
    assert ours.bits() == again.bits()
    assert {held.machine for several in ours.trainer._on_gpu.values() for held in several} == {
        *gpus
    }
    for found, expected in zip(_states(ours, tmp_path / "a"), _states(right, tmp_path / "b")):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_gpus_that_do_not_reach_each_other(mx, gpus, monkeypatch, noted):
    """They copy gradients, to the same bits."""
    right = _Run(mx, "ours", _SGD, 3).step(3)
    monkeypatch.setattr(type(gpus[0]), "can_reach", False)
    tables = noted(Updates, "table", lambda self, items, _: (self._memory.machine, items))
    assert _Run(mx, "ours", _SGD, 3).step(3).bits() == right.bits()
    assert [gpu for gpu, _ in tables] == gpus
    for gpu, items in tables:
        assert all(gpu.own.issuperset(item.gradients) for item in items)


def test_states_are_of_any_number_of_contexts(mx, gpus, tmp_path):
    file, right = str(tmp_path / "states"), _Run(mx, "ours", _ADAM).step(5).parameters()
    for before, after in ((2, 3), (2, 1), (1, 2)):
        first, second = (_Run(mx, "ours", _ADAM, contexts) for contexts in (before, after))
        first.step(3).trainer.save_states(file)
        for name, parameter in second.net.collect_params().items():
            parameter.set_data(first.net.collect_params()[name].list_data()[0])
        second.trainer.load_states(file)
        _agree(second.step(2).parameters(), right)


def _another_optimizer(run):
    run.trainer = type(run.trainer)(run.net.collect_params(), "adagrad", {"learning_rate": 0.05})


def _changed_on_the_host(run):
    weight = run.net[0].weight
    weight.set_data(weight.list_data()[-1] * 0.5)
    run.step()
    for each in run.net[-1].weight.list_data():
        each[:] *= 2


def _clipped(run):
    run.backward().trainer.allreduce_grads()
    for context in run.contexts:
        gradients = [p.grad(context) for p in run.net.collect_params().values()]
        run.mx.gluon.utils.clip_global_norm(gradients, 0.1)
    run.trainer.update(5)


def _another_backend(run):
    with settings.override(backend="cpu"):
        run.step(2)


def _saved_and_loaded(run, file="net.params"):
    run.net.save_parameters(file)
    run.step()
    run.net.load_parameters(file, ctx=run.contexts)


def _evaluated(run):
    x = _data(run.mx)[0]
    found = [run.net(x.as_in_context(context)).norm().asscalar() for context in run.contexts]
    run.losses.append(float(np.mean(found)))


@pytest.mark.parametrize(
    "use",
    [
        _another_optimizer,
        _changed_on_the_host,
        _clipped,
        _another_backend,
        _saved_and_loaded,
        _evaluated,
    ],
    ids=lambda use: use.__name__[1:],
)
def test_other_uses_between_steps(mx, gpus, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = _Run(mx, "ours", _SGD, 3).step(2), _Run(mx, "mxnet", _SGD).step(2)
    for each in runs:
        use(each)
        each.step(2)
    ours, right = runs
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-4)
    _agree(ours.parameters(), right.parameters())


def test_gpus_change_between_steps(mx, gpus, monkeypatch):
    monkeypatch.setattr(machines, "chosen", lambda on: [gpus[n] for n in settings.devices()])
    ours, right = _Run(mx, "ours", _SGD, more=_norm), _Run(mx, "mxnet", _SGD, more=_norm).step(6)
    for devices in "001011":
        with settings.override(devices=devices):
            ours.step()
    _agree(ours.parameters(), right.parameters())


def test_stale_gradients_of_a_context_are_left_out(mx, gpus):
    """All contexts then have the sum of the others."""
    ours, right = _Run(mx, "ours", _SGD, 2), _Run(mx, "ours", _SGD)
    ours.step().backward(parts=1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        ours.trainer.step(5)
    ours.trainer.step(5, ignore_stale_grad=True)
    x, labels = (mx.gluon.utils.split_data(each, 2, even_split=False)[0] for each in _data(mx))
    entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    with mx.autograd.record():
        loss = entropy(right.step().net(x), labels)
    loss.backward()
    right.trainer.step(5)
    _agree(ours.parameters(), right.parameters())


def _norm(nn):
    return [nn.BatchNorm()]


def test_averages_of_normalisation_are_each_contexts_own(mx, gpus):
    """As with MXNet, which saves their mean."""
    runs = {way: _Run(mx, way, _SGD, 2, _norm).step(3) for way in ("ours", "mxnet")}
    found, right = (runs[way].parameters() for way in ("ours", "mxnet"))
    for name, arrays in right.items():
        for ours, expected in zip(found[name], arrays):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5, err_msg=name)
        saved = runs["ours"].net.collect_params()[name]._reduce().asnumpy()
        np.testing.assert_allclose(saved, sum(found[name]) / 2, rtol=1e-6)


def test_dropout_follows_mxnets_seed(mx, gpus):
    def losses(seed):
        made = _Run(mx, "ours", _SGD, 3, lambda nn: [nn.Dropout(0.5)])
        mx.random.seed(seed)
        return made.step(3).losses

    first = losses(5)
    assert losses(5) == first
    assert losses(6)[0] != first[0]


@pytest.mark.gpu
def test_contexts_train_as_one_on_real_gpus(mx, monkeypatch):
    """All there are, or one that stands for two."""
    monkeypatch.setattr(autograd_state, "_may_add", False)
    count = device.get(0).cuda.Device.count()
    with settings.override(backend="cuda", devices=",".join(map(str, range(count)))):
        ours, again = (_Run(mx, "ours", _SGD, max(2, count)).step(3) for _ in range(2))
    _agree(ours.parameters(), _Run(mx, "mxnet", _SGD).step(3).parameters(), below=1e-5)
    assert ours.bits() == again.bits()


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
