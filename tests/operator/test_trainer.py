"""Gluon nets that train on a GPU, emulated: MXNet's trainer and ours."""

from __future__ import annotations

import copy
import gc
import pickle

import late_lanes
import numpy as np
import pytest

import ece408_op
from ece408_op import errors, settings
from ece408_op.network import gpu_memory, machines
from ece408_op.operator import autograd_state, networks

_FORMS = [
    ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3}),
    ("nag", {"learning_rate": 0.05, "momentum": 0.9, "clip_gradient": 0.1}),
    ("adam", {"learning_rate": 0.01}),
]


@pytest.fixture(autouse=True)
def on_emulator(emulated, monkeypatch):
    monkeypatch.setattr(autograd_state, "_may_add", False)
    with settings.override(backend="emulator"):
        yield


def _net(mx, dropout=0.0):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            *(nn.Conv2D(6, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("tanh")),
            *(nn.MaxPool2D(2), nn.Dropout(dropout), nn.Flatten(), nn.Dense(5)),
        )
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    net(_data(mx)[0])
    return net


def _data(mx):
    rng = np.random.default_rng(408)
    return mx.nd.array(rng.uniform(-1, 1, (4, 3, 9, 8))), mx.nd.array([0, 1, 2, 3])


class _Run:
    """A net that trains, its losses, and what was found on the way."""

    def __init__(self, mx, way, form, dropout=0.0):
        self.mx, self.losses = mx, []
        self.net = _net(mx, dropout)
        self.net.hybridize(**({} if way == "mxnet" else {"backend": "ece408"}))
        made = ece408_op.Trainer if way == "ours" else mx.gluon.Trainer
        self.trainer = made(self.net.collect_params(), form[0], dict(form[1]))

    def recorded(self):
        x, labels = _data(self.mx)
        with self.mx.autograd.record():
            return self.mx.gluon.loss.SoftmaxCrossEntropyLoss()(self.net(x), labels)

    def step(self, steps=1):
        for _ in range(steps):
            loss = self.recorded()
            loss.backward()
            self.trainer.step(4)
            self.losses.append(float(loss.mean().asscalar()))
        return self

    def parameters(self):
        return {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}

    def gradients(self):
        found = self.net.collect_params().items()
        return {name: p.grad().asnumpy() for name, p in found if p.grad_req != "null"}


def _agree(found, expected):
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("form", _FORMS, ids=lambda form: form[0])
def test_trainers_agree_with_mxnet(mx, form, tmp_path):
    """Losses, an evaluation on the way, parameters, gradients, saved parameters and states."""
    runs = {way: _Run(mx, way, form) for way in ("mxnet", "drop-in", "ours")}
    files = {}
    for way, run in runs.items():
        run.step(2)
        evaluated = run.net(_data(mx)[0]).asnumpy()
        run.step(3)
        files[way] = tmp_path / f"{way}.params", tmp_path / f"{way}.states"
        run.net.save_parameters(str(files[way][0]))
        run.trainer.save_states(str(files[way][1]))
        right = runs["mxnet"]
        np.testing.assert_allclose(run.losses, right.losses, rtol=1e-4)
        _agree(run.gradients(), right.gradients())
        _agree(run.parameters(), right.parameters())
        saved = mx.nd.load(str(files[way][0]))
        _agree({n: a.asnumpy() for n, a in saved.items()}, {
            n: a.asnumpy() for n, a in mx.nd.load(str(files["mxnet"][0])).items()
        })  # fmt: skip
        if way == "mxnet":
            first = evaluated
        np.testing.assert_allclose(evaluated, first, rtol=1e-3, atol=1e-4)
    states = [_states(files[way][1]) for way in ("mxnet", "ours")]
    for found, expected in zip(*states):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert len(states[0]) == len(states[1]) > 0


def _states(file):
    held = pickle.loads(file.read_bytes())[0]
    flat = [each if isinstance(each, (list, tuple)) else [each] for _, each in sorted(held.items())]
    return [each.asnumpy() for several in flat for each in several]


def test_loaded_states_continue(mx, tmp_path):
    form, file = _FORMS[0], str(tmp_path / "states")
    whole = _Run(mx, "ours", form).step(5)
    half = _Run(mx, "ours", form).step(3)
    half.trainer.save_states(file)
    half.step(1)
    other = _Run(mx, "ours", form)
    for name, parameter in other.net.collect_params().items():
        parameter.set_data(half.net.collect_params()[name].data())
    half.trainer.save_states(file)
    other.trainer.load_states(file)
    other.step(1)
    np.testing.assert_allclose(other.losses[0], whole.losses[4], rtol=1e-5)
    _agree(other.parameters(), whole.parameters())


