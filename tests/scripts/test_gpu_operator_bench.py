"""What scripts/bench_gpu_operator.py reads from milestones and writes, without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
from subprocess import CompletedProcess

import pytest
from fake_gpu import FakeGpu
from studies import several_gpus, staged_milestones, staging_limits
from studies.staging_limits import Host, Layer
from studies.zero_copy_bench import Row, document, table

from ece408_op import settings
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.bench import cpu_timer
from ece408_op.course import comparison, milestone
from ece408_op.host import this_python
from ece408_op.op_log import GpuTime, OpTime
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c1,h9,w9,m4,k3")
RUN_TIME = "1.00user 1.00system 0:02.50elapsed 200%CPU (0avgtext+0avgdata 100maxresident)k"


def _entry(layer, seconds, gpu):
    return OpTime(layer, PROBLEM, "forward", "cuda", "1_naive", seconds, gpu)


def test_a_milestone_says_what_the_gpu_did(capsys):
    milestone._print_op_time(_entry("conv1", 0.1, GpuTime(0.025, 0.05)))
    milestone._print_op_time(_entry("conv2", 0.25, None))
    less_exact = dataclasses.replace(_entry("conv3", 0.1, GpuTime(0.01)), precision="tf32")
    milestone._print_op_time(less_exact)
    out, err = capsys.readouterr()
    assert out == "Op Time: 0.100000\nOp Time: 0.250000\nOp Time: 0.100000\n"
    assert err.splitlines() == [
        "ece408: conv1 by 1_naive: kernel 25.000 ms (25%), copies 50.000 ms (50%)",
        "ece408: conv3 by 1_naive in tf32: kernel 10.000 ms (10%), copies 0.000 ms (0%)",
    ]


@pytest.fixture
def runs(monkeypatch, capsys):
    """Milestones that answer at once; the accuracy of each, by its name."""
    accuracies = {"m1.1": 0.9, "m2.1": 0.5, "m3.1": 0.5, "m4.1": 0.5}

    def run(command):
        name, model = this_python.parts(command)[1][:2]
        if name == "m1.2":
            return CompletedProcess(command, 18, "", "ece408: error: no code for it\n")
        if name == "m1.1":
            return CompletedProcess(command, 0, "EvalMetric: {'accuracy': 0.9}\n", RUN_TIME)
        layers = 1 if "--term=2017fa" in command else 2
        for n in range(layers):
            gpu = GpuTime(0.001, 0.002) if name != "m2.1" else None
            milestone._print_op_time(_entry(f"conv{n + 1}", 0.004, gpu))
        print(f"Correctness: {accuracies[name]} Model: {model}")
        out, err = capsys.readouterr()
        way = "ece408: staged: for a reason\n" if name != "m2.1" else ""
        return CompletedProcess(command, 0, out, way + err + RUN_TIME)

    monkeypatch.setattr(comparison, "run_process", run)
    monkeypatch.setattr(comparison, "prepare_data", lambda jobs: None)
    return accuracies


def test_every_term_is_run_and_read(runs):
    rows = staged_milestones.measure(10)
    assert {row.run.script for row in rows} == {"m1.1", "m1.2", "m2.1", "m3.1", "m4.1"}
    staged = [row for row in rows if row.run.script == "m3.1" and row.run.term == "2019fa"]
    assert [(row.way, len(row.layers), row.layers[0].kernel_ms) for row in staged] == [
        ("staged", 2, 1.0)
    ]
    text = staged_milestones.table(rows)
    assert "1.00 (25%) 1_naive, 1.00 (25%) 1_naive | 2.00 (50%), 2.00 (50%) | 2.50 |" in text
    assert text.count("not run: no code for it") == 1
    assert text.count("not run: as above") > 1
    assert "Each row is a single run." in text
    assert text.endswith("Correctness of m3.1 and m4.1 equals m2.1's: everywhere.")
    json.dumps(staged_milestones.document(rows))


def test_a_wrong_answer_shows(runs):
    runs["m4.1"] = 0.4
    rows = staged_milestones.measure(10)
    assert "m4.1 2019fa ece408: 0.4" in staged_milestones.differences(rows)
    assert "not everywhere: m4.1 2017fa" in staged_milestones.table(rows)


def test_the_table_of_zero_copy():
    times = (0.0024, 0.0022, 0.0023)
    series = (0.0015, 0.0016, 0.0017), (0.0032, 0.0032, 0.0032)
    samples = (0.0012,), times, series[0], times, series[1]
    row = Row("fa19_1", str(PROBLEM), "k", False, 0.001, *samples, 0.5, 0.25)
    assert row.beyond_us(row.ops) == pytest.approx(200)
    assert (
        "| fa19_1 | b2,c1,h9,w9,m4,k3x3 | k | NO | 1.0000 | 1.2000 | 200 | 2.3000 | 1300 | 2.3000 "
        "| 1.00 | 1.6000 | 600 | 3.2000 | 2.00 | 500 | 0.25 |" in table([row])
    )
    (kept,) = document([row])["rows"]
    assert kept["calls"] == {"median": 0.0023, "min": 0.0022, "n": 3}


def test_several_gpus_take_turns_with_one(monkeypatch):
    used = []

    class Backend(ReferenceBackend):
        """From some call on both GPUs on the result is another one."""

        def forward(self, problem, x, w, bias, y, accumulate):
            used.append(settings.devices())
            done = super().forward(problem, x, w, bias, y, accumulate)
            if used[-1] == (2, 3) and used.count((2, 3)) > is_wrong_from:
                ctypes.memset(y, 0, 4)
            return done

    monkeypatch.setattr(several_gpus, "StagedBackend", Backend)
    monkeypatch.setattr(several_gpus, "SHAPES", ("b1,c1,h9,w9,m2,k3",))
    ticks = []
    is_wrong_from = 1000
    (calls,) = several_gpus.measure((2, 3), 2, lambda *_: ticks.append(1), batches=[4])
    # Both onto outputs used before and onto fresh ones.
    timed = 2 * several_gpus._OFTENER
    rounds = 2 * (several_gpus._LEARNING + timed + cpu_timer.WARM_UP)
    assert sorted(used) == [(2,)] * rounds + [(2, 3)] * rounds
    kinds = ["y used before", "y fresh"]
    assert {kind: len(times[2]) for kind, times in calls.ms.items()} == dict.fromkeys(kinds, timed)
    assert len(ticks) == several_gpus.rounds(2, [4])
    assert calls.are_equal
    assert calls.batch == 4
    used.clear()
    is_wrong_from = several_gpus._LEARNING
    (calls,) = several_gpus.measure((2, 3), 1, lambda *_: None, batches=[4])
    assert not calls.are_equal
    times = {1: [3.0, 2.0, 4.0], 2: [2.0, 2.0, 9.0]}
    calls = several_gpus.Calls("fa19_1", 100, {"y fresh": times}, True)
    line = "| fa19_1 | 100 | y fresh | 3.00 | 2.00 | 1.50x | yes |"
    assert several_gpus.table([calls]).endswith(line)
    kept = several_gpus.document([calls])["calls"][0]
    assert kept["ms"]["y fresh"]["2"]["median"] == 2.0


def test_page_locked_arrays_are_timed_beside_ordinary_ones(pool, monkeypatch):
    class Backend(ReferenceBackend):
        def result_memory(self, problem):
            return pool.lend(4 * math.prod(problem.y_shape), FakeGpu(), 2)

        def forward(self, problem, x, w, bias, y, accumulate):
            done = super().forward(problem, x, w, bias, y, accumulate)
            reached.append((pool.covers(x, 4), pool.covers(y, 4)))
            return done

    reached = []
    monkeypatch.setattr(several_gpus, "StagedBackend", Backend)
    monkeypatch.setattr(several_gpus.device, "get", lambda index: FakeGpu())
    monkeypatch.setattr(several_gpus, "SHAPES", ("b1,c1,h200,w200,m3,k1",))
    monkeypatch.setattr(several_gpus, "_LEARNING", 1)
    (calls,) = several_gpus.measure((0, 1), 1, lambda *_: None, batches=[20])
    assert list(calls.ms) == ["both page-locked", "y page-locked", "y used before", "y fresh"]
    calls_each = len(reached) // 4
    assert sorted(reached) == [
        *[(False, False)] * (2 * calls_each), *[(False, True)] * calls_each,
        *[(True, True)] * calls_each,
    ]  # fmt: skip
    assert calls.are_equal
    # All memory is free again, and it was no more than that of y for each and of x.
    assert [block.is_free for block in pool._blocks] == [True] * 3


def test_limits_are_set_beside_the_floor():
    host = [Host("to the GPU", "GB/s", (50.0, 54.0, 55.0))]
    layers = [
        Layer("fa19_1", (40.0, 42.0, 44.0), (80.0, 84.0, 90.0), 39.0, 40.0),
        Layer("fa19_2", (18.0, 18.0, 18.0), (36.0, 36.0, 36.0), 14.0, 20.0),
    ]
    lines = staging_limits.table(host, layers).splitlines()
    assert "| fa19_1 | 40.0 | 42.0 (1.05x) | 39.0 | 84.0 (2.10x) |" in lines
    assert "| together | 60.0 | 60.0 (1.00x) |  | 120.0 (2.00x) |" in lines
    assert lines[-1] == "| to the GPU | 54.0 |"
    kept = staging_limits.document(host, layers)
    assert kept["host"][0]["samples"] == {"median": 54.0, "min": 50.0, "n": 3}
    assert kept["layers"][0]["fresh"] == {"median": 84.0, "min": 80.0, "n": 3}
