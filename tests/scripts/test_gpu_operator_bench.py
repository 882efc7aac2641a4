"""What scripts/bench_gpu_operator.py reads from milestones and writes, without a GPU."""

from __future__ import annotations

import dataclasses
import json
from subprocess import CompletedProcess

import pytest
from studies import staged_milestones
from studies.zero_copy_bench import Row, document, table

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
