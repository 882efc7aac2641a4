"""How scripts/prove_networks.py judges a network, by one of a few nodes."""

from __future__ import annotations

import numpy as np
import pytest
from studies import emulated_networks
from studies.emulated_networks import Case

from ece408_op import settings


@pytest.fixture
def case(mx, monkeypatch, kept):
    def build():
        x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc")
        return mx.sym.Activation(mx.sym.BatchNorm(x), act_type="relu")

    monkeypatch.setitem(emulated_networks.CASES, "few", Case("few nodes", build, {"data": (4, 5)}))
    with settings.override(backend="emulator", cache=kept):
        yield


def test_a_network_is_right_on_the_gpu(case):
    row = emulated_networks.examine("few")
    assert row["right"]
    assert row["nodes"] == 3
    assert row["parts"] == [3]
    assert row["error"] < 1e-6


@pytest.mark.parametrize(("factor", "right"), [(1 + 1e-6, True), (1.001, False), (np.nan, False)])
def test_other_values_are_seen(case, monkeypatch, factor, right):
    def ours(self):
        return [each * np.float32(factor) for each in self.stock()], None

    monkeypatch.setattr(emulated_networks._Model, "ours", ours)
    row = emulated_networks.examine("few")
    assert row["right"] == right
    text = emulated_networks.table([{"name": "few", "kind": "few nodes", **row}])
    assert text.startswith(f"{int(right)} of 1 networks are right")


def test_a_network_that_amplifies_rounding_proves_nothing(case, monkeypatch):
    stock = emulated_networks._Model.stock

    def coarse(self, dtype=np.float32):
        return [each * (1.01 if dtype == np.float32 else 1) for each in stock(self, dtype)]

    def ours(self):
        return stock(self), None

    monkeypatch.setattr(emulated_networks._Model, "stock", coarse)
    monkeypatch.setattr(emulated_networks._Model, "ours", ours)
    row = emulated_networks.examine("few")
    assert row["error64"] < row["stock_error64"]
    assert not row["right"]


def test_the_values_fit_what_normalisation_is_given(case):
    model = emulated_networks._Model(emulated_networks.CASES["few"])
    inner = model.symbol.get_internals()["fc_output"]
    (given,) = (each.asnumpy() for each in model._bound(inner, np.float32).forward())
    var = next(a for n, a in model.arrays.items() if n.endswith("moving_var")).asnumpy()
    assert (var / np.square(given).mean() > 0.49).all()
    assert (var / np.square(given).mean() < 1.51).all()
