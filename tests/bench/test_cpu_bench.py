"""The CPU benchmark measures what it says, and refuses to time a wrong kernel."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from places import SCRIPTS
from played_torch import TORCH
from studies import cpu_table, layers

from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, cpu_timer
from ece408_op.errors import InvalidSetting, WrongResult
from ece408_op.problem import ConvProblem

BENCH_CPU, BENCH_LAYERS = SCRIPTS / "bench_cpu.py", SCRIPTS / "bench_layers.py"
SMALL = (
    "--batch-size",
    "3",
    "--small-batch-size",
    "2",
    "--repeat",
    "2",
    "--no-peer",
    "--threads",
    "2",
)


def _run(*arguments, script=BENCH_CPU):
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_script_writes_what_it_prints(tmp_path):
    result = _run("fa19_1", "b3,c5,h29,w31,m20,k5", *SMALL, "--output", tmp_path / "cpu")
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
    assert _run("--output", tmp_path / "cpu", "--readme", readme).returncode == 0
    assert readme.read_text() == cpu_table.with_table(readme.read_text(), document)
    assert "| fa19_1 |" in readme.read_text()


def test_layers_are_timed_by_every_kernel_that_suits(tmp_path):
    layer, write = "c8,h12,w30,m8,k3x3,p1x1", tmp_path / "layers"
    arguments = ("--batch-size", 2, "--repeat", 3, "--threads", 2, "--no-peer", "--output", write)
    result = _run(layer, *arguments, script=BENCH_LAYERS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in write.with_suffix(".md").read_text()
    (found,) = json.loads(write.with_suffix(".json").read_text())["layers"]
    assert found["layer"] == layer
    assert set(found["forward"]["ms"]) >= {"direct", "winograd", "conv_fwd_oc"}
    assert set(found["backward_weight"]["ms"]) >= {"conv_bwd_w_dot", "im2col"}
    for direction in DIRECTIONS:
        assert f"## {direction}, batch 2\n\n" in result.stdout
        assert found[direction]["chosen"] in found[direction]["ms"]
        assert all(times["n"] == 3 for times in found[direction]["ms"].values())


def test_kernels_that_disagree_are_not_timed(monkeypatch):
    run = native.run

    def wrong(direction, *arguments, kernel, **keywords):
        run(direction, *arguments, kernel=kernel, **keywords)
        if kernel == "im2col":
            ctypes.memset(arguments[-1], 0, 4)

    monkeypatch.setattr(native, "run", wrong)
    with pytest.raises(WrongResult, match=r"forward of b2,c3,.*: im2col and direct differ by"):
        layers.measure(ConvProblem.parse("b2,c3,h9,w20,m3,k1"), None, 1, lambda: None)


def test_bad_shapes_and_peers_are_said_in_one_line():
    result = _run("fa20_3", *SMALL)
    assert result.returncode == 14
    assert "'fa20_3' is neither a shape's name" in result.stderr
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
