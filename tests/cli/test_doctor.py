from __future__ import annotations

import errno
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.emulator import emulator_compiler
from ece408_op.cli import doctor
from ece408_op.cli import doctor_checks as checks
from ece408_op.cli.doctor import Diagnosis
from ece408_op.cli.doctor_checks import MISSING, NOTE, OK, Finding
from ece408_op.cli.main import execute
from ece408_op.course import course_terms
from ece408_op.course.dataset import fashion_data, idx, resize
from ece408_op.errors import KernelsMissing, NoUsableGpu
from ece408_op.host import cores, footprint, gpu

H200 = gpu.Gpu(0, "NVIDIA H200", (9, 0), 140 << 30)
V100 = gpu.Gpu(1, "Tesla V100", (7, 0), 16 << 30)
NO_DRIVER = "no NVIDIA driver (libcuda.so.1 is not there)"


def _raise(error):
    raise error


def _mxnet(cuda):
    return SimpleNamespace(
        __version__="1.9.1",
        runtime=SimpleNamespace(Features=lambda: SimpleNamespace(is_enabled=lambda name: cuda)),
        libinfo=SimpleNamespace(find_lib_path=lambda: ["libmxnet.so"]),
    )


def _script(path, line, status=0):
    path.write_text(f"#!/bin/sh\necho '{line}'\nexit {status}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Return the only folder on PATH, with a C++ compiler and nvcc."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _script(folder / "g++", "g++ (Fake) 12.2.0")
    _script(folder / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def machine(tools, tmp_path, monkeypatch):
    """Simulate a machine on which all milestones but m1.2 can run; return its cache."""
    cache = tmp_path / "cache"
    for kind in fashion_data.KINDS:
        for expected in idx.files(kind):
            (tmp_path / "named").mkdir(exist_ok=True)
            (tmp_path / "named" / expected.name).touch()
    monkeypatch.setenv("ECE408_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("ECE408_CACHE", str(cache))
    kernels = tmp_path / "kernels"
    (kernels / "cuda").mkdir(parents=True)
    (kernels / "cuda" / "ladder").mkdir()
    (kernels / "cuda" / "ladder" / "1_naive.cu").touch()
    monkeypatch.setattr(checks.resources, "kernels_dir", lambda: kernels)
    monkeypatch.setattr(gpu, "find_driver", lambda: gpu.Driver("13.0", (H200,)))
    monkeypatch.setitem(checks.CHECKS["build"], "emulator", lambda: Finding("emulator", OK, ""))
    monkeypatch.setattr(checks, "load_mxnet", lambda: _mxnet(cuda=False))
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda name: "2026.1")
    pycuda = ModuleType("pycuda")
    pycuda.__spec__ = ModuleSpec("pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda", pycuda)
    monkeypatch.setitem(sys.modules, "pycuda.driver", ModuleType("pycuda.driver"))
    return cache


def _finding(name, diagnosis=None):
    findings = (diagnosis or doctor.diagnose()).findings
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def _last_lines(diagnosis):
    return diagnosis.text().splitlines()[-3::2]


CPU_CAN = "CPU milestones (m1.1, m2.1) and your models: can run"
GPU = "GPU milestones (m1.2, m3.1, m4.1, final): "


def test_a_complete_machine(machine):
    diagnosis = doctor.diagnose()
    assert [f.name for f in diagnosis.findings if f.status == MISSING] == []
    assert [diagnosis.ready(each) for each in checks.CHECKS] == [True] * 3
    assert diagnosis.exit_code == 0
    assert _last_lines(diagnosis) == [
        CPU_CAN,
        GPU + "can run, except m1.2, which needs MXNet's GPU code for this GPU",
    ]
    details = {finding.name: finding.detail for finding in diagnosis.findings}
    assert details["MXNet"] == "1.9.1, built for the CPU"
    assert details["GPU 0"] == "NVIDIA H200, sm_90, 140.0 GiB"
    assert details["NVIDIA driver"] == "for CUDA up to 13.0"
    assert details["C++ compiler"] == "g++ (Fake) 12.2.0"
    assert details["nvcc"].startswith("13.0, /")
    assert details["PyCUDA"] == "2026.1"
    assert details["models"] == "2017fa, 2018sp, 2019sp, 2019fa"
    assert details["Python"] == ".".join(map(str, sys.version_info[:3]))


def test_nothing_is_fetched_or_created(machine, monkeypatch):
    monkeypatch.delenv("ECE408_DATA")
    monkeypatch.setattr(fashion_data, "PACKAGE_FOLDER", machine / "package")

    def refuse(*_):
        raise AssertionError("fetched")

    monkeypatch.setattr("ece408_op.course.dataset.fetch.fetch", refuse)
    found = _finding("Fashion-MNIST")
    assert (found.status, found.detail) == (NOTE, "not here yet")
    assert "`ece408 data fetch`" in found.hint
    assert _finding("training images").hint == "only `ece408 train` needs them; `ece408 data fetch`"
    assert doctor.diagnose().ready("cpu")
    assert not machine.exists()


def test_the_text_is_aligned_and_hints_have_lines_of_their_own():
    diagnosis = Diagnosis(
        {
            "cpu": [Finding("MXNet", OK, "1.9.1"), Finding("disk space", NOTE, "0.1 GiB free")],
            "gpu": [Finding("nvcc", MISSING, "not found", "install the CUDA toolkit")],
        }
    )
    assert diagnosis.text().splitlines() == [
        "To run on the CPU:",
        "ok  MXNet       1.9.1",
        "    disk space  0.1 GiB free",
        "",
        "Only to compute on a GPU:",
        "--  nvcc        not found",
        "                -> install the CUDA toolkit",
        "",
        "CPU milestones (m1.1, m2.1) and your models: cannot run: needs Python, NumPy, SciPy, "
        "CPU kernels, Fashion-MNIST, models, cache folder",
        "kernels of your own: cannot run: needs C++ compiler",
        f"{GPU}cannot run: needs Python, NumPy, SciPy, CPU kernels, Fashion-MNIST, models, "
        "cache folder, CUDA kernels, C++ compiler, nvcc, NVIDIA driver, GPU, PyCUDA",
    ]
    assert Diagnosis({}).exit_code == doctor.EXIT_NOTHING == 21


def test_the_command_prints_text_or_json_and_gives_the_exit_code(machine, monkeypatch, capsys):
    # One diagnosis for all: free memory and disk space change between diagnoses.
    found = doctor.diagnose()
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    assert execute(["doctor"]) == 0
    output = capsys.readouterr()
    assert output.out == found.text() + "\n"
    assert output.err == ""
    assert execute(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == found.json()
    assert set(told) == {"findings", "cpu_ready", "build_ready", "gpu_ready"}
    assert told["findings"][0] == {
        "name": "Python",
        "status": "ok",
        "detail": ".".join(map(str, sys.version_info[:3])),
        "hint": "",
        "purpose": "cpu",
    }


def test_without_a_driver_the_cpu_milestones_can_run(machine, monkeypatch, capsys):
    error = NoUsableGpu(f"{NO_DRIVER}; the CPU milestones m1.1 and m2.1 need none")
    monkeypatch.setattr(gpu, "find_driver", lambda: _raise(error))
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    diagnosis = doctor.diagnose()
    found = _finding("NVIDIA driver", diagnosis)
    assert found == Finding(
        "NVIDIA driver", MISSING, NO_DRIVER, "the CPU milestones m1.1 and m2.1 need none"
    )
    found = _finding("PyCUDA", diagnosis)
    assert found == Finding("PyCUDA", NOTE, "2026.1, not tried without a driver")
    assert _last_lines(diagnosis) == [CPU_CAN, GPU + "cannot run: needs NVIDIA driver, GPU"]
    assert execute(["doctor"]) == doctor.EXIT_CPU_ONLY == 20
    assert capsys.readouterr().err == ""


def test_without_mxnet(run_python, kept):
    block = "import sys; sys.modules['mxnet'] = None; from ece408_op.cli.main import main; "
    result = run_python(block + "main(['doctor'])", ECE408_CACHE=str(kept))
    lines = result.stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("--  MXNet "))
    assert "MXNet is not installed for " in lines[at]
    remedy = "needs Python 3.9" if sys.version_info >= (3, 13) else "pip install 'ece408_op[cpu]'"
    assert remedy in lines[at + 1]
    assert re.search(r"CPU milestones .* cannot run: needs .*MXNet", lines[-3])
    assert "take 4.1 GiB" in result.stdout
    assert result.stderr == ""
    assert result.returncode == doctor.EXIT_NOTHING


def test_the_usual_need_is_what_mxnet_tells(mx):
    term = course_terms.TERMS[course_terms.DEFAULT_TERM]
    need = footprint.required_bytes(course_terms.network(term), 10000, 10000, term.image_size)
    assert abs(checks.USUAL_NEED_BYTES / need - 1) < 0.05


def test_a_check_that_fails_unexpectedly_is_a_finding(machine, monkeypatch):
    monkeypatch.setitem(
        checks.CHECKS["cpu"], "models", lambda: _raise(ZeroDivisionError("two\nlines"))
    )
    diagnosis = doctor.diagnose()
    found = _finding("models", diagnosis)
    assert found.status == MISSING
    assert found.detail == "broken: ZeroDivisionError: two lines"
    assert "report" in found.hint
    assert not diagnosis.ready("cpu")
    assert _finding("disk space", diagnosis).status == OK


def test_every_check_may_fail(monkeypatch, capsys):
    every = [(each, name) for each in checks.CHECKS.values() for name in each]
    for each, name in every:
        monkeypatch.setitem(each, name, lambda: _raise(RuntimeError("no")))
    assert execute(["doctor"]) == doctor.EXIT_NOTHING
    assert capsys.readouterr().out.count("broken: RuntimeError: no") == len(every)


@pytest.mark.parametrize("built_for", [["sm_70", "sm_90"], ["compute_80"]])
def test_mxnet_with_code_for_the_gpu(machine, monkeypatch, built_for):
    monkeypatch.setattr(checks, "load_mxnet", lambda: _mxnet(cuda=True))
    monkeypatch.setattr(checks.fatbin, "architectures", lambda path: built_for)
    diagnosis = doctor.diagnose()
    assert _finding("MXNet", diagnosis).detail == "1.9.1, built for CUDA"
    found = _finding("MXNet's GPU code", diagnosis)
    assert (found.status, found.detail) == (OK, f"for {', '.join(built_for)}")
    assert _last_lines(diagnosis) == [CPU_CAN, GPU + "can run"]


def test_mxnet_without_code_for_the_gpu(machine, monkeypatch):
    monkeypatch.setattr(checks, "load_mxnet", lambda: _mxnet(cuda=True))
    monkeypatch.setattr(checks.fatbin, "architectures", lambda path: ["sm_80", "sm_86"])
    diagnosis = doctor.diagnose()
    found = _finding("MXNet's GPU code", diagnosis)
    assert (found.status, found.detail) == (NOTE, "for sm_80, sm_86; GPU 0 is sm_90")
    assert "m1.2" in found.hint
    assert "except m1.2" in _last_lines(diagnosis)[1]
    assert diagnosis.ready("gpu")


def test_mxnet_for_cuda_without_a_gpu_or_with_a_damaged_library(machine, monkeypatch):
    monkeypatch.setattr(checks, "load_mxnet", lambda: _mxnet(cuda=True))
    monkeypatch.setattr(gpu, "find_driver", lambda: _raise(NoUsableGpu(NO_DRIVER)))
    monkeypatch.setattr(checks.fatbin, "architectures", lambda path: ["sm_80"])
    assert _finding("MXNet's GPU code").detail == "for sm_80; no GPU to compare it with"
    monkeypatch.setattr(checks.fatbin, "architectures", lambda path: _raise(ValueError("damaged")))
    diagnosis = doctor.diagnose()
    assert _finding("MXNet's GPU code", diagnosis).detail == "broken: ValueError: damaged"
    assert _finding("MXNet", diagnosis).status == OK
    assert diagnosis.ready("cpu")


def test_a_gpu_that_is_too_old(machine, monkeypatch):
    monkeypatch.setattr(gpu, "find_driver", lambda: gpu.Driver("12.2", (V100,)))
    diagnosis = doctor.diagnose()
    found = _finding("GPU 1", diagnosis)
    assert (found.status, found.detail) == (MISSING, "Tesla V100, sm_70, 16.0 GiB")
    assert "sm_75 or newer" in found.hint
    assert _last_lines(diagnosis)[1] == GPU + "cannot run: needs GPU"
    monkeypatch.setattr(gpu, "find_driver", lambda: gpu.Driver("12.2", (V100, H200)))
    assert doctor.diagnose().ready("gpu")


def test_without_pycuda_or_with_one_that_does_not_import(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    found = _finding("PyCUDA")
    assert found.status == MISSING
    assert found.detail.startswith("2026.1 does not import (")
    assert found.hint.startswith("build it for this machine: pip install --force-reinstall")
    monkeypatch.setitem(sys.modules, "pycuda", None)
    found = _finding("PyCUDA")
    assert found == Finding("PyCUDA", MISSING, "not installed", "pip install 'ece408_op[cuda]'")
    assert doctor.diagnose().exit_code == doctor.EXIT_CPU_ONLY


def test_without_nvcc_or_with_one_that_fails(machine, tools, monkeypatch):
    _script(tools / "nvcc", "out of order", status=1)
    found = _finding("nvcc")
    assert "does not run" in found.detail
    assert "CUDA_HOME" in found.hint
    monkeypatch.setattr(gpu, "find_nvcc", lambda: None)
    found = _finding("nvcc")
    assert (found.status, found.detail) == (MISSING, "not found")
    assert found.hint == "install the CUDA toolkit, or set CUDA_HOME to it"


def test_the_compiler_is_cxx_or_a_usual_one(machine, tools, monkeypatch):
    _script(tools / "clang++", "clang version 17")
    (tools / "g++").unlink()
    assert _finding("C++ compiler").detail == "clang version 17"
    (tools / "clang++").unlink()
    diagnosis = doctor.diagnose()
    assert _finding("C++ compiler", diagnosis).detail == "no g++, clang++ or c++"
    assert "apt install g++" in _finding("C++ compiler", diagnosis).hint
    assert _last_lines(diagnosis) == [CPU_CAN, GPU + "cannot run: needs C++ compiler"]
    lacking = "kernels of your own: cannot run: needs C++ compiler"
    assert diagnosis.text().splitlines()[-2] == lacking
    assert [diagnosis.ready(each) for each in checks.CHECKS] == [True, False, False]
    monkeypatch.setenv("CXX", "icpx -O3")
    assert _finding("C++ compiler").detail == "CXX=icpx is not there"
    _script(tools / "icpx", "Intel 2025")
    assert _finding("C++ compiler").detail == "Intel 2025"
    monkeypatch.setenv("CXX", "'unbalanced")
    assert _finding("C++ compiler").detail.startswith("broken: ValueError")


def test_without_cuda_kernels(machine, monkeypatch):
    (checks.resources.kernels_dir() / "cuda" / "ladder" / "1_naive.cu").unlink()
    assert _finding("CUDA kernels").hint == "run pip install again"
    assert not doctor.diagnose().ready("gpu")


def test_without_cpu_kernels(machine, monkeypatch):
    error = KernelsMissing("the compiled CPU kernels are not at x; run `pip install .`")
    monkeypatch.setattr(native, "library", lambda: _raise(error))
    found = _finding("CPU kernels")
    assert found.detail == "the compiled CPU kernels are not at x"
    assert found.hint == "run `pip install .`"
    assert doctor.diagnose().exit_code == doctor.EXIT_NOTHING


def test_named_data_that_is_not_there(machine, tmp_path, monkeypatch):
    (tmp_path / "named" / "train-labels-idx1-ubyte").unlink()
    found = _finding("training images")
    assert found.status == NOTE
    assert "has no train-labels-idx1-ubyte" in found.detail
    assert doctor.diagnose().ready("cpu")
    monkeypatch.setenv("ECE408_DATA", "/nowhere")
    found = _finding("Fashion-MNIST")
    assert found.status == MISSING
    assert found.detail.startswith("/nowhere, which is not a folder, has no t10k-images")
    assert "ECE408_DATA" in found.hint
    assert doctor.diagnose().exit_code == doctor.EXIT_NOTHING


@pytest.mark.parametrize(
    ("lacking", "status", "detail"),
    [
        (["2018sp"], NOTE, "2017fa, 2019sp, 2019fa; not 2018sp"),
        (["2019fa"], MISSING, "2017fa, 2018sp, 2019sp; not 2019fa"),
        (list(course_terms.TERMS), MISSING, "none; not 2017fa, 2018sp, 2019sp, 2019fa"),
    ],
)
def test_models_that_are_not_there(machine, tmp_path, monkeypatch, lacking, status, detail):
    for name, term in course_terms.TERMS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        for model in term.models:
            (folder / f"{model}-symbol.json").touch()
        if name not in lacking:
            (folder / "baseline-0006.params").touch()
    monkeypatch.setattr(checks.resources, "models_dir", lambda: tmp_path / "models")
    found = _finding("models")
    assert (found.status, found.detail) == (status, detail)
    assert f"`ece408 train {lacking[0]}`" in found.hint


@pytest.mark.parametrize(
    ("version", "python", "status"),
    [
        *(("1.20.3", "3.12.1", MISSING), ("1.26.4", "3.12.1", OK), ("2.0.1", "3.12.1", MISSING)),
        *(("1.26.4", "3.13.0", MISSING), ("2.5.5", "3.14.0", OK)),
    ],
)
def test_numpys_version(machine, monkeypatch, version, python, status):
    monkeypatch.setattr(sys.modules["numpy"], "__version__", version)
    monkeypatch.setattr(checks.platform, "python_version", lambda: python)
    found = _finding("NumPy")
    assert found.status == status
    if status == MISSING:
        oldest, too_new = ("2.1", "3.0") if python == "3.13.0" else ("1.21", "1.27")
        assert found.detail == f"{version}; from {oldest} to below {too_new} is needed"
        assert found.hint == f"pip install 'numpy>={oldest},<{too_new}'"


@pytest.mark.parametrize(
    ("version", "status"), [("3.8.20", MISSING), ("3.9.0", OK), ("3.14.1", OK), ("3.15.0", MISSING)]
)
def test_pythons_version(machine, monkeypatch, version, status):
    monkeypatch.setattr(checks.platform, "python_version", lambda: version)
    assert _finding("Python").status == status


def test_without_scipy(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    found = _finding("SciPy")
    assert found.status == MISSING
    assert found.detail.startswith("does not import (")
    assert found.hint == "pip install 'scipy>=1.7,<2.0'"


def test_little_memory(machine, monkeypatch):
    monkeypatch.setattr(footprint, "available_bytes", lambda: 1 << 30)
    found = _finding("memory")
    assert found.status == NOTE
    assert found.detail.startswith("1.0 GiB available; 10000 images of 2019fa in one batch take ")
    assert "--batch-size" in found.hint


def test_cores_and_quota(machine, monkeypatch):
    monkeypatch.delenv("ECE408_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for quota, detail in (
        (None, "8 usable, no CPU quota: 8 threads"),
        (2.5, "8 usable, CPU quota of 2.5: 2 threads"),
    ):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert _finding("cores") == Finding("cores", OK, detail)
    monkeypatch.setenv("ECE408_THREADS", "4")
    found = _finding("cores")
    assert (found.status, found.detail) == (NOTE, "8 usable, CPU quota of 2.5: 4 threads")
    assert found.hint == "set ECE408_THREADS=2 or leave it unset"


def test_a_cache_that_cannot_be_written(machine, tmp_path, monkeypatch):
    assert _finding("cache folder").detail == f"{machine}, made when it is needed"
    (tmp_path / "file").touch()
    monkeypatch.setenv("ECE408_CACHE", str(tmp_path / "file" / "cache"))
    found = _finding("cache folder")
    assert found.status == MISSING
    assert found.detail == f"{tmp_path / 'file' / 'cache'} is not writable"
    assert "ECE408_CACHE" in found.hint


def test_a_full_cache_need_not_be_writable(machine, monkeypatch):
    (machine / "resized").mkdir(parents=True)
    resize.cached_path("t10k", 70).touch()
    assert _finding("cache folder") == Finding("cache folder", OK, str(machine))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert _finding("cache folder").status == NOTE


def test_a_full_disk(machine, monkeypatch):
    usage = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    found = _finding("disk space")
    assert (found.status, found.detail) == (NOTE, "0.1 GiB free for the cache")
    assert found.hint.startswith("make room")
    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: _raise(error))
    assert _finding("disk space").detail.startswith("broken: OSError: ")


def test_the_emulator_runs_a_kernel(monkeypatch, tmp_path, kept):
    with settings.override(cache=kept):
        emulator_compiler.write_runtime(tmp_path)
    monkeypatch.setenv("ECE408_CACHE", str(tmp_path / "not_there"))
    found = checks._emulator()
    assert (found.status, found.detail) == (
        OK,
        "runs CUDA kernels without a GPU: ece408 lab check --emulate",
    )
    assert not (tmp_path / "not_there").exists()


def test_without_gcc_there_is_no_emulator(tools, monkeypatch, tmp_path):
    (tools / "g++").unlink()
    monkeypatch.setenv("ECE408_CACHE", str(tmp_path / "not_there"))
    monkeypatch.setattr(emulator_compiler, "_gcc", emulator_compiler._gcc.__wrapped__)
    emulator_compiler.source.cache_clear()
    found = checks._emulator()
    assert (found.status, found.hint.partition(" (")[0]) == (NOTE, "install g++")
    assert found.detail.startswith("does not run: no C++ compiler")
