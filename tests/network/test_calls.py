"""Calls of a network in the emulator: weights that change, sizes, chunks, threads, errors."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_networks import Case, array, error, small
from programs import together

from ece408_op import settings
from ece408_op.errors import InvalidProblem, NotEnoughMemory, UnsupportedProblem
from ece408_op.network import Network, microbatches
from ece408_op.network.machines.emulated import EmulatedMachine
from ece408_op.network.network_program import Program
from ece408_op.op_log import op_times

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 3e-6


def test_changed_weights_are_noticed_by_their_version(mx):
    case = small(mx, "lenet", whole=True)
    network = case.network()
    case.run(network)
    case.arrays["conv1_weight"] += 1
    case.arrays["fc_bias"][:] = 0
    (before,) = case.run(network)
    case.version += 1
    (after,), (expected,) = case.run(network), case.expected()
    assert (after == expected).all()
    assert (before != expected).any()


def test_little_memory_makes_chunks_and_too_little_an_error(mx):
    case = small(mx, "lenet", whole=True)
    (expected,) = case.expected()
    with settings.override(gpu_memory=40000):
        assert (case.run(case.network())[0] == expected).all()
    with (
        settings.override(gpu_memory=5000),
        pytest.raises(NotEnoughMemory, match=r"takes \d+ bytes on the GPU for one image, and 5000"),
    ):
        case.run(case.network())


@pytest.mark.parametrize("name", ["BatchNorm", "Concat"])
def test_what_takes_parameters_of_every_image_has_no_chunks(mx, monkeypatch, name):
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 4)
    x, other = mx.sym.Variable("data"), mx.sym.Variable("other", shape=(3, 2, 4))
    symbols = {"BatchNorm": mx.sym.BatchNorm(x, axis=-3), "Concat": mx.sym.concat(x, other, dim=2)}
    case = Case(symbols[name], data=(3, 2, 1))
    assert error(case.run(case.network())[0], case.expected()[0]) < BELOW


def test_a_result_of_weights_alone_is_written_once(mx, monkeypatch):
    """It is not written again by each chunk at its images' offset."""
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 4)
    weight = mx.sym.Variable("weight", shape=(5, 3))
    dense = mx.sym.FullyConnected(mx.sym.Variable("data"), weight, num_hidden=5, no_bias=True)
    case = Case(mx.sym.Group([weight * 2, dense]), whole=True, data=(5, 3))
    for found, expected in zip(case.run(case.network()), case.expected()):
        np.testing.assert_array_equal(found, expected)


def test_a_result_without_an_axis_of_images_is_written_once(mx, monkeypatch):
    """In a chunk of one image it has the same shape as for all images."""
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 4)
    dense = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, no_bias=True)
    others = mx.sym.Variable("others", shape=(1, 5, 3))
    symbol = mx.sym.broadcast_add(others, mx.sym.expand_dims(dense, axis=0))
    case = Case(symbol, whole=True, data=(5, 2))
    np.testing.assert_array_equal(case.run(case.network())[0], case.expected()[0])


@pytest.mark.parametrize("op", ["Deconvolution", "LeakyReLU", "Pooling", "Adaptive", "Reshape"])
def test_what_needs_an_axis_that_a_chunk_has_lost_has_no_chunks(mx, monkeypatch, op):
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 4)
    shapes = {"Deconvolution": (3, 2, 4, 5), "LeakyReLU": (3, 4), "Pooling": (3, 4, 5)}
    shapes["Adaptive"] = shapes["Reshape"] = (3, 2, 4, 5)
    x = mx.sym.squeeze(mx.sym.Variable("data") * 2)
    symbols = {
        "Deconvolution": lambda: mx.sym.Deconvolution(x, kernel=(3, 3), num_filter=2),
        "LeakyReLU": lambda: mx.sym.LeakyReLU(x, act_type="prelu"),
        "Pooling": lambda: mx.sym.Pooling(x, kernel=(1,), global_pool=True, pool_type="avg"),
        "Adaptive": lambda: mx.sym.contrib.AdaptiveAvgPooling2D(x),
        "Reshape": lambda: mx.sym.Reshape(x, shape=(0, 0, 0, 0)),
    }
    case = Case(symbols[op](), data=shapes[op])
    assert error(case.run(case.network())[0], case.expected()[0]) < BELOW


