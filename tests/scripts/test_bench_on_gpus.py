"""Measurements of scripts/bench.py on GPUs, with a fake GPU and fake networks."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeGpu
from studies import gpu_layers, gpu_networks, ladder
from studies.bench_request import Request

from ece408_op import settings
from ece408_op.bench import cuda_report, cuda_timer, results
from ece408_op.bench.cuda_timer import Timing
from ece408_op.bench.peers import cudnn
from ece408_op.errors import NotEnoughMemory

LAYER = "c64,h28,w28,m64,k3x3,p1x1"


class PlayedPeer(contextlib.nullcontext):
    def __init__(self, python):
        super().__init__(self)
        self.versions = {"torch": "9", "cudnn": 8}

    def measure(self, problem, samples, direction="forward", variants=None):
        fast = {"samples_ms": [2.0] * samples, "error": 1e-7}
        return {"NCHW float32": fast, "NHWC float32": {"failure": "no such algorithm"}}


class PlayedBench:
    """Kernels take a millisecond; that of the strict sums is wrong."""

    def __init__(self, gpu, problem):
        self.gpu, self.problem, self.timed = gpu, problem, []

    def time(self, kernel, samples, plan=None):
        if self.problem.batch > 100000 or kernel.name == "3_shared_tiles":
            raise NotEnoughMemory("too large")
        failure = "12 elements are not finite" if kernel.name == "general_strict" else None
        return Timing([1.0] * samples, 1e-7, failure)


@pytest.fixture(autouse=True)
def _played(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_layers.device, "get", lambda number: FakeGpu())
    monkeypatch.setattr(gpu_layers, "compile_all", lambda gpu, plans: list(plans))
    monkeypatch.setattr(cudnn, "Peer", PlayedPeer)
    monkeypatch.setattr(
        cuda_timer,
        "bench",
        lambda gpu, problem, direction="forward": contextlib.nullcontext(PlayedBench(gpu, problem)),
    )
    with settings.override(cache=tmp_path):
        yield


def test_layers_are_timed_beside_cudnns_better_layout():
    request = Request([LAYER], ["cudnn"], 3, [2, 200000], kernels=["general_strict"])
    rows = list(gpu_layers.rows(request))
    assert [(row["batch"], row["direction"]) for row in rows][::3] == [
        (2, "forward"),
        (200000, "forward"),
    ]
    forward = rows[0]
    assert set(forward["ms"]) == {"ours", "general_strict", "cudnn NCHW float32"}
    assert results.peers(forward) == {"cudnn": 2.0}
    text = results.table(rows)
    assert f"| `{LAYER}` | {forward['kernel']} | 1 | general_strict  | 2 | 2.00 |" in text
    assert "general_strict: 12 elements are not finite" in text
    assert "cudnn NHWC float32: no such algorithm" in text
    assert f"{LAYER}, batch 200000: too large" in text
    assert request.versions == {"torch": "9", "cudnn": 8}


def test_the_ladder_goes_on_from_an_earlier_run():
    request = Request(
        ["fa19_1"], ["cudnn"], 3, [10], kernels=["1_naive", "2_constant_weights", "3_shared_tiles"]
    )
    timing = {"median": 7.0, "min": 7.0, "n": 1}
    earlier = {"case": "fa19_1", "batch": 10, "ms": {"1_naive": timing}, "errors": {"1_naive": 0.0}}
    earlier["failures"] = {"2_constant_weights": "too large"}
    other = {"case": "fa19_2", "batch": 10, "ms": {"1_naive": timing}, "errors": {}}
    request.earlier = [other, earlier]
    (row,) = ladder.rows_on_gpu(request)
    assert [request.whole(rows) for rows in ([], [row])] == [[other, earlier], [row, other]]
    medians = {who: ms["median"] for who, ms in row["ms"].items()}
    assert medians == {"1_naive": 7.0, "2_constant_weights": 1.0, "cudnn NCHW float32": 2.0}
    assert row["failures"] == {
        "3_shared_tiles": "too large",
        "cudnn NHWC float32": "no such algorithm",
    }
    assert "| 3_shared_tiles | failed |" in cuda_report.tables([row])


class PlayedNetwork:
    """A network whose results are wrong if images are divided among GPUs of these numbers."""

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
        return [("conv", "gemm", "b4", 0.5), ("fc", "gemm", "", 0.25)]


def _networks(monkeypatch, played, devices, details=False):
    monkeypatch.setattr(gpu_networks, "Ours", lambda name, batch: played)
    request = Request(["lenet"], repeat=3, batches=[4], devices=devices, details=details)
    (row,) = gpu_networks.rows(request)
    return row


def test_sets_of_gpus_take_turns_with_one(monkeypatch, capsys):
    played = PlayedNetwork()
    row = _networks(monkeypatch, played, ["0,1", "0,2"], details=True)
    assert list(row["ms"]) == ["ours", "ours on GPUs 0,1", "ours on GPUs 0,2"]
    assert all(ms["n"] == 3 for ms in row["ms"].values())
    assert {(0,), (0, 1), (0, 2)} == set(played.ran)
    assert played.ran.count((0, 1)) > 12  # the first calls learn
    assert (row["error"], row["kernels_ms"]) == (0, 0.75)
    assert "failures" not in row
    assert "| conv | gemm | `b4` | 0.5000 |" in capsys.readouterr().out


def test_wrong_results_of_any_set_count(monkeypatch):
    row = _networks(monkeypatch, PlayedNetwork(wrong=[(0, 1)]), ["0,1"])
    assert row["error"] > gpu_networks.TOLERANCE["float32"]
    assert "outputs are wrong" in results.failures([row])[0]
