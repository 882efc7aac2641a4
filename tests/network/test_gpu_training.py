"""Training on a GPU, emulated: gradients, memory, random numbers, resident parameters."""

import gc
import sys

import numpy as np
import pytest
from compiled_together import MachineOfMany
from compiled_together import machine as machine_at_once
from gpu_networks import array, error, given
from gradient_cases import TrainingCase
from gradient_symbols import BELOW, SHAPE, compare, layers, others, whole
from gradient_symbols import small as small_symbol

from ece408_op import op_times, settings
from ece408_op.errors import InvalidSetting, NotEnoughMemory
from ece408_op.network import gpu_memory
from ece408_op.network.machines import emulated
from ece408_op.network.residents import Resident


@pytest.fixture(autouse=True)
def on_emulator():
    with settings.override(backend="emulator"):
        yield


@pytest.fixture
def at_once(monkeypatch):
    """An emulated GPU that compiles a network's kernels together."""
    made = machine_at_once("fast")
    monkeypatch.setattr(emulated, "emulated", lambda: made)
    return made


def test_a_rule_gives_mxnets_gradient(mx, monkeypatch):
    """The same cases as on the CPU, compiled as one."""
    machine, cases, wrong = MachineOfMany("fast"), [], []
    monkeypatch.setattr(emulated, "emulated", lambda: machine)
    for name, symbol in {**layers(mx.sym), **others(mx.sym)}.items():
        plain, other = (TrainingCase(symbol, data=SHAPE, on="gpu") for _ in range(2))
        for case in (plain, whole(other)):
            training = case.training()
            training.program([array(each) for each in case.arrays.values()])
            cases.append((name, case, training))
    with machine.active():
        machine.compile()
    for name, case, training in cases:
        recorded = case.record(training)
        try:
            compare((recorded.outputs, *recorded.backward()), case.expected())
        except AssertionError as difference:
            wrong.append(f"{name}: {difference}")
    assert wrong == []
    assert len(cases) > 100


@pytest.fixture
def small(mx, at_once):
    return TrainingCase(small_symbol(mx.sym), data=(2, 3, 13, 11), on="gpu")


def test_calls_in_between_do_not_change_gradients(small):
    """Two recorded calls, one after the other backward, twice; and another size between."""
    training, expected = small.training(), small.expected()[1]
    first = small.record(training)
    other = TrainingCase(small.symbol, seed=1, data=(2, 3, 13, 11), on="gpu")
    second = other.record(training)
    larger = TrainingCase(small.symbol, seed=2, data=(3, 3, 13, 11), on="gpu")
    third = larger.record(training)
    for case, recorded in ((larger, third), (small, first), (other, second), (small, first)):
        gradients = recorded.backward()[0]
        right = expected if case is small else case.expected()[1]
        assert all(error(gradients[name], right[name]) < BELOW for name in case.wanted)


def test_memory_is_lent_again(small, at_once):
    training, memory = small.training(), gpu_memory.memory_of(at_once)
    small.record(training).backward()
    gc.collect()
    before = memory._nbytes
    for _ in range(5):
        small.record(training).backward()
    assert memory._nbytes == before
    with at_once.lock, at_once.active():
        memory.trim()
    assert memory._nbytes <= before


def test_too_little_memory_is_one_line(small):
    with settings.override(gpu_memory="1M"), pytest.raises(NotEnoughMemory) as raised:
        TrainingCase(small.symbol, data=(64, 3, 99, 99), on="gpu").found()
    assert "too many; use a smaller batch" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_little_memory_makes_normalisations_computed_again(mx, at_once):
    """To the same bits."""
    s = mx.sym
    x = s.Variable("data")
    for number, end in enumerate((s.relu, lambda y: s.clip(y, 0, 1), lambda y: y)):
        x = s.Convolution(x, num_filter=8, kernel=(3, 3), no_bias=True, name=f"conv{number}")
        x = end(s.BatchNorm(x, fix_gamma=False, name=f"norm{number}"))
        if not number:
            x = s.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = s.Convolution(x, num_filter=2, kernel=(1, 1), name="last")
    case = TrainingCase(x, data=(64, 3, 21, 19), on="gpu")
    arrays = [array(each) for each in case.arrays.values()]
    (y,), expected, _ = case.found()
    saved = case.training().program(arrays).saved_bytes
    gc.collect()
    with at_once.lock, at_once.active():
        gpu_memory.memory_of(at_once).trim()
    with settings.override(gpu_memory=str(gpu_memory.memory_of(at_once)._nbytes + saved)):
        found = case.found()
        assert case.training().program(arrays).saved_bytes < 0.7 * saved
    assert np.array_equal(found[0][0], y)
    assert all(np.array_equal(found[1][name], right) for name, right in expected.items())


