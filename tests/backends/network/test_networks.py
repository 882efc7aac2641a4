"""Small whole networks in the emulator: exact on whole numbers, and against MXNet's on the CPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gpu_networks import Case, array, error

from ece408_op import settings
from ece408_op.backends.network import Network
from ece408_op.errors import InvalidProblem, NotEnoughMemory, UnsupportedProblem
from ece408_op.op_log import op_times

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 3e-6


def _lenet(sym):
    x = sym.Convolution(sym.Variable("data"), kernel=(5, 5), num_filter=4, name="conv1")
    x = sym.Pooling(sym.Activation(x, act_type="relu"), kernel=(2, 2), stride=(2, 2))
    x = sym.Convolution(x, kernel=(3, 3), num_filter=6, no_bias=True, name="conv2")
    x = sym.FullyConnected(sym.Activation(x, act_type="relu"), num_hidden=10, name="fc")
    return x


def _unit(sym, x, filters, name, stride=1):
    """A residual unit of two convolutions, normalised."""
    conv = {"num_filter": filters, "no_bias": True}
    strided = {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride)}
    y = sym.Convolution(x, **conv, **strided, name=f"{name}_a")
    y = sym.Activation(sym.BatchNorm(y, name=f"{name}_bn1", fix_gamma=False), act_type="relu")
    y = sym.Convolution(y, **conv, kernel=(3, 3), pad=(1, 1), name=f"{name}_b")
    y = sym.BatchNorm(y, name=f"{name}_bn2", fix_gamma=False)
    if stride > 1:
        x = sym.Convolution(x, **conv, kernel=(1, 1), stride=(2, 2), name=f"{name}_c")
        x = sym.BatchNorm(x, name=f"{name}_bn3")
    return sym.Activation(x + y, act_type="relu")


def _resnet(sym):
    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=6, name="first")
    x = sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1))
    x = _unit(sym, _unit(sym, x, 6, "one"), 6, "two")
    x = _unit(sym, x, 8, "three", stride=2)
    x = sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    return sym.softmax(sym.FullyConnected(x, num_hidden=5, name="fc"))


def _inception(sym):
    x = sym.Variable("data")
    parts = [
        sym.Activation(
            sym.Convolution(x, kernel=(k, k), pad=(k // 2, k // 2), num_filter=m, name=f"conv{k}"),
            act_type="relu",
        )
        for k, m in ((1, 3), (3, 4), (5, 2))
    ]
    pooled = sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg")
    x = sym.BatchNorm(sym.concat(*parts, pooled), name="bn")
    x = sym.concat(sym.Activation(x, act_type="relu"), x)
    return sym.Convolution(x, kernel=(1, 1), num_filter=7, name="last")


def _mobilenet(sym):
    x = sym.Variable("data")
    for number, stride in enumerate((1, 2)):
        name = f"unit{number}"
        y = sym.Convolution(x, kernel=(1, 1), num_filter=8, no_bias=True, name=f"{name}_a")
        y = sym.clip(sym.BatchNorm(y, name=f"{name}_bn1"), 0, 6)
        y = sym.Convolution(
            y,
            kernel=(3, 3),
            pad=(1, 1),
            stride=(stride, stride),
            num_filter=8,
            num_group=8,
            no_bias=True,
            name=f"{name}_b",
        )
        y = sym.clip(sym.BatchNorm(y, name=f"{name}_bn2"), 0, 6)
        y = sym.Convolution(y, kernel=(1, 1), num_filter=4, no_bias=True, name=f"{name}_c")
        y = sym.BatchNorm(y, name=f"{name}_bn3")
        x = y + x if stride == 1 else y
    return sym.Flatten(sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))


NETWORKS = {
    "lenet": (_lenet, (5, 1, 16, 14)),
    "resnet": (_resnet, (3, 3, 15, 13)),
    "inception": (_inception, (3, 4, 9, 7)),
    "mobilenet": (_mobilenet, (3, 4, 9, 11)),
}


def _case(mx, name, **options):
    make, shape = NETWORKS[name]
    return Case(make(mx.sym), data=shape, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_what_mxnet_does(mx, name):
    case = _case(mx, name)
    (found,), (expected,) = case.run(case.network()), case.expected()
    assert error(found, expected) < BELOW


def test_whole_numbers_come_out_exactly(mx):
    case = _case(mx, "lenet", whole=True)
    (found,), (expected,) = case.run(case.network()), case.expected()
    assert (found == expected).all()


def test_changed_weights_are_noticed_by_their_version(mx):
    case = _case(mx, "lenet", whole=True)
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
    case = _case(mx, "lenet", whole=True)
    (expected,) = case.expected()
    with settings.override(gpu_memory=40000):
        assert (case.run(case.network())[0] == expected).all()
    with (
        settings.override(gpu_memory=5000),
        pytest.raises(NotEnoughMemory, match=r"takes \d+ bytes on the GPU for one image, and 5000"),
    ):
        case.run(case.network())


def test_batches_of_several_sizes_take_turns(mx):
    case, more = (_case(mx, "lenet", whole=True) for _ in range(2))
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
    case = _case(mx, "lenet", whole=True)
    network, (expected,) = case.network(), case.expected()
    wrong = []

    def work():
        for _ in range(3):
            if not (case.run(network)[0] == expected).all():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_images_that_depend_on_each_other_are_not_taken_apart(mx):
    x = mx.sym.Variable("data")
    case = Case(mx.sym.broadcast_sub(x, mx.sym.mean(x, axis=0, keepdims=True)), data=(6, 5))
    with settings.override(gpu_memory=2000):
        (found,) = case.run(case.network())
    assert error(found, case.expected()[0]) < BELOW


def test_pixels_can_be_bytes(mx):
    x = (mx.sym.Cast(mx.sym.Variable("data"), dtype="float32") - 128) / 64
    case = Case(
        mx.sym.Convolution(x, kernel=(3, 3), num_filter=2, name="c"),
        dtype="uint8",
        data=(2, 3, 8, 7),
    )
    assert error(case.run(case.network())[0], case.expected()[0]) < BELOW


def test_convolutions_are_in_the_log_of_op_times(mx):
    case = _case(mx, "lenet")
    network = case.network()
    with op_times() as log:
        case.run(network)
    assert [each.layer for each in log] == ["conv1", "conv2"]
    assert str(log[0].problem) == "b5,c1,h16,w14,m4,k5x5,bias"
    assert all(each.seconds > 0 and each.backend == "emulator" for each in log)


def test_what_cannot_be_computed_is_said(mx):
    case = _case(mx, "lenet")
    with pytest.raises(UnsupportedProblem, match="the network also takes conv1_bias, conv1_weight"):
        Network(case.symbol.tojson(), ["data"], [])
    with pytest.raises(UnsupportedProblem, match="the network's JSON cannot be read"):
        Network("{}", [], [])
    upside = mx.sym.flip(mx.sym.Variable("data"), axis=1, name="upside")
    with pytest.raises(UnsupportedProblem, match="upside: operator reverse is not computed on the"):
        Network(upside.tojson(), ["data"], [])
    with pytest.raises(InvalidProblem, match="the network takes 6 arrays and gives 1, not 0 and 0"):
        case.network().compute([], [])
    data = case.arrays["data"].astype(np.float64)
    inputs = [array(each) for each in ({**case.arrays, "data": data}).values()]
    out = np.empty(case.output_shapes[0], np.float32)
    with pytest.raises(UnsupportedProblem, match="data is of type float64; networks on the GPU"):
        case.network().compute(inputs, [array(out)])
    wrong = np.empty((5, 11), np.float32)
    inputs = [array(each) for each in case.arrays.values()]
    with pytest.raises(UnsupportedProblem, match=r"an output has shape \(5, 10\), not \(5, 11\)"):
        case.network().compute(inputs, [array(wrong)])
