"""What scripts/prove_profile.py compares, and the ceilings of a GPU."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ece408_op import errors
from ece408_op.backends.cuda import device
from ece408_op.lab import gpu_ceilings, profile_proof
from ece408_op.lab.profile_proof import Agreement, Cost, Total
from ece408_op.profile import activities

RECORDED = Path(__file__).parent / "data" / "profile_gpu.json"


def test_a_milestones_kernels_are_held_against_its_events():
    found = profile_proof.of_milestone(activities.read(RECORDED))
    assert [each.shape for each in found] == ["m3.1 100, conv1", "m3.1 100, conv2"]
    for each in found:
        assert each.profile_ms < each.recorded_events_ms
        assert each.off(each.recorded_events_ms) < 0
        assert each.off(None) is None


def test_both_tables():
    agreement = Agreement("fa19_1", "13_column_pairs", 2.0, 1.9, 2.1, 1.91)
    cost = Cost(("m3.1", "100"), ((10.0,), (12.0,), (11.0,)), ((12.0,), (13.0,), (12.1,)))
    text = profile_proof.table([agreement], [cost])
    assert "| fa19_1 | 13_column_pairs | 1.9000 | 2.0000 | -5.00% |" in text
    assert text.endswith("| m3.1 100 | 1 | 11.0 | 12.1 | +10.0% |")
    assert "staged" not in text
    assert "off by" not in profile_proof.table([], [cost])
    total = Total("fa19_2", "18_split_half", 20, ((19.0, 20.0), (19.8, 20.0), (19.9, 22.0)))
    assert "| fa19_2 | 18_split_half | 20 | 19.8000 | 20.0000 | -1.00% |" in profile_proof.table(
        [agreement], [cost], [total]
    )
    staged = Agreement("m3.1, conv1", "13_column_pairs", None, 1.9, 2.1)
    assert "Of a staged milestone" in profile_proof.table([staged], [])


def test_a_failed_run_is_told_in_its_words(monkeypatch):
    failed = CompletedProcess([], 18, "", "first\nece408: error: no GPU\n")
    monkeypatch.setattr(profile_proof.comparison, "run_process", lambda command: failed)
    with pytest.raises(errors.OperatorFailed, match=r"m3\.1 5 failed \(18\): .*no GPU"):
        profile_proof.cost(["m3.1", "5"], 1)


def test_op_times_are_read_in_turns(monkeypatch):
    commands = []

    def run(command):
        commands.append(command)
        seconds = 0.002 if "--profile" in command else 0.001
        return CompletedProcess(command, 0, f"Op Time: {seconds}\nOp Time: 0.5\nCorrectness\n", "")

    monkeypatch.setattr(profile_proof.comparison, "run_process", run)
    cost = profile_proof.cost(["m3.1", "5"], 3)
    assert ["--profile" in command for command in commands] == [False, True] * 3
    assert cost.medians() == [(1.0, 2.0), (500.0, 500.0)]


def test_the_ceiling_depends_on_the_precision():
    found = gpu_ceilings.GpuCeilings(4000, 60_000, tf32_gflops=300_000, fp16_gflops=600_000)
    assert found.gflops("float32") == 200_000  # three products of halves for one
    assert found.gflops("tf32") == found.gflops("float16") == 600_000
    old = gpu_ceilings.GpuCeilings(copy_gbs=300, fp32_gflops=8_000, tf32_gflops=0)
    assert [old.gflops(name) for name in ("float32", "tf32", "float16")] == [8_000, 8_000, 16_000]


@pytest.mark.gpu
def test_the_gpus_ceilings():
    gpu = device.get(0)
    found = gpu_ceilings.measure(gpu)
    assert found.copy_gbs > 50
    assert found.fp32_gflops > 1000
    if gpu.capability >= (8, 0):
        assert found.fp32_gflops < found.tf32_gflops < found.fp16_gflops
