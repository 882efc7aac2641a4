"""Calls of a network in the emulator: weights that change, sizes, chunks, threads, errors."""

import numpy as np
import pytest
from gpu_networks import Case, array, check_together, error, small
from programs import together

from ece408_op import settings
from ece408_op.backends.cpu.native import copy
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


def _refusing_chunks(sym):
    """Return cases by name that cannot be computed image by image."""
    data, weight = sym.Variable("data"), sym.Variable("weight", shape=(5, 3))
    dense = sym.FullyConnected(data, weight, num_hidden=5, no_bias=True)
    other, others = sym.Variable("other", shape=(3, 2, 4)), sym.Variable("others", shape=(1, 5, 3))
    few = sym.FullyConnected(data, num_hidden=3, no_bias=True)
    x = sym.squeeze(data * 2)
    return {
        # Parameters of every image.
        "BatchNorm": Case(sym.BatchNorm(data, axis=-3), data=(3, 2, 1)),
        "Concat": Case(sym.concat(data, other, dim=2), data=(3, 2, 1)),
        # It is not written again by each chunk at its images' offset.
        "of weights": Case(sym.Group([weight * 2, dense]), whole=True, data=(5, 3)),
        # In a chunk of one image it has the same shape as for all images.
        "without an axis of images": Case(
            sym.broadcast_add(others, sym.expand_dims(few, axis=0)), whole=True, data=(5, 2)
        ),
        # A chunk has lost the axis that these need.
        "Deconvolution": Case(sym.Deconvolution(x, kernel=(3, 3), num_filter=2), data=(3, 2, 4, 5)),
        "LeakyReLU": Case(sym.LeakyReLU(x, act_type="prelu"), data=(3, 4)),
        "Pooling": Case(
            sym.Pooling(x, kernel=(1,), global_pool=True, pool_type="avg"), data=(3, 4, 5)
        ),
        "Adaptive": Case(sym.contrib.AdaptiveAvgPooling2D(x), data=(3, 2, 4, 5)),
        "Reshape": Case(sym.Reshape(x, shape=(0, 0, 0, 0)), data=(3, 2, 4, 5)),
    }


def test_what_has_no_chunks(mx, monkeypatch):
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 4)
    check_together(_refusing_chunks(mx.sym), BELOW)


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


def test_page_locked_images_are_not_copied_on_the_host(mx, monkeypatch):
    copied = []

    def noted(arrays, threads):
        copied.extend(nbytes for _, _, nbytes in arrays)
        copy(arrays, threads)

    monkeypatch.setattr("ece408_op.network.chunk_pipeline.copy", noted)
    case = small(mx, "lenet", whole=True)
    (expected,) = case.expected()
    for is_locked, images in ((False, [case.arrays["data"].nbytes]), (True, [])):
        monkeypatch.setattr(EmulatedMachine, "is_page_locked", lambda *_: is_locked)  # noqa: B023
        copied.clear()
        assert (case.run(case.network())[0] == expected).all()
        assert copied == [*images, expected.nbytes]


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


def test_arrays_and_inputs_of_every_kind(mx):
    """An array that is still to be read, inputs of several first sizes, and pixels as bytes."""
    sym = mx.sym
    x = sym.Pooling(sym.Variable("data"), kernel=(2, 2))
    both = x + sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=3, name="a")
    weight = 0.5 * sym.Variable("weight", shape=(2, 3, 2, 2))
    read = sym.Convolution(both, weight, kernel=(2, 2), num_filter=2, no_bias=True, name="b")
    cases = {"still to be read": Case(sym.Group([both * x, read, x]), data=(1, 3, 6, 7))}
    x = sym.Variable("data")
    dense = sym.FullyConnected(x, sym.Variable("w"), num_hidden=4, no_bias=True)
    cases["first sizes"] = Case(dense, data=(3, 5), w=(4, 5))
    pixels = (sym.Cast(x, dtype="float32") - 128) / 64
    c = sym.Convolution(pixels, kernel=(3, 3), num_filter=2, name="c")
    cases["bytes"] = Case(c, dtype="uint8", data=(2, 3, 8, 7))
    check_together(cases, BELOW)


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
