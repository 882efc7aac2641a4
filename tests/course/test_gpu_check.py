from __future__ import annotations

import re

import pytest

from ece408_op.course import gpu_check
from ece408_op.course.milestone import MILESTONES
from ece408_op.errors import NoUsableGpu
from ece408_op.gpu import Driver, Gpu, find_driver

GPU_MILESTONES = [name for name, milestone in MILESTONES.items() if milestone.on_gpu]


def _pretend(monkeypatch, capability=(9, 0), pycuda=True, nvcc="/cuda/bin/nvcc", **features):
    driver = Driver("13.0", (Gpu(0, "a GPU", capability, 1 << 37),))
    monkeypatch.setattr(gpu_check, "find_driver", lambda: driver)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: pycuda or None)
    monkeypatch.setattr(gpu_check, "find_nvcc", lambda: nvcc)


def test_the_courses_scripts_are_there():
    assert list(MILESTONES) == ["m1.1", "m1.2", "m2.1", "m3.1", "m4.1", "final"]
    assert GPU_MILESTONES == ["m1.2", "m3.1", "m4.1", "final"]


def test_no_driver():
    with pytest.raises(NoUsableGpu, match=r"no NVIDIA driver .* m1\.1 and m2\.1 need none"):
        find_driver("libcuda-that-is-not-there.so")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"capability": (7, 0)}, "has compute capability 7.0, the CUDA kernels need 7.5"),
        ({"pycuda": None}, "PyCUDA is not installed; pip install 'ece408_op[cuda]'"),
        ({"nvcc": None}, "nvcc is not found; install the CUDA toolkit, or set CUDA_HOME"),
    ],
)
def test_what_our_kernels_lack(monkeypatch, missing, message):
    _pretend(monkeypatch, **missing)
    with pytest.raises(NoUsableGpu, match=re.escape(message)):
        gpu_check.require(own_operator=True)


def test_mxnets_cpu_build_has_no_gpu_convolution(mx, monkeypatch):
    if mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this MXNet is built for CUDA")
    _pretend(monkeypatch)
    with pytest.raises(NoUsableGpu, match=r"built for the CPU only; .* 'ece408_op\[cu117\]'"):
        gpu_check.require(own_operator=False)


@pytest.mark.parametrize("name", GPU_MILESTONES)
def test_a_machine_without_a_gpu_is_told_so(run_python, name):
    code = (
        "from ece408_op.course import gpu_check; from ece408_op.gpu import find_driver;"
        "gpu_check.find_driver = lambda: find_driver('libcuda-that-is-not-there.so');"
        f"from ece408_op.cli import main; main([{name!r}, '10'])"
    )
    result = run_python(code)
    assert result.stdout == ""
    assert result.stderr.startswith("ece408: error: no NVIDIA driver")
    assert len(result.stderr.splitlines()) == 1
    assert result.returncode == NoUsableGpu.exit_code


@pytest.mark.parametrize("name", GPU_MILESTONES)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["0"], 3), (["abc"], 4), (["5", "--term", "1999fa"], 4), (["5", "--batch-size", "x"], 3)],
)
def test_bad_input_comes_before_the_gpu(name, arguments, code, capsys):
    from ece408_op.cli import execute

    assert execute([name, *arguments]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1