def _chain(mx):
    sym = mx.sym
    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=8, name="a")
    x = sym.Pooling(sym.Activation(x, act_type="relu"), kernel=(2, 2))
    x = sym.Convolution(x, kernel=(1, 1), num_filter=7, name="b")
    x = sym.Pooling(x, kernel=(2, 2), stride=(2, 2))
    return Case(sym.FullyConnected(x, num_hidden=3, name="c"), whole=True, data=(5, 3, 10, 9))


@pytest.mark.parametrize(("flops_per_byte", "steps"), [(10**9, 3), (1, 1)])
def test_the_first_steps_begin_while_images_arrive(mx, monkeypatch, noted, flops_per_byte, steps):
    """The steps before images shrink, or while copies take no longer; in microbatches of two
    images, the last two of which overlap."""
    case = _chain(mx)
    monkeypatch.setattr(microbatches, "MICROBATCH_BYTES", 2 * case.arrays["data"][0].nbytes)
    monkeypatch.setattr(microbatches, "_FLOPS_PER_BYTE", flops_per_byte)
    count = lambda program, lane, weights, first: (first, len(program.steps.early.steps))  # noqa: E731
    done = noted(Program, "launch_early", count)
    network = case.network()
    for _ in range(2):
        assert (case.run(network)[0] == case.expected()[0]).all()
    assert done == 2 * [(first, steps) for first in (0, 2, 3)]


def test_steps_that_add_to_arrays_are_not_done_twice(mx, monkeypatch):
    sym = mx.sym
    x = sym.Convolution(sym.Variable("data"), kernel=(1, 1), num_filter=4, name="a")
    case = Case(
        x + sym.Convolution(x, kernel=(1, 1), num_filter=4, name="b"), whole=True, data=(3, 2, 5, 6)
    )
    monkeypatch.setattr(microbatches, "MICROBATCH_BYTES", 2 * case.arrays["data"][0].nbytes)
    assert (case.run(case.network())[0] == case.expected()[0]).all()


def test_where_the_time_went(mx):
    case = small(mx, "lenet")
    y = np.full(case.output_shapes[0], np.nan, np.float32)
    with settings.override(gpu_memory=20000):
        watched = case.network().watch([array(each) for each in case.arrays.values()], [array(y)])
    assert error(y, case.expected()[0]) < BELOW
    assert len(watched.chunks) > 1
    for marks in watched.chunks:
        assert list(marks) == sorted(marks)
        assert 0 < min(marks) < max(marks) < watched.seconds
    assert 0 < watched.copying < watched.seconds


def test_less_memory_than_was_said_makes_smaller_chunks(mx, monkeypatch):
    case = small(mx, "lenet", whole=True)
    asked = []

    def lanes(self, count, device_bytes, *rest):
        asked.append(device_bytes)
        if device_bytes > 5000:
            raise NotEnoughMemory("there is no more")
        return given(self, count, device_bytes, *rest)

    given = EmulatedMachine.lanes
    monkeypatch.setattr(EmulatedMachine, "lanes", lanes)
    (found,) = case.run(case.network())
    assert (found == case.expected()[0]).all()
    assert asked[0] > 5000 >= asked[-1]


def test_batches_of_several_sizes_take_turns(mx):
    case, more = (small(mx, "lenet", whole=True) for _ in range(2))
    more.arrays["data"] = np.concatenate([case.arrays["data"]] * 2)
    more.output_shapes = [(10, 10)]
    network = case.network()
    (expected,) = case.expected()
    for _ in range(2):
        assert (case.run(network)[0] == expected).all()
        assert (more.run(network)[0] == np.concatenate([expected] * 2)).all()
    network.close()
    assert (case.run(network)[0] == expected).all()


def test_threads_share_a_network(mx):
    case = small(mx, "lenet", whole=True)
    network, (expected,) = case.network(), case.expected()
    for found in together(lambda _: [case.run(network)[0] for _ in range(3)], range(3)):
        assert (found == expected).all()


def test_images_that_depend_on_each_other_are_not_taken_apart(mx):
    x = mx.sym.Variable("data")
    case = Case(mx.sym.broadcast_sub(x, mx.sym.mean(x, axis=0, keepdims=True)), data=(6, 5))
    with settings.override(gpu_memory=2000):
        (found,) = case.run(case.network())
    assert error(found, case.expected()[0]) < BELOW