def test_op_times_have_each_direction(small):
    with op_times() as log:
        inputs = [array(each) for each in small.arrays.values()]
        made = small.training().program(inputs)
        outputs = [np.empty(shape, np.float32) for shape in made.output_shapes]
        seconds = made.forward(given(*inputs, *map(array, outputs)), made.room())
    assert not log
    assert len(seconds) == made.steps.forward


def test_dropout_is_drawn_again_in_the_backward_pass(mx, at_once):
    x = mx.sym.Variable("data")
    symbol = mx.sym.Group([mx.sym.Dropout(x, p=0.25), mx.sym.Dropout(x, p=0.25)])
    case = TrainingCase(symbol, data=(7, 1001), on="gpu", lowest=1.0)
    case.heads = [case.arrays["data"], 0 * case.arrays["data"]]
    made = case.training().program([array(case.arrays["data"])])

    def run(seed):
        saved, (x,) = made.room(), case.arrays.values()
        outputs, dx = [np.empty_like(x) for _ in range(2)], np.empty_like(x)
        made.forward(given(*map(array, (x, *outputs))), saved, seed)
        made.backward(given(*map(array, (x, *case.heads, dx))), saved)
        return *outputs, dx

    y, other, dx = run(1 << 32 | 5)
    np.testing.assert_array_equal(y, dx)
    np.testing.assert_array_equal(y, run(1 << 32 | 5)[0])
    kept = y != 0
    np.testing.assert_allclose(y[kept], case.arrays["data"][kept] / 0.75, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 0.02
    for different in (other, run(2 << 32 | 5)[0], run(1 << 32 | 6)[0]):
        assert abs((kept == (different != 0)).mean() - 0.625) < 0.02


def test_a_resident_parameter_is_used_in_place(small, at_once):
    """Its gradient stays on the GPU, and a change of the host's array is noticed by its version."""
    training, name = small.training(), "fc_weight"
    weight = small.arrays[name]
    gradient = np.full_like(weight, np.nan)
    with at_once.lock, at_once.active():
        memory = gpu_memory.memory_of(at_once)
        resident = Resident(memory, name, array(weight), array(gradient), 1)
    made = training.program([array(each) for each in small.arrays.values()])

    def passes(version):
        inputs = [array(a, version if n == name else 0) for n, a in small.arrays.items()]
        outputs = [np.empty(shape, np.float32) for shape in made.output_shapes]
        results = [np.empty(shape, np.float32) for shape in made.result_shapes]
        results[small.wanted.index(name)] = gradient
        saved = made.room()
        made.forward(given(*inputs, *map(array, outputs)), saved)
        new = [array(each, 7) for each in results]
        made.backward(given(*inputs, *map(array, small.heads), *new), saved)
        return outputs

    def fetched():
        with at_once.lock, at_once.active():
            assert resident.has_gradient(8)
            assert not resident.has_gradient(7)
            resident.fetch_gradient()
        return gradient

    before = passes(3)
    assert np.isnan(gradient).all()
    assert error(fetched(), small.expected()[1][name]) < BELOW
    weight *= 2
    assert np.array_equal(passes(3)[0], before[0])
    outputs = passes(4)
    expected = small.expected()
    assert error(outputs[0], expected[0][0]) < BELOW
    assert error(fetched(), expected[1][name]) < BELOW
    resident.is_ahead = True
    with pytest.raises(InvalidSetting, match=f"parameter {name} was used through an array"):
        passes(5)
    resident.close()
    assert error(passes(5)[0], expected[0][0]) < BELOW
    assert sys.getrefcount(resident) < 10


@pytest.mark.gpu
def test_a_real_gpu_gives_mxnets_gradient(mx):
    symbols = layers(mx.sym)
    names = ("norms_sum_relu", "norm_last", "pool_max", "pool_avg", "dense", "convolution")
    with settings.override(backend="cuda"):
        for name in names:
            case = TrainingCase(symbols[name], data=SHAPE, on="gpu")
            compare(case.found(), case.expected())
