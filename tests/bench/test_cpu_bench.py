"""The CPU benchmark measures what it says, and refuses to time a wrong kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from places import SCRIPTS
from studies import cpu_table

from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, cpu_timer
from ece408_op.errors import InvalidSetting, WrongResult
from ece408_op.problem import ConvProblem

SCRIPT = SCRIPTS / "bench_cpu.py"
SMALL = ("--batch", "3", "--small-batch", "2", "--samples", "2", "--no-torch", "--threads", "2")


def _run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_the_script_writes_what_it_prints(tmp_path):
    result = _run("fa19_1", "b3,c5,h29,w31,m20,k5", *SMALL, "--write", tmp_path / "cpu")
    assert result.returncode == 0, result.stderr
    assert "| fa19_1 | `b3,c1,h70,w70,m12,k5x5` |" in result.stdout
    assert result.stdout.strip() in (tmp_path / "cpu.md").read_text()
    document = json.loads((tmp_path / "cpu.json").read_text())
    assert [len(document[k]) for k in ("forward", "unlisted", "backward", "variants")] == [
        2,
        0,
        2,
        2,
    ]
    for entry in document["forward"]:
        assert entry["error"] < cpu_timer.TOLERANCE
        assert {times["n"] for times in entry["ms"].values()} == {2}
        assert all(0 < times["min"] <= times["median"] for times in entry["ms"].values())
        assert set(entry["ms"]) == {"ours", "mxnet", "ours fresh", "mxnet fresh"}
    assert set(document["variants"][0]["ms"]) >= {*native.isas(), "1 threads", "2 threads"}
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cpu_table.README_BEGIN}\n{cpu_table.README_END}\nafter\n")
    assert _run("--write", tmp_path / "cpu", "--readme", readme).returncode == 0
    assert readme.read_text() == cpu_table.with_table(readme.read_text(), document)
    assert "| fa19_1 |" in readme.read_text()


def test_bad_shapes_and_peers_are_said_in_one_line():
    result = _run("fa20_1", *SMALL)
    assert result.returncode == 14
    assert "'fa20_1' is neither a shape's name" in result.stderr
    with pytest.raises(InvalidSetting, match="/nowhere/python does not run"):
        cpu_timer.TorchPeer("/nowhere/python")
    with pytest.raises(InvalidSetting, match="it needs PyTorch"):
        cpu_timer.TorchPeer(os.devnull if os.access(os.devnull, os.X_OK) else "/bin/false")


_TORCH = """
import os
__version__ = "played"
Tensor = memory_format = contiguous_format = channels_last = None
set_num_threads = set_grad_enabled = lambda value: None
class rand:
    def __init__(self, size): os._exit(7) if 0 in size else None
    def contiguous(self, memory_format): return self
class nn:
    class functional:
        conv2d = staticmethod(lambda x, w: None)
"""


def test_a_peer_answers_until_it_dies(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with cpu_timer.TorchPeer(sys.executable) as peer:
        assert peer.versions["torch"] == "played"
        assert peer.ask(shape={"x": [1], "w": [1], "y": [1]}) == {}
        assert peer.ask(run=["NCHW", "forward"])["ms"] >= 0
        peer.ask(shape={"x": [0], "w": [1], "y": [1]})
        for _ in range(2):
            with pytest.raises(InvalidSetting, match="ended; it needs PyTorch"):
                peer.ask(run=["NCHW", "forward"])


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_a_wrong_kernel_is_not_timed(mx, wrong):
    problem = ConvProblem.parse("b5,c2,h9,w20,m3,k3")
    x, w = cpu_timer.inputs(problem)
    y = cpu_timer.bind(problem, x, w, ours=True).executor.forward()[0]
    assert cpu_timer.check(problem, x, w, y) < cpu_timer.TOLERANCE
    y[4, 2, 6, 17] = wrong
    with pytest.raises(WrongResult, match=r"b5,c2,h9,w20,m3,k3x3 came out with a relative error"):
        cpu_timer.check(problem, x, w, y)


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
