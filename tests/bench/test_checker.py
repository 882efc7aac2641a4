"""The checker and the timer of CUDA kernels, as far as possible without a GPU."""

import dataclasses
import importlib.util
import sys

import programs
import pytest
from cases import every
from places import SCRIPTS

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import checker
from ece408_op.bench.peers import cudnn
from ece408_op.errors import InvalidSetting
from ece408_op.problem import ConvProblem


@every(kernel=catalog.KERNELS)
@pytest.mark.slow
def test_random_problems_differ_and_are_ones_that_the_kernel_takes(kernel):
    cases = checker.random_cases(kernel, 20)
    assert len({case.problem for case in cases}) == 20
    assert all(kernel.family.why_not(case.problem) is None for case in cases)
    assert cases == checker.random_cases(kernel, 20)
    assert any(case.accumulate for case in cases)
    assert any(case.problem.bias for case in cases)
    assert any(case.problem.height % 2 and case.problem.filters % 2 for case in cases)


def test_whole_numbers_stay_exact_in_half_precision():
    half, problem = catalog.get("9_half"), ConvProblem.parse("b1,c3,h9,w9,m2,k7")
    assert 49 * checker.largest_integer(half, problem) ** 2 <= 2048
    assert checker.largest_integer(catalog.get("1_naive"), problem) == 8


def test_what_an_error_may_be_follows_type_precision_and_depth():
    shallow, deep = (ConvProblem.parse(f"b1,c{c},h9,w9,m2,k3") for c in (3, 2000))
    naive, tf32 = catalog.get("1_naive"), catalog.get("10_tf32")
    assert checker.largest_error(naive, shallow) == 1e-6
    assert 1e-6 < checker.largest_error(naive, deep) < 1e-5
    assert checker.largest_error(tf32, shallow) == 1e-3
    double = dataclasses.replace(shallow, dtype="float64")
    assert checker.largest_error(catalog.get("general"), double) == 1e-14


@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_a_python_without_pytorch_is_said(python, capfd):
    if python == sys.executable and importlib.util.find_spec("torch"):
        pytest.skip("this Python has PyTorch")
    with pytest.raises(InvalidSetting, match="by --peer-python"), cudnn.Peer(python):
        pass


@pytest.mark.parametrize("script", ["bench.py", "check_cuda.py"])
def test_the_scripts_show_help_without_a_gpu(script):
    result = programs.run(sys.executable, SCRIPTS / script, "--help")
    assert result.returncode == 0, result.stderr
    assert "--output PREFIX" in result.stdout
