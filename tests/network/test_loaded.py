"""Networks from MXNet's files, on NumPy arrays."""

import threading
from unittest import mock

import numpy as np
import pytest
from gpu_networks import NETWORKS, Case, error, small
from programs import together

import ece408_op
from ece408_op.backends.cpu import program
from ece408_op.backends.cpu.program import Kind
from ece408_op.errors import (
    CheckpointMismatch,
    CheckpointMissing,
    InvalidProblem,
    InvalidSetting,
    NotEnoughMemory,
    UnsupportedProblem,
)
from ece408_op.network.machines import cpu

pytestmark = pytest.mark.usefixtures("emulated")


def _saved(mx, case, folder):
    """Save a case as Module does; return the prefix."""
    states = case.symbol.list_auxiliary_states()
    arrays = {n: mx.nd.array(v) for n, v in case.arrays.items() if n not in case.shapes}
    auxiliary = {name: arrays.pop(name) for name in states}
    mx.model.save_checkpoint(str(folder / "net"), 7, case.symbol, arrays, auxiliary)
    return folder / "net"


@pytest.mark.parametrize("on", ["cpu", pytest.param("emulator", marks=pytest.mark.slow)])
def test_it_computes_what_mxnet_does(mx, tmp_path, on):
    for name in NETWORKS:
        case = small(mx, name)
        network = ece408_op.load_network(_saved(mx, case, tmp_path), 7, on)
        x, (expected,) = case.arrays["data"], case.expected()
        assert network.data == ("data",)
        for given in (x, x.astype(np.float64), np.asfortranarray(x)):
            found = network(given)
            assert error(found, expected) < 3e-6, name
        steps = network.steps(x)
        assert any(each.problem for each in steps)
        assert all(each.seconds >= 0 for each in steps)
        # Another number of images, and an input that may not be written.
        one = x[:1].copy()
        one.flags.writeable = False
        assert error(network(one), expected[:1]) < 3e-6, name


def test_labels_are_left_out_and_outputs_are_a_tuple(mx, tmp_path):
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    symbol = mx.sym.Group([mx.sym.SoftmaxOutput(x, name="softmax"), x * 2])
    arrays = {"fc_weight": mx.nd.ones((3, 4)), "fc_bias": mx.nd.array([0, 1, 2])}
    mx.model.save_checkpoint(str(tmp_path / "net"), 0, symbol, arrays, {})
    network = ece408_op.load_network(tmp_path / "net")
    softmax, doubled = network(np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(doubled, [[12, 14, 16], [44, 46, 48]])
    np.testing.assert_allclose(softmax.sum(1), 1, rtol=1e-6)


def test_a_parameter_is_replaced(mx, tmp_path):
    case = small(mx, "lenet", whole=True)
    network = ece408_op.load_network(_saved(mx, case, tmp_path), 7)
    x = case.arrays["data"]
    for factor in (2, -1):
        case.arrays["fc_weight"] *= factor
        case.arrays["conv1_weight"] += 1
        for name in ("fc_weight", "conv1_weight"):
            network.set(name, case.arrays[name])
        np.testing.assert_array_equal(network(x), case.expected()[0])
    network.close()
    np.testing.assert_array_equal(network(x), case.expected()[0])
    for name, values in (("fc_weight", np.zeros(3)), ("data", x), ("other", x)):
        with pytest.raises(InvalidProblem, match=f"{name} cannot become an array of shape"):
            network.set(name, values)


def test_weights_that_are_not_finite(mx, tmp_path):
    """Kernels that multiply a border's zeros cannot pack them; others read them in place."""
    x = mx.sym.Variable("data")
    symbol = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name="conv")
    case = Case(mx.sym.Activation(symbol, act_type="relu"), data=(40, 3, 15, 13))
    network = ece408_op.load_network(_saved(mx, case, tmp_path), 7)
    weights = case.arrays["conv_weight"]
    assert network.steps(case.arrays["data"])[0].kernel.startswith("winograd")
    for value, images in ((np.inf, 40), (np.inf, 20), (1.0, 20), (1.0, 40)):
        weights[1, 0, 0, 0] = value
        network.set("conv_weight", weights)
        found = network(case.arrays["data"][:images])
        # The first row and column do not read this weight.
        reads = np.s_[:, 1, 1:, 1:]
        assert (found[reads] == np.inf).any() == (value == np.inf)
        found[reads] = 0
        assert np.isfinite(found).all()
    assert error(network(case.arrays["data"]), case.expected()[0]) < 3e-6


