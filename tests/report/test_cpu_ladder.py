"""Times of the CPU kernels in a report, from a separate process."""

import sys

import programs
import pytest
from played_torch import TORCH

from ece408_op.errors import InvalidSetting
from ece408_op.report import ladder


@pytest.fixture
def measure(tmp_path):
    """Run the program with a Python that has a fake PyTorch."""
    (tmp_path / "torch.py").write_text(TORCH)

    def run(peer):
        command = [sys.executable, "-m", "ece408_op.report.measure_ladder", "cpu"]
        command += ["--term=2018sp", "--batch=2", f"--peer-python={peer}"]
        return programs.run(*command, PYTHONPATH=str(tmp_path))

    return run


@pytest.mark.slow
def test_pytorch_is_beside_mxnet(measure):
    run = measure(sys.executable)
    assert run.returncode == 0, run.stderr
    found = ladder.from_json(run.stdout)
    names = ["MXNet's Convolution", "PyTorch NCHW", "PyTorch NHWC"]
    assert [peer.name for peer in found.peers] == names
    assert all(peer.spread(layer).runs == 5 for peer in found.peers for layer in found.layers)
    reference, *ours = found.steps
    assert reference.spread("conv1").runs == 1
    for step in ours:
        assert step.computed_by.keys() == found.layers.keys()
        assert f"conv1 is computed by {step.computed_by['conv1']}" in found.notes[1]


def test_a_python_without_pytorch_is_an_error_of_one_line(measure):
    run = measure("/nowhere/python")
    assert run.returncode == InvalidSetting.exit_code
    assert run.stderr.startswith("ece408: error: /nowhere/python does not run: ")
    assert run.stderr.count("\n") == 1