def test_written_parameters_and_gradients_count(mx):
    """`set_data`, writes to `data()`, gradients changed before a step, new gradient requests."""

    def run(way):
        made = _Run(mx, way, _FORMS[0]).step(2)
        net = made.net
        net[6].weight.set_data(net[6].weight.data() * 0.5)
        made.step(1)
        net[0].weight.data()[:] *= 2
        made.step(1)
        made.recorded().backward()
        mx.gluon.utils.clip_global_norm([net[6].weight.grad(), net[0].weight.grad()], 0.01)
        made.trainer.step(4)
        net[6].bias.grad_req = "null"
        made.step(1)
        net[6].bias.grad_req = "write"
        made.trainer.set_learning_rate(0.01)
        made.step(2)
        return made

    ours, right = run("ours"), run("mxnet")
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-4)
    _agree(ours.parameters(), right.parameters())


def _again(made):
    """A backward pass after weights have changed, which also moves averages again."""
    loss = made.recorded()
    loss.backward(retain_graph=True)
    made.trainer.step(4)
    loss.backward()
    made.trainer.step(4)


def _two_trainers(made):
    params, first = made.net.collect_params(), made.trainer
    for trainer in (
        *(type(first)(params, "adam", {"learning_rate": 0.01}), first),
        *(made.mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1}), first),
    ):
        made.trainer = trainer
        made.step(2)


def _cast(made):
    made.net[6].weight.cast("float32")


def _copied(made):
    for copied in copy.deepcopy(made.net[6].weight), pickle.loads(pickle.dumps(made.net[6].bias)):
        made.losses.append(float(copied.data().norm().asscalar()))


def _summed(made):
    x, labels = _data(made.mx)
    with made.mx.autograd.record():
        loss = made.mx.gluon.loss.SoftmaxCrossEntropyLoss()
        loss = loss(made.net(x), labels) + loss(made.net(x * 2), labels)
    loss.backward()
    made.trainer.step(4)


def _another_backend(made):
    x, _ = _data(made.mx)
    made.net(x).wait_to_read()
    with settings.override(backend="cpu"):
        made.losses.append(float(made.net(x).norm().asscalar()))
        made.step(2)


def _other_constants(made):
    for name, value in (("momentum", 0.5), ("clip_gradient", 0.05), ("wd", 0.1), ("momentum", 0)):
        setattr(made.trainer._optimizer, name, value)
        made.step(1)


def _saved_and_loaded(made, file="states"):
    made.trainer.save_states(file)
    made.step(1)
    made.trainer.load_states(file)


def _averages_read(made):
    """Between backward passes."""
    loss = made.recorded()
    for _ in range(2):
        loss.backward(retain_graph=True)
        made.losses.append(float(made.net[1].running_mean.data().norm().asscalar()))
    loss.backward()
    made.trainer.step(4)


def _called_before(made):
    """A call waits for its images until the step is over, and has the parameters before it."""
    x, _ = _data(made.mx)
    made.recorded().backward()
    slow = made.mx.nd.ones((1000, 1000))
    for _ in range(6):
        slow = made.mx.nd.dot(slow, slow) / 1000
    with made.mx.autograd.record():
        y = made.net(made.mx.nd.broadcast_mul(x, slow[0, 0].reshape((1, 1, 1, 1))))
    made.trainer.step(4)
    made.losses.append(float(y.norm().asscalar()))


def _frozen(made):
    made.net[0].weight.grad_req = "null"
    made.losses.append(float(made.net(_data(made.mx)[0]).norm().asscalar()))


def _frozen_norm(made):
    """Its averages do not move."""
    for parameter in (made.net[0].weight, made.net[1].gamma, made.net[1].beta):
        parameter.grad_req = "null"
    # The graph is made for the gradients of its first call.
    made.net._clear_cached_op()


def _initialized_again(made):
    made.net.initialize(made.mx.init.Constant(0.02), force_reinit=True)


@pytest.mark.parametrize("way", ["drop-in", "ours"])
@pytest.mark.parametrize(
    "use",
    [
        _averages_read,
        _called_before,
        _frozen,
        _frozen_norm,
        _initialized_again,
        _again,
        _two_trainers,
        _cast,
        _copied,
        _summed,
        _another_backend,
        _other_constants,
        _saved_and_loaded,
    ],
    ids=lambda use: use.__name__[1:],
)
def test_other_uses_between_steps(mx, way, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [_Run(mx, each, _FORMS[0]).step(2) for each in (way, "mxnet")]
    for each in runs:
        use(each)
        each.step(2)
    ours, right = runs
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-3)
    _agree(ours.parameters(), right.parameters())


