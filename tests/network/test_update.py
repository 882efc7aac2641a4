"""Updates of weights on the emulated GPU, beside MXNet's optimizers."""

from contextlib import contextmanager

import numpy as np
import pytest

from ece408_op.network import machines
from ece408_op.network.gpu_memory import memory_of
from ece408_op.network.update import Item, Updates

pytestmark = pytest.mark.usefixtures("emulated")

SIZES = (1, 3, 1000, 4099)
FORMS = {
    "sgd": ("sgd", {"momentum": 0.0}, "clip_gradient"),
    "sgd with momentum": ("sgd", {"momentum": 0.9}, "momentum"),
    "nag": ("nag", {"momentum": 0.9}, "momentum"),
    "nag without momentum": ("nag", {"momentum": 0.0}, "clip_gradient"),
    "adam": ("adam", {"epsilon": 1e-3}, "epsilon"),
    "adamw": ("adamw", {"epsilon": 1e-3, "beta1": 0.8, "beta2": 0.99, "eta": 0.5}, "eta"),
    "rmsprop": ("rmsprop", {"epsilon": 1e-3, "centered": False}, "gamma1"),
    "rmsprop, bounded": ("rmsprop", {"clip_weights": 0.5, "centered": False}, "clip_weights"),
    "rmsprop, centered": ("rmsprop", {"epsilon": 1e-3, "centered": True}, "gamma2"),
    "lamb": ("lamb", {"epsilon": 1e-3}, "beta2"),
    "lamb, uncorrected": ("lamb", {"bias_correction": False, "upper_bound": 20.0}, "upper_bound"),
    "lamb, bounded": ("lamb", {"lower_bound": 10.0}, "lower_bound"),
}


@pytest.fixture
def optimizers(mx):
    """Return a function that makes MXNet's optimizers."""

    class AdamW(mx.optimizer.Optimizer):
        """What a user's class does, as MXNet has only the operator."""

        def __init__(self, beta1, beta2, epsilon, eta, **options):
            super().__init__(**options)
            self.beta1, self.beta2, self.epsilon, self.eta = beta1, beta2, epsilon, eta

        def create_state(self, index, weight):
            return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            names = ("beta1", "beta2", "epsilon", "eta")
            options = {name: getattr(self, name) for name in names}
            options.update(lr=self._get_lr(index), wd=self._get_wd(index))
            options.update(clip_gradient=self.clip_gradient or -1)
            scale = mx.nd.array([self.rescale_grad])
            mx.nd.contrib.adamw_update(weight, grad, *state, scale, out=weight, **options)

    def make(rule, clip, options):
        common = {"learning_rate": 0.1, "wd": 0.2, "rescale_grad": 0.5, "clip_gradient": clip}
        made = AdamW if rule == "adamw" else lambda **all: mx.optimizer.create(rule, **all)
        optimizer = made(**common, **options)
        optimizer.set_lr_mult({1: 0.5, 3: 2.0})
        optimizer.set_wd_mult({2: 0.0, 3: 0.5})
        return optimizer

    return make


