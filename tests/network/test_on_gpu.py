"""Whole networks on a real GPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gpu_networks import NETWORKS, Case, error, small
from programs import together

from ece408_op import settings
from ece408_op.backends.cuda.runtime import device
from ece408_op.errors import NotEnoughMemory
from ece408_op.network import machines
from ece408_op.op_log import op_times

pytestmark = pytest.mark.gpu

BELOW = 3e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_what_mxnet_does(mx, name):
    case = small(mx, name)
    network, (expected,) = case.network(), case.expected()
    for _ in range(2):
        assert error(case.run(network)[0], expected) < BELOW
    network.close()


@pytest.mark.parametrize("batch", [1, 3, 70])
def test_whole_numbers_come_out_exactly(mx, batch):
    """By tensor core kernels, in chunks and without."""
    sym = mx.sym
    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=32, name="a")
    x = sym.Activation(x, act_type="relu")
    y = sym.Convolution(x, kernel=(1, 1), num_filter=32, name="b")
    z = sym.Convolution(y, kernel=(3, 3), pad=(1, 1), num_filter=32, num_group=32, name="c")
    x = sym.Activation(x + z, act_type="relu")
    x = sym.Pooling(sym.concat(x, y), kernel=(2, 2), stride=(2, 2))
    x = sym.Convolution(x, kernel=(3, 3), stride=(2, 2), num_filter=7, name="d")
    case = Case(x, data=(batch, 5, 18, 21))
    for name, values in case.arrays.items():
        values[...] = np.random.default_rng(1).integers(-1, 2, values.shape)
        if name == "data":
            values *= 2
    (expected,) = case.expected()
    assert np.abs(expected).max() < 2**21
    for memory in (None, 4 << 20):
        with settings.override(gpu_memory=memory):
            network = case.network()
            for _ in range(2):
                assert (case.run(network)[0] == expected).all()
            network.close()


def test_several_gpus_compute_what_mxnet_does(mx, monkeypatch):
    """Or with one that stands for several."""
    count = device.get(0).cuda.Device.count()
    with settings.override(devices=",".join(map(str, range(count)))):
        found = machines.chosen("gpu")
    monkeypatch.setattr(machines, "chosen", lambda on: found if count > 1 else found * 2)
    case = small(mx, "resnet")
    for images in (2, 5, 64):
        shape = (images, *case.arrays["data"].shape[1:])
        case.arrays["data"] = case.rng.uniform(-1, 1, shape).astype(np.float32)
        case.output_shapes = [(images, 5)]
        network, (expected,) = case.network(), case.expected()
        for _ in range(8):
            assert error(case.run(network)[0], expected) < BELOW
        network.close()


def test_changed_weights_are_noticed_by_their_version(mx):
    case = small(mx, "lenet", whole=True)
    network = case.network()
    case.run(network)
    case.arrays["conv1_weight"] += 1
    case.version += 1
    assert (case.run(network)[0] == case.expected()[0]).all()


def test_op_times_are_the_gpus_own(mx):
    case = small(mx, "lenet")
    network = case.network()
    with op_times() as log:
        (found,) = case.run(network)
    assert error(found, case.expected()[0]) < BELOW
    assert [each.layer for each in log] == ["conv1", "conv2"]
    assert all(0 < each.seconds == each.gpu.kernel_seconds < 0.1 for each in log)


def test_threads_share_networks(mx):
    cases = [small(mx, name, whole=True) for name in ("lenet", "lenet", "mobilenet")]
    networks = [case.network() for case in cases]
    firsts = [case.run(network)[0] for case, network in zip(cases, networks)]

    def work(number):
        for _ in range(50):
            assert (cases[number].run(networks[number])[0] == firsts[number]).all()

    together(work, (0, 1, 2, 0))


@pytest.mark.alone
def test_a_thousand_calls_take_no_more_memory(mx):
    case = small(mx, "resnet")
    network, gpu = case.network(), device.get(0)
    first = case.run(network)[0]
    with gpu.active():
        before = gpu.free_bytes()
    for _ in range(1000):
        assert (case.run(network)[0] == first).all()
    with gpu.active():
        assert gpu.free_bytes() == before


@pytest.mark.alone
def test_closed_networks_give_their_memory_back(mx):
    def free():
        with device.get(0).active():
            return device.get(0).free_bytes()

    case = small(mx, "lenet")
    case.arrays["fc_weight"] = case.arrays["fc_weight"].copy()
    network = case.network()
    case.run(network)
    network.close()
    before = free()
    for _ in range(20):
        case.run(network)
        network.close()
    assert free() == before


def test_too_little_memory_is_an_error(mx):
    case = small(mx, "lenet")
    with settings.override(gpu_memory=5000), pytest.raises(NotEnoughMemory, match="for one image"):
        case.run(case.network())


def test_batches_of_several_sizes_take_turns(mx):
    cases = []
    for batch in (1, 4, 33, 200):
        case = small(mx, "lenet", whole=True)
        case.arrays["data"] = case.rng.integers(-3, 4, (batch, 1, 16, 14)).astype(np.float32)
        case.output_shapes = [(batch, 10)]
        cases.append((case, case.expected()[0]))
    network = cases[0][0].network()
    for _ in range(3):
        for case, expected in cases:
            assert (case.run(network)[0] == expected).all()


FORKED = """
import os, sys
sys.path[:0] = sys.argv[1:]
from gpu_networks import small
from ece408_op.errors import NoUsableGpu
from ece408_op.operator.loading import load_mxnet
case = small(load_mxnet(), "lenet")
network = case.network()
case.run(network)
child = os.fork()
if child == 0:
    try:
        case.run(network)
    except NoUsableGpu as error:
        os._exit(0 if "does not survive a fork" in str(error) else 3)
    os._exit(4)
assert os.waitpid(child, 0)[1] == 0
case.run(network)
"""


def test_a_forked_child_is_told():
    helpers = os.path.dirname(sys.modules["gpu_networks"].__file__)
    run = subprocess.run([sys.executable, "-c", FORKED, helpers], timeout=300)
    assert run.returncode == 0


def test_several_gpus_share_a_batch(mx):
    import pycuda.driver as cuda

    if cuda.Device.count() < 2:
        pytest.skip("there is one GPU")
    case = small(mx, "resnet")
    (alone,) = case.run(case.network())
    with settings.override(devices="0,1"):
        assert len(machines.chosen("gpu")) == 2
        (shared,) = case.run(case.network())
    assert error(shared, alone) < BELOW