def test_sizes_share_packed_weights(mx, tmp_path, noted):
    case = small(mx, "resnet")
    prefix = _saved(mx, case, tmp_path)
    network, alone = (ece408_op.load_network(prefix, 7) for _ in range(2))
    packed = noted(program, "run", lambda steps, *_: sum(s.kind == Kind.PACK for s in steps))
    packs = []
    weight = next(each for each in case.arrays if each.endswith("weight"))
    # More sizes than there are programs; the first one comes again.
    batches = [np.repeat(case.arrays["data"], count, axis=0) for count in (*range(1, 11), 1)]
    for scale in (1, 2):
        found = []
        for each in (network, alone):
            each.set(weight, case.arrays[weight] * scale)
            packed.clear()
            for x in batches:
                found.append(each(x))
                if each is alone:
                    each.close()
            packs.append(sum(packed))
        np.testing.assert_equal(found[: len(batches)], found[len(batches) :])
    shared, own = packs[::2], packs[1::2]
    # Some sizes have other kernels.
    assert all(0 < 4 * a < b for a, b in zip(shared, own))


def test_outputs_of_one_row_have_packed_weights_of_their_own(mx, tmp_path):
    """Their kernel has no vertical stride."""
    symbol = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(7, 7), stride=(2, 2),
                                num_filter=16, name="conv")  # fmt: skip
    case = Case(symbol, data=(1, 16, 11, 257))
    prefix = _saved(mx, case, tmp_path)
    network = ece408_op.load_network(prefix, 7)
    for rows in (11, 7, 9, 8):
        x = case.arrays["data"][:, :, :rows]
        np.testing.assert_array_equal(network(x), ece408_op.load_network(prefix, 7)(x))


def test_parameters_are_replaced_while_others_call(mx, tmp_path):
    case = small(mx, "lenet", whole=True)
    network = ece408_op.load_network(_saved(mx, case, tmp_path), 7)
    x, weights = case.arrays["data"], case.arrays["fc_weight"].copy()
    expected = []
    for factor in range(4):
        network.set("fc_weight", factor * weights)
        expected.append(network(x))
    assert not (expected[0] == expected[1]).all()
    found, is_done = [], threading.Event()

    def call():
        while not is_done.is_set():
            found.append(network(x))

    thread = threading.Thread(target=call)
    thread.start()
    for number in range(200):
        network.set("fc_weight", number % 4 * weights)
    is_done.set()
    thread.join()
    found.append(network(x))
    assert all(any((each == one).all() for one in expected) for each in found)
    np.testing.assert_array_equal(found[-1], expected[199 % 4])


def test_too_little_memory_is_said(mx, tmp_path, monkeypatch):
    network = ece408_op.load_network(_saved(mx, small(mx, "lenet"), tmp_path), 7)
    x = np.zeros((2, 1, 16, 14))
    expected = network(x)
    network.close()
    monkeypatch.setattr(np, "empty", mock.Mock(side_effect=MemoryError))
    with pytest.raises(NotEnoughMemory, match="there is no room; use a smaller batch"):
        cpu.Memory(1 << 20)
    monkeypatch.undo()
    np.testing.assert_array_equal(network(x), expected)


def test_threads_share_a_network(mx, tmp_path):
    case = small(mx, "resnet")
    network = ece408_op.load_network(_saved(mx, case, tmp_path), 7)
    batches = [np.repeat(case.arrays["data"], count, axis=0) for count in (1, 2, 3, 1)]
    expected = [network(each) for each in batches]
    found = together(lambda batch: [network(batch) for _ in range(20)][-1], batches)
    np.testing.assert_equal(found, expected)


def test_what_does_not_fit_is_said_in_one_line(mx, tmp_path):
    prefix = _saved(mx, small(mx, "lenet"), tmp_path)
    network = ece408_op.load_network(prefix, 7)
    x = np.zeros((2, 1, 16, 14))
    for arrays, text in (
        ((), r"takes 1 arrays \(data\), and is called with 0"),
        ((x, x), "and is called with 2"),
        ((x.astype(complex),), "arrays of complex128 are not computed"),
    ):
        with pytest.raises(InvalidProblem, match=text):
            network(*arrays)
    with pytest.raises(UnsupportedProblem, match=r"weights of shape .* do not fit"):
        network(np.zeros((2, 3, 16, 14)))
    with pytest.raises(CheckpointMissing, match=r"net-0008.params is not there"):
        ece408_op.load_network(prefix, 8)
    with pytest.raises(InvalidSetting, match="on='tpu'; choose one of cpu, gpu, emulator"):
        ece408_op.load_network(prefix, 7, "tpu")
    (tmp_path / "net-0007.params").write_bytes(b"no parameters")
    with pytest.raises(CheckpointMismatch, match=r"net-0007.params"):
        ece408_op.load_network(prefix, 7)
