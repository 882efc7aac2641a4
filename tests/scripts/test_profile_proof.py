"""What scripts/prove_profile.py compares, and the ceilings of a GPU."""

from __future__ import annotations

import dataclasses
from subprocess import CompletedProcess

import pytest
from places import DATA
from studies import profile_proof, profiled_kernels
from studies.profile_proof import Cost, Layer
from studies.profiled_kernels import Timed, Times

from ece408_op import errors
from ece408_op.backends.cuda.runtime import device
from ece408_op.profile import activities, gpu_ceilings

RECORDED = DATA / "profile_gpu.json"


def test_a_milestones_kernels_are_held_against_its_events_and_ncu():
    profile = activities.read(RECORDED)
    found = profile_proof.of_milestone(profile)
    assert [each.layer for each in found] == ["conv1", "conv2"]
    for each in found:
        assert each.milestone == "m3.1 100"
        assert 0 < each.profile_ms < each.events_ms
        assert each.ncu_ms is None
    (name,) = {each["name"] for each in profile.kernel_figures[0]["functions"]}
    counted = dataclasses.replace(
        profile, counters=({"name": name, "launches": 3, "milliseconds": 0.25},)
    )
    assert [each.ncu_ms for each in profile_proof.of_milestone(counted)] == [0.75, None]


def test_layers_and_costs_as_tables():
    cost = Cost(("m3.1", "100"), ((10.0,), (12.0,), (11.0,)), ((12.0,), (13.0,), (12.1,)))
    assert profile_proof.costs_table([cost]).startswith(f"Medians of {len(cost.with_ms)} runs;")
    assert profile_proof.costs_table([cost]).endswith("| m3.1 100 | 1 | 11.0 | 12.1 | +10.0% |")
    assert cost.record()["without_ms"] == [{"median": 11.0, "min": 10.0, "n": 3}]
    plain = Layer("m3.1 100", "conv1", "13_column_pairs", 1.9, 2.1)
    text = profile_proof.layers_table([plain])
    assert text.startswith("Of a staged milestone")
    assert text.endswith("| m3.1 100 | conv1 | 13_column_pairs | 1.9000 | 2.1000 |")
    assert "ncu" not in text
    assert "caches emptied" in profile_proof.layers_table([dataclasses.replace(plain, ncu_ms=2.0)])
    counted = dataclasses.replace(plain, ncu_ms=2.0)
    lines = profile_proof.layers_table([plain, counted]).splitlines()
    assert lines[-2].endswith("| 1.9000 | 2.1000 |  |  |")
    assert lines[-1].endswith("| 1.9000 | 2.1000 | 2.0000 | -5.00% |")


def test_launches_in_a_profile_are_those_between_the_events():
    launches = [1000.0] * 3 + [3.0] * 20 + [1000.0, 4.0] * 20 + [0.5] * 119 + [1.5]
    times = profiled_kernels.of_launches(launches)
    assert times.apart == (3.0,) * 20
    assert times.behind == (4.0,) * 20
    assert times.in_a_row == (10.0,) * 5 + (11.0,)
    with pytest.raises(errors.OperatorFailed, match=r"has 182 of 183 launches"):
        profiled_kernels.of_launches(launches[1:])


def test_totals_and_single_launches_as_tables():
    profile = Times((0.95,) * 19 + (1.45,), (1.0,) * 20, (19.0, 19.8, 19.9))
    during = Times((1.0,) * 20, (1.01,) * 20, (20.0, 20.0, 22.0))
    before = Times((1.1,) * 20, (1.0,) * 20, (18.0, 19.8, 20.0))
    found = Timed("fa19_2", "18_split_half", before, during, profile, (1980, 1830))
    text = profiled_kernels.table([found, dataclasses.replace(found, ncu_ms=1.0)])
    start = "| fa19_2 | 18_split_half | 19.8000 | 20.0000 | -1.00% | 19.8000 | +0.00% | 1830 |"
    assert f"\n{start} 19.5000 |  |  | 1980 |\n" in text
    assert f"\n{start} 19.5000 | 20.0000 | -2.50% | 1980 |\n" in text
    assert text.endswith("| 0.9500 | 1.0000 | -5.00% | 1.0000 | 1.0100 | -0.99% |")
    assert found.record()["events"]["in_a_row"] == {"median": 19.8, "min": 18.0, "n": 3}


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


@pytest.mark.gpu
def test_a_kernels_launches_in_the_profile_and_by_events():
    pytest.importorskip("cupti")
    (found,) = profiled_kernels.compare(["sp19_2"])
    for times in (found.events, found.recorded_events, found.profile):
        assert min(times.in_a_row) > profiled_kernels.LAUNCHES * 0.9 * min(times.behind) > 0
    for profile, events in zip(found.profile.in_a_row, found.recorded_events.in_a_row):
        assert profile == pytest.approx(events, rel=0.1)
    assert min(found.clocks_mhz) > 0
