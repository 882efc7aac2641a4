"""Random chains of operators on the GPU, in the emulator, compute what MXNet does on the CPU."""

from __future__ import annotations

import operator_fuzz
import pytest

from ece408_op.backends.network import operators


def _expect_none_wrong(seed, cases):
    wrong, counts = operator_fuzz.run(seed, cases)
    assert wrong == []
    assert sum(counts.values()) >= cases


def test_chains_of_operators():
    _expect_none_wrong(1, 60)


@pytest.mark.slow
def test_many_chains_of_operators():
    _expect_none_wrong(2, 2000)


def test_a_fault_is_found(monkeypatch):
    monkeypatch.setitem(operators.OPERATORS, "tanh", operators.OPERATORS["relu"])
    wrong, _ = operator_fuzz.run(1, 30)
    assert wrong != []
