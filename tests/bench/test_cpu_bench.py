"""The CPU benchmark measures all contenders, and refuses to time an incorrect kernel."""

import dataclasses
import os
import sys

import numpy as np
import pytest
from played_torch import TORCH

from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, cpu_timer
from ece408_op.errors import InvalidSetting, WrongResult
from ece408_op.problem import ConvProblem


def test_peers_that_are_none_are_said_in_one_line():
    with pytest.raises(InvalidSetting, match="/nowhere/python does not run"):
        cpu_timer.TorchPeer("/nowhere/python")
    with pytest.raises(InvalidSetting, match="name a Python with PyTorch"):
        cpu_timer.TorchPeer(os.devnull if os.access(os.devnull, os.X_OK) else "/bin/false")


def test_a_peer_answers_until_it_dies(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with cpu_timer.TorchPeer(sys.executable) as peer:
        assert peer.versions["torch"] == "played"
        steps = {"stride": [1, 1], "pad": [0, 0], "dilate": [1, 1], "groups": 1}
        assert peer.ask(shape={"x": [1], "w": [1], "y": [1], **steps}) == {}
        assert peer.ask(run=["NCHW", "forward"])["ms"] >= 0
        peer.ask(shape={"x": [0], "w": [1], "y": [1], **steps})
        for _ in range(2):
            with pytest.raises(InvalidSetting, match="ended; name a Python with PyTorch"):
                peer.ask(run=["NCHW", "forward"])


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_a_wrong_kernel_is_not_timed(mx, wrong):
    problem = ConvProblem.parse("b5,c2,h9,w20,m3,k3")
    x, w = cpu_timer.inputs(problem)
    y = cpu_timer.bind(problem, x, w, ours=True).executor.forward()[0]
    assert cpu_timer.check(problem, x, w, y) < cpu_timer.TOLERANCE
    y[4, 2, 6, 17] = wrong
    with pytest.raises(WrongResult, match=r"b5,c2,h9,w20,m3,k3x3 has a relative error"):
        cpu_timer.check(problem, x, w, y)


def test_every_other_turn_goes_backwards():
    order = []
    contenders = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    times = cpu_timer.interleaved(contenders, 2)
    assert "".join(order) == "abccba" * 2
    assert times == {"a": [7, 12], "b": [8, 11], "c": [9, 10]}


def test_floors_come_from_ceilings():
    top = ceilings.Ceilings(gflops=100.0, store_gbs=10.0, read_gbs=20.0, fresh_gbs=2.0)
    problem = ConvProblem.parse("b10,c1,h70,w70,m12,k5")
    assert top.compute_ms(problem) == pytest.approx(problem.flops / 1e8)
    written, read = 4 * 10 * 12 * 66 * 66, 4 * (10 * 70 * 70 + 12 * 25)
    assert top.memory_ms(problem) == pytest.approx(written / 1e7 + read / 2e7)
    assert top.floor_ms(problem) == max(top.compute_ms(problem), top.memory_ms(problem))
    assert top.floor_ms(problem, fresh=True) == pytest.approx(written / 2e6 + read / 2e7)


def test_every_instruction_set_has_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "_FLOATS", 1 << 20)
    monkeypatch.setattr(ceilings, "_ROUNDS", 20)
    for isa in native.isas():
        found = ceilings.measure(isa, 2)
        assert np.isfinite(dataclasses.astuple(found)).all()
        assert min(dataclasses.astuple(found)) > 0.01