class _Memory:
    """The arrays of a test on the emulated GPU."""

    def __init__(self, machine):
        self._machine, self._nbytes = machine, 1 << 20
        self.begin = self._end = machine.allocate(self._nbytes)

    def place(self, array, odd):
        address = self._end = -(-self._end // 16) * 16 + 4 * odd
        self._end += array.nbytes
        assert self._end <= self.begin + self._nbytes
        self._machine.upload(address, array.ctypes.data, array.nbytes)
        return address

    def fetch(self, address, size):
        found = np.empty(size, np.float32)
        self._machine.download(found.ctypes.data, address, found.nbytes)
        return found


@contextmanager
def _active():
    machine = machines.chosen("emulator")[0]
    with machine.lock, machine.active():
        memory = _Memory(machine)
        yield machine, memory
        machine.free(memory.begin)


def _states(state):
    return [] if state is None else list(state) if isinstance(state, (list, tuple)) else [state]


def _distance(mx, optimizer, rule, constants, rng, steps):
    """Return the largest difference of any weight or state after some steps, over the largest
    element of its array."""
    gradients = [rng.standard_normal((steps, size)).astype(np.float32) for size in SIZES]
    weights = [mx.nd.array(rng.standard_normal(size)) for size in SIZES]
    states = [optimizer.create_state_multi_precision(*each) for each in enumerate(weights)]
    worst = 0.0
    with _active() as (machine, memory):
        updates = Updates(memory_of(machine), rule, constants)
        items = []
        for i, (weight, size) in enumerate(zip(weights, SIZES)):
            # Some arrays are read as float4, one is not.
            zeros, odd = np.zeros(size, np.float32), size == 1000
            assert len(_states(states[i])) == updates.states
            places = [memory.place(zeros, odd) for _ in range(updates.states)]
            places = memory.place(weight.asnumpy(), odd), (memory.place(zeros, odd),), tuple(places)
            items.append(Item(*places, size, 0, 0))
        for step in range(steps):
            for i, item in enumerate(items):
                gradient = gradients[i][step]
                optimizer.update_multi_precision(i, weights[i], mx.nd.array(gradient), states[i])
                machine.upload(*item.gradients, gradient.ctypes.data, gradient.nbytes)
                rates = {"lr": optimizer._get_lr(i), "wd": optimizer._get_wd(i)}
                items[i] = item._replace(**rates, t=step + 1)
            updates.run(updates.table(items, optimizer.rescale_grad))
        memory_of(machine).settle()
        for item, weight, state, gradient in zip(items, weights, states, gradients):
            assert (memory.fetch(*item.gradients, item.elements) == gradient[-1]).all()
            for place, each in zip((item.weight, *item.states), (weight, *_states(state))):
                expected = each.asnumpy()
                found = memory.fetch(place, item.elements)
                assert np.isfinite(found).all()
                worst = max(worst, abs(found - expected).max() / abs(expected).max())
    return worst


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("form", FORMS)
def test_updates_are_mxnets(mx, optimizers, rng, form, clip):
    rule, options, _ = FORMS[form]
    optimizer = optimizers(rule, clip, options)
    assert _distance(mx, optimizer, rule, vars(optimizer), rng, 20) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_constant_is_noticed(mx, optimizers, rng, form):
    rule, options, name = FORMS[form]
    optimizer = optimizers(rule, 0.3, options)
    wrong = {**vars(optimizer), name: 0.99 * getattr(optimizer, name)}
    assert _distance(mx, optimizer, rule, wrong, rng, 2) > 1e-5


def test_arrays_without_elements_and_steps_that_adamw_skips():
    constants = dict.fromkeys(("beta1", "beta2", "epsilon", "eta"), 1.0)
    ones = np.ones(4099, np.float32)
    with _active() as (machine, memory):
        gradient, *weights = [memory.place(ones, False) for _ in range(5)]
        items = [
            Item(w, (gradient,), (), size, 0.5, 0) for w, size in zip(weights, (0, 4099, 0, 5))
        ]
        plain = Updates(memory_of(machine), "sgd", {"momentum": 0})
        plain.run(plain.table(items))
        skipping = Updates(memory_of(machine), "adamw", constants)
        for scale in (0.0, np.inf, np.nan):
            skipping.run(skipping.table(items, scale))
        memory_of(machine).settle()
        assert [(memory.fetch(w, 4099) == 0.5).sum() for w in weights] == [0, 4099, 0, 5]


@pytest.mark.parametrize("rule", ["sgd", "lamb"])
def test_gradients_are_added_up_in_order(rng, rule):
    """Of up to three arrays; one is not aligned to float4, and some are missing."""
    gradients = rng.standard_normal((3, 4099)).astype(np.float32)
    constants = {"momentum": 0.9, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
    constants["bias_correction"] = True

    def updated(count, rows):
        with _active() as (machine, memory):
            updates, items = Updates(memory_of(machine), rule, constants, count), []
            for size, row in rows:
                weight, *states = np.zeros((1 + updates.states, size), np.float32)
                weight += np.arange(size)
                places = tuple(memory.place(each[:size], n == 1) for n, each in enumerate(row))
                states = tuple(memory.place(each, False) for each in states)
                items.append(Item(memory.place(weight, False), places, states, size, 0.1, 0.1))
            updates.run(updates.table(items, 0.5))
            memory_of(machine).settle()
            return [memory.fetch(item.weight, item.elements) for item in items]

    a, b, c = gradients
    found = updated(3, [(4099, [a, b, c]), (4000, [c, a]), (5, [b])])
    right = updated(1, [(4099, [a + b + c]), (4000, [c + a]), (5, [b])])
    assert all(map(np.array_equal, found, right))
    assert not np.array_equal(found[0], updated(1, [(4099, [a])])[0])
