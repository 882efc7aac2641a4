"""scripts/bench_training.py: both networks learn the same."""

from __future__ import annotations

import pytest
from studies import training_speed

from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.errors import InvalidSetting


@pytest.mark.slow
def test_a_network_learns_with_ours_as_with_mxnets_own():
    turns = []
    found = training_speed.measure("2019fa", 3, None, lambda: turns.append(1))
    assert len(turns) == 3 + WARM_UP
    assert len(set(found.losses["mxnet"])) == len(turns)
    assert found.loss_difference() < 1e-4
    assert set(found.directions) == {"forward", "backward_data", "backward_weight"}
    row = training_speed.table([found]).splitlines()[2]
    assert row.startswith("| 2019fa | 100 | ")
    (record,) = training_speed.records([found])
    assert record["ms"]["ours"]["n"] == 3


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true"])
def test_a_python_without_pytorch_is_named(python):
    with pytest.raises(InvalidSetting, match=f"^{python} .*--no-peer"):
        training_speed.measure("2019fa", 4, python, lambda: None)
