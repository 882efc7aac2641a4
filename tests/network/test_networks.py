"""Small whole networks in the emulator: exact on whole numbers, and against MXNet's on the CPU."""

from __future__ import annotations

import pytest
from cases import first
from gpu_networks import NETWORKS, error, small

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 3e-6


@pytest.mark.parametrize("name", first(4, NETWORKS))
def test_a_network_computes_what_mxnet_does(mx, name):
    case = small(mx, name)
    (found,), (expected,) = case.run(case.network()), case.expected()
    assert error(found, expected) < BELOW


def test_whole_numbers_come_out_exactly(mx):
    case = small(mx, "lenet", whole=True)
    (found,), (expected,) = case.run(case.network()), case.expected()
    assert (found == expected).all()
