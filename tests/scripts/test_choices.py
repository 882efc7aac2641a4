"""What the CUDA backend chooses, as tables, without a GPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from fake_gpu import FakeGpu
from studies import choices

from ece408_op import settings
from ece408_op.backends.cuda.kernels import tuned
from ece408_op.bench.cuda_timer import Timing
from ece408_op.bench.shapes import SHAPES


class FakePeer:
    def measure(self, problem, samples):
        slow = {"samples_ms": [4.0] * samples, "error": 1e-7}
        fast = {"samples_ms": [2.0] * samples, "error": 1e-4}
        broken = {"failure": "no such algorithm"}
        return {"NCHW float32": slow, "NHWC float32": broken, "NCHW tf32": fast}


class FakeBench:
    def __init__(self, gpu, problem):
        self.gpu, self.problem = gpu, problem

    def time(self, kernel, samples, plan=None):
        error = {"float32": 4e-7, "tf32": 3e-4, "float16": 5e-4}[kernel.precision]
        error = 1e-7 if kernel.name == "1_naive" else error
        failure = "12 elements are not finite" if self.problem.batch == 1000 else None
        return Timing([1e-3 * self.problem.batch] * samples, error, failure)


@pytest.fixture
def entry(monkeypatch, tmp_path):
    monkeypatch.setattr(
        choices, "bench", lambda gpu, problem: contextlib.nullcontext(FakeBench(gpu, problem))
    )
    tuned.forget()
    with settings.override(cache=tmp_path):
        yield choices.measure(FakeGpu(), SHAPES["fa19_2"], FakePeer(), 5)
    tuned.forget()


def _cells(table, number):
    return [cell.strip() for cell in table.splitlines()[number].strip("|").split("|")]


def test_tables_have_times_by_batch_and_by_precision(entry):
    by_batch, small, by_precision = choices.tables({"fa19_2": entry}).split("\n\n")[1::2]
    kernel = entry["batches"]["10000"]["choice"]
    assert _cells(by_batch, 2) == [
        *("fa19_2", kernel, "0.100", "failed", "10.000", "1.000", "", "1.000"),
    ]
    first = entry["batches"]["1"]["choice"]
    assert _cells(small, 2)[1:5] == [first, "0.001", "4.000", "4000.00"]
    cells = _cells(by_precision, 2)
    assert cells[:2] == ["fa19_2", "1.0e-07"]
    assert cells[2:6] == [kernel, "10.000", "4.0e-07", "4.0"]
    assert cells[8] == "3.0e-04"
    assert np.isfinite(entry["simplest"]["error"])


def test_without_a_peer_its_columns_are_empty(entry):
    small = choices.tables({"fa19_2": {**entry, "cudnn": {}}}).split("\n\n")[3]
    assert _cells(small, 2)[3:5] == ["", ""]
