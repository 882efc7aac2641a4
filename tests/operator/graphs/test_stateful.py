"""Random nets whose parameters are written in every way between calls (see `stateful`)."""

import subprocess
import sys

import pytest
import stateful


def test_some_steps():
    # None exports memory: this process would keep nothing from then on.
    wrong, raised, coverage = stateful.run(0, 150, shares=False)
    assert not wrong + raised
    assert coverage["graphs of 1 parts"] > 0
    assert coverage["graphs of 2 parts"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "engine"), [(50000, "ThreadedEnginePerDevice"), (5000, "NaiveEngine")]
)
def test_many_steps(steps, engine, monkeypatch):
    monkeypatch.setenv("MXNET_ENGINE_TYPE", engine)
    command = [sys.executable, stateful.__file__, "--steps", str(steps), "--jobs", "2"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]
