"""What scripts/bench_networks.py measures, of a network that is played."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from studies import gpu_networks

from ece408_op import settings


class Played:
    """A network whose results are wrong where GPUs of these numbers share the images."""

    def __init__(self, wrong=()):
        self.y = np.ones((4, 2), np.float32)
        self.ran = []
        self.wrong = wrong
        self.network = SimpleNamespace(close=lambda: None)

    def run(self):
        devices = settings.devices()
        self.ran.append(devices)
        self.y[:] = 1.5 if devices in self.wrong else 1.0

    def checked(self):
        return np.arange(4)

    def expected(self):
        return np.ones((4, 2), np.float32)

    def watched(self):
        return gpu_networks.Watched()

    def steps(self):
        return []


def _measured(monkeypatch, played, shared):
    monkeypatch.setattr(gpu_networks, "Ours", lambda name, batch: played)
    return gpu_networks.measure("lenet", 4, None, [], 3, lambda: None, shared)


def test_sets_of_gpus_take_turns_with_one(monkeypatch):
    played = Played()
    found = _measured(monkeypatch, played, ["0,1", "0,2"])
    assert list(found.ms) == ["ours", "ours on GPUs 0,1", "ours on GPUs 0,2"]
    assert all(len(samples) == 3 for samples in found.ms.values())
    assert {(0,), (0, 1), (0, 2)} == set(played.ran)
    assert played.ran.count((0, 1)) > 12  # in the first calls it learns
    assert found.error() == 0
    found.ms.update({"ours": [30.0], "ours on GPUs 0,1": [16.0], "ours on GPUs 0,2": [40.0]})
    assert gpu_networks.shared_lines([found]) == [
        "`lenet`, batch 4, ours on GPUs 0,1: 16.00 ms, 1.88 times as fast as ours alone.",
        "`lenet`, batch 4, ours on GPUs 0,2: 40.00 ms, 0.75 times as fast as ours alone.",
    ]


def test_wrong_results_of_any_set_count(monkeypatch):
    found = _measured(monkeypatch, Played(wrong=[(0, 1)]), ["0,1"])
    assert found.error() > gpu_networks.TOLERANCE
    assert gpu_networks.shared_lines([_measured(monkeypatch, Played(), [])]) == []