@pytest.mark.parametrize("case", ["copies late", "copies early", "has no room"])
def test_work_in_progress_is_not_disturbed(mx, monkeypatch, case):
    """Two nets, together and one after the other, on a GPU that works late."""
    late, lend = late_lanes.machine(case == "copies early"), gpu_memory.GpuMemory.lend
    monkeypatch.setattr(machines.emulated, "emulated", lambda: late)

    def lend_some(self, nbytes, use):
        if case == "has no room" and use == "training: the next images":
            raise errors.NotEnoughMemory(use)
        return lend(self, nbytes, use)

    monkeypatch.setattr(gpu_memory.GpuMemory, "lend", lend_some)
    rng = np.random.default_rng(5)
    batches = [mx.nd.array(rng.uniform(-1, 1, (n, 3, 9, 8))) for n in (4, 40, 4, 40)]
    turns = [{0: 0, 1: 1}, {0: 2}, {0: 0}, {1: 1}, {1: 3}, {0: 0, 1: 2}]
    parameters = {}
    for way in ("mxnet", "ours"):
        runs = [_Run(mx, way, _FORMS[2]) for _ in range(2)]
        for turn in turns * 3:
            with mx.autograd.record():
                losses = [mx.nd.square(runs[n].net(batches[x])).sum() for n, x in turn.items()]
            for loss in losses:
                loss.backward()
            for n in turn:
                runs[n].trainer.step(4)
        parameters[way] = [run.parameters() for run in runs]
    for found, expected in zip(parameters["ours"], parameters["mxnet"]):
        _agree(found, expected)


def test_memory_on_the_gpu_ends_with_the_net(mx):
    def used():
        _Run(mx, "ours", _FORMS[0]).step(2)
        mx.nd.waitall()
        gc.collect()
        return sum(memory._nbytes for memory in gpu_memory._memories.values())

    assert used() == used()


@pytest.mark.parametrize("may_add", [False, True])
def test_an_array_from_before_a_step_is_refused(mx, monkeypatch, may_add):
    """Also where gradients may be added, so that copies are between parameters and parts."""
    monkeypatch.setattr(autograd_state, "_may_add", may_add)
    made = _Run(mx, "ours", _FORMS[0]).step(2)
    kept = made.net[6].weight.data()
    made.step(1)
    kept[:] = 0
    with pytest.raises(errors.InvalidSetting, match="read before its trainer's last step"):
        made.step(1)


def test_a_stale_gradient_is_mxnets_warning(mx):
    made = _Run(mx, "ours", _FORMS[0]).step(1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        made.trainer.step(4)


def test_parameters_may_be_listed_twice(mx):
    made, right = (_Run(mx, "ours", _FORMS[0]) for _ in range(2))
    listed = list(made.net.collect_params().values())
    made.trainer = ece408_op.Trainer([*listed, *listed], *_FORMS[0])
    _agree(made.step(3).parameters(), right.step(3).parameters())


def test_other_optimizers_are_mxnets(mx):
    form = ("adagrad", {"learning_rate": 0.05})
    ours, right = (_Run(mx, way, form).step(3) for way in ("ours", "mxnet"))
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-4)


def test_without_a_gpu_it_is_mxnets_trainer(mx, capfd, monkeypatch):
    monkeypatch.setattr(networks, "_last_said", "")
    with settings.override(backend="cpu"):
        ours, right = (_Run(mx, way, _FORMS[0]).step(3) for way in ("ours", "mxnet"))
    np.testing.assert_allclose(ours.losses, right.losses, rtol=1e-5)
    assert (
        "the network runs on the CPU, by MXNet: backend cpu is requested" in capfd.readouterr().err
    )


def test_dropout_follows_mxnets_seed(mx):
    def losses(seed):
        made = _Run(mx, "ours", _FORMS[0], dropout=0.5)
        mx.random.seed(seed)
        return made.step(3).losses

    first = losses(5)
    assert losses(5) == first
    assert losses(6)[0] != first[0]


def test_executors_train(mx):
    """Of Module, with SoftmaxOutput."""

    def fit(backend):
        x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")
        x = mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=5, name="f")
        symbol = mx.sym.SoftmaxOutput(x, name="softmax")
        if backend:
            symbol = symbol.optimize_for("ece408")
        module = mx.mod.Module(symbol, context=mx.cpu())
        x, labels = _data(mx)
        batches = mx.io.NDArrayIter(x, labels, batch_size=2)
        mx.random.seed(3)
        module.fit(batches, num_epoch=3, optimizer_params={"learning_rate": 0.1},
                   initializer=mx.init.Xavier())  # fmt: skip
        return {name: a.asnumpy() for name, a in module.get_params()[0].items()}

    _agree(fit(True), fit(False))
