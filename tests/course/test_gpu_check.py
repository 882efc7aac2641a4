import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ece408_op import settings
from ece408_op.course import gpu_check
from ece408_op.course.milestone import MILESTONES
from ece408_op.errors import NoUsableGpu
from ece408_op.host import gpu
from ece408_op.host.gpu import Driver, Gpu, find_driver
from ece408_op.operator import gpu_support

GPU_MILESTONES = [name for name, milestone in MILESTONES.items() if milestone.on_gpu]


def _pretend(monkeypatch, capability=(9, 0), pycuda=True, nvcc="/cuda/bin/nvcc", mxnet=None):
    """Simulate a machine with one GPU; `mxnet` is the architectures of its MXNet for CUDA, if it
    has one."""
    driver = Driver("13.0", (Gpu(0, "a GPU", capability, 1 << 37),))
    monkeypatch.setattr(gpu, "find_driver", lambda: driver)
    features = SimpleNamespace(is_enabled=lambda name: mxnet is not None)
    fake = SimpleNamespace(
        runtime=SimpleNamespace(Features=lambda: features),
        libinfo=SimpleNamespace(find_lib_path=lambda: ["libmxnet.so"]),
    )
    monkeypatch.setattr(gpu_support, "load_mxnet", lambda: fake)
    monkeypatch.setattr(gpu_support.fatbin, "architectures", lambda library: mxnet)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: pycuda or None)
    monkeypatch.setattr(gpu, "find_nvrtc", lambda: None)
    monkeypatch.setattr(gpu, "find_nvcc", lambda: nvcc)


def test_no_driver():
    with pytest.raises(NoUsableGpu, match=r"no NVIDIA driver .* m1\.1 and m2\.1 need none"):
        find_driver("libcuda-that-is-not-there.so")


@pytest.mark.parametrize(
    ("missing", "devices", "own_operator", "message"),
    [
        (
            {"capability": (7, 0)},
            "",
            True,
            r"has compute capability 7.0, the CUDA kernels need 7.5",
        ),
        ({"pycuda": None}, "", True, "PyCUDA is not installed; `ece408 gpu-setup`"),
        ({"nvcc": None}, "", True, "nor nvcc is found; `ece408 gpu-setup`"),
        ({}, "0,3", True, r"no GPU 3 \(--gpu, ECE.*\); there are 1, numbered"),
        # Of MXNet's own.
        ({}, "", False, r"built for the CPU only; .* 'ece408_op\[cu117\]'"),
    ],
)
def test_what_is_lacking(monkeypatch, missing, devices, own_operator, message):
    _pretend(monkeypatch, **missing)
    monkeypatch.setenv("ECE408_DEVICES", devices)
    with pytest.raises(NoUsableGpu, match=message):
        gpu_check.choose_way(own_operator)


STAGED = (
    "staged: convolutions run on a GPU, the rest on the CPU, for this MXNet is built for the CPU"
)
WHOLE = "zero-copy: the whole network runs on a GPU"


@pytest.mark.parametrize(
    ("mxnet", "own_operator", "way"),
    [(None, True, f"{STAGED} only"), (["sm_86"], False, WHOLE), (["sm_86"], True, WHOLE)],
)
def test_networks_run_where_mxnet_has_code_for_the_gpu(monkeypatch, mxnet, own_operator, way):
    _pretend(monkeypatch, capability=(8, 9), mxnet=mxnet)
    found = gpu_check.choose_way(own_operator)
    assert (found.network_on_gpu, found.explanation) == (mxnet is not None, way)


def test_where_mxnet_has_no_code_for_the_gpu(monkeypatch):
    _pretend(monkeypatch, mxnet=("sm_50", "sm_86"))
    reason = "machine code for sm_50, sm_86, and GPU 0, a GPU, is sm_90: MXNet's own layers fail"
    with pytest.raises(NoUsableGpu, match=f"{reason}.*; m3.1 and m4.1 run our kernels on this GPU"):
        gpu_check.choose_way(own_operator=False)
    way = gpu_check.choose_way(own_operator=True)
    assert not way.network_on_gpu
    assert way.explanation.startswith("staged: ")
    assert reason in way.explanation


def test_final_on_a_gpu_that_mxnet_cannot_use(monkeypatch, tmp_path):
    _pretend(monkeypatch, mxnet=("sm_50", "sm_86"))
    (tmp_path / "needed_by_final.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_check, "_OF_WHOLE_NETWORKS", "needed_by_final")
    monkeypatch.setattr(gpu, "start_ahead", lambda devices: True)
    monkeypatch.setattr(gpu_check, "load_mxnet", lambda: None)
    before = set(threading.enumerate())
    way = gpu_check.choose_way(own_operator=True, whole=True)
    assert (way.network_on_gpu, way.without_mxnet) == (False, True)
    assert way.explanation.startswith("the whole network runs on a GPU by our kernels, for this")
    assert way.explanation.endswith("Op Time is a convolution's kernels alone, by the GPU's clock")
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert sys.modules.pop("needed_by_final")


def test_the_cuda_backend_asked_for_by_name_needs_a_gpu_too(monkeypatch, refused):
    monkeypatch.setattr(gpu, "find_driver", Mock(side_effect=NoUsableGpu("no NVIDIA driver")))
    refused(NoUsableGpu.exit_code, "error: no NVIDIA driver\n", "m2.1", "5", "--backend", "cuda")


@pytest.mark.parametrize("name", GPU_MILESTONES)
def test_a_machine_without_a_gpu_is_told_so(run_python, name):
    code = (
        "from ece408_op.host import gpu; find = gpu.find_driver;"
        "gpu.find_driver = lambda: find('libcuda-that-is-not-there.so');"
        f"from ece408_op.cli.main import main; main([{name!r}, '10'])"
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
def test_bad_input_comes_before_the_gpu(name, arguments, code, refused):
    refused(code, "", name, *arguments)


@pytest.mark.parametrize("script", GPU_MILESTONES)
def test_gpu_is_the_setting_of_the_gpus(monkeypatch, refused, script):
    _pretend(monkeypatch)
    monkeypatch.setenv("ECE408_DEVICES", "0")
    refused(18, "there is no GPU 3 (--gpu, ECE408_DEVICES)", script, "5", "--gpu", "3")
    message = "'1,x' is not a list of GPUs (--gpu, ECE408_DEVICES)"
    refused(16, message, "profile", script, "5", "--gpu", "1,x")
    assert settings.devices() == (0,)


def test_the_whole_network_runs_on_the_first_gpu_that_is_asked_for(monkeypatch):
    _pretend(monkeypatch, mxnet=["sm_90"])
    driver = Driver("13.0", tuple(Gpu(i, f"GPU {i}", (9, 0), 1 << 37) for i in range(3)))
    monkeypatch.setattr(gpu, "find_driver", lambda: driver)
    with settings.override(devices="2,0"):
        way = gpu_check.choose_way(own_operator=False)
    assert way.network_on_gpu
    assert way.explanation == "zero-copy: the whole network runs on GPU 2"
