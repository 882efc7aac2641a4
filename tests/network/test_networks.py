"""Small whole networks on the CPU and in the emulator: exact on whole numbers, and as MXNet's."""

import pytest
from cases import first
from gpu_networks import NETWORKS, error, small

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 3e-6


@pytest.mark.parametrize("name", first(4, NETWORKS))
def test_a_network_computes_what_mxnet_does(mx, name):
    case = small(mx, name)
    (expected,) = case.expected()
    for on in ("gpu", "cpu"):
        (found,) = case.run(case.network(on=on))
        assert error(found, expected) < BELOW, on


def test_whole_numbers_come_out_exactly(mx):
    case = small(mx, "lenet", whole=True)
    (expected,) = case.expected()
    for on in ("gpu", "cpu"):
        (found,) = case.run(case.network(on=on))
        assert (found == expected).all(), on