def test_an_array_that_is_still_to_be_read_is_not_computed_onto(mx):
    sym = mx.sym
    x = sym.Pooling(sym.Variable("data"), kernel=(2, 2))
    both = x + sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=3, name="a")
    weight = 0.5 * sym.Variable("weight", shape=(2, 3, 2, 2))
    read = sym.Convolution(both, weight, kernel=(2, 2), num_filter=2, no_bias=True, name="b")
    case = Case(sym.Group([both * x, read, x]), data=(1, 3, 6, 7))
    for found, expected in zip(case.run(case.network()), case.expected()):
        assert error(found, expected) < BELOW


def test_results_that_are_made_of_weights_alone_are_there_in_every_call(mx):
    """Parts of results, too, even if other networks use the same memory."""
    sym = mx.sym
    image, kernel = sym.Variable("w", shape=(1, 2, 7, 8)), sym.Variable("v", shape=(2, 2, 3, 3))
    made = sym.Convolution(image, kernel, kernel=(3, 3), num_filter=2, no_bias=True)
    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=4, name="a")
    both = sym.Concat(x, sym.relu(made + 1), 2 * x, dim=1)
    case, other = Case(sym.Group([both, made, x]), data=(1, 3, 7, 8)), small(mx, "lenet")
    network, another = case.network(), other.network()
    for _ in range(3):
        for found, expected in zip(case.run(network), case.expected()):
            assert error(found, expected) < BELOW
        other.run(another)
        case.arrays["data"] += 1


def test_inputs_of_several_first_sizes_are_computed_as_a_whole(mx):
    sym = mx.sym
    case = Case(
        sym.FullyConnected(sym.Variable("data"), sym.Variable("w"), num_hidden=4, no_bias=True),
        data=(3, 5),
        w=(4, 5),
    )
    assert error(case.run(case.network())[0], case.expected()[0]) < BELOW


def test_pixels_can_be_bytes(mx):
    x = (mx.sym.Cast(mx.sym.Variable("data"), dtype="float32") - 128) / 64
    case = Case(
        mx.sym.Convolution(x, kernel=(3, 3), num_filter=2, name="c"),
        dtype="uint8",
        data=(2, 3, 8, 7),
    )
    assert error(case.run(case.network())[0], case.expected()[0]) < BELOW


def test_convolutions_are_in_the_log_of_op_times(mx):
    case = small(mx, "lenet")
    network = case.network()
    with op_times() as log:
        case.run(network)
    assert [each.layer for each in log] == ["conv1", "conv2"]
    assert str(log[0].problem) == "b5,c1,h16,w14,m4,k5x5,bias"
    assert all(each.seconds > 0 and each.backend == "emulator" for each in log)


def test_what_cannot_be_computed_is_said(mx):
    case = small(mx, "lenet")
    with pytest.raises(UnsupportedProblem, match="the network also takes conv1_bias, conv1_weight"):
        Network(case.symbol.tojson(), ["data"], [])
    with pytest.raises(UnsupportedProblem, match="the network's JSON cannot be read"):
        Network("{}", [], [])
    upside = mx.sym.flip(mx.sym.Variable("data"), axis=1, name="upside")
    with pytest.raises(UnsupportedProblem, match="upside: operator reverse is not computed"):
        Network(upside.tojson(), ["data"], [])
    with pytest.raises(InvalidProblem, match="the network takes 6 arrays and gives 1, not 0 and 0"):
        case.network().compute([], [])
    data = case.arrays["data"].astype(np.float64)
    inputs = [array(each) for each in ({**case.arrays, "data": data}).values()]
    out = np.empty(case.output_shapes[0], np.float32)
    with pytest.raises(UnsupportedProblem, match="data is of type float64; use float32"):
        case.network().compute(inputs, [array(out)])
    wrong = np.empty((5, 11), np.float32)
    inputs = [array(each) for each in case.arrays.values()]
    with pytest.raises(UnsupportedProblem, match=r"an output has shape \(5, 10\), not \(5, 11\)"):
        case.network().compute(inputs, [array(wrong)])
