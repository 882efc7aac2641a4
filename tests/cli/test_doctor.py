import errno
import json
import os
import pathlib
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

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
NO_KERNELS = KernelsMissing("the compiled CPU kernels are not at x; run `pip install .`")
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


class Machine:
    """A machine on which all milestones but m1.2 can run, and ways to change it."""

    def __init__(self, folder, tools, monkeypatch):
        self.folder, self.tools, self.cache = folder, tools, folder / "cache"
        self.set, self.item, self.env = monkeypatch.setattr, monkeypatch.setitem, monkeypatch.setenv
        (folder / "named").mkdir()
        for kind in fashion_data.KINDS:
            for expected in idx.files(kind):
                (folder / "named" / expected.name).touch()
        self.env("ECE408_DATA", str(folder / "named"))
        self.env("ECE408_CACHE", str(self.cache))
        self.kernel = folder / "kernels" / "cuda" / "ladder" / "1_naive.cu"
        self.kernel.parent.mkdir(parents=True)
        self.kernel.touch()
        self.set(checks.resources, "kernels_dir", lambda: folder / "kernels")
        self.nvrtc(None)
        self.driver(H200)
        self.item(checks.CHECKS["build"], "emulator", lambda: Finding("emulator", OK, ""))
        self.set(checks, "load_mxnet", lambda: _mxnet(cuda=False))
        self.set(checks.importlib.metadata, "version", lambda name: "2026.1")
        pycuda = ModuleType("pycuda")
        pycuda.__spec__ = ModuleSpec("pycuda", None)
        self.item(sys.modules, "pycuda", pycuda)
        self.item(sys.modules, "pycuda.driver", ModuleType("pycuda.driver"))

    def driver(self, *gpus):
        self.set(gpu, "find_driver", lambda: gpu.Driver("13.0", gpus))

    def nvrtc(self, version):
        found = version and gpu.Nvrtc(pathlib.Path("/x"), pathlib.Path("/"))
        self.set(gpu, "find_nvrtc", lambda: found)
        self.set(checks.nvrtc_compiler, "version", lambda library: version)

    def no_driver(self):
        error = NoUsableGpu(f"{NO_DRIVER}; the CPU milestones m1.1 and m2.1 need none")
        self.set(gpu, "find_driver", lambda: _raise(error))

    def mxnet_for_cuda(self, *architectures):
        self.set(checks, "load_mxnet", lambda: _mxnet(cuda=True))
        found = list(architectures)
        self.set(
            checks.fatbin, "architectures", lambda path: found or _raise(ValueError("damaged"))
        )

    def without(self, module):
        self.item(sys.modules, module, None)

    def compiler(self, name, line=None, cxx=None):
        """Leave this one alone, or none."""
        (self.tools / "g++").unlink()
        if line:
            _script(self.tools / name, line)
        if cxx is not None:
            self.env("CXX", cxx)

    def models(self, *lacking):
        for name, term in course_terms.TERMS.items():
            folder = self.folder / "models" / name
            folder.mkdir(parents=True)
            for model in term.models:
                (folder / f"{model}-symbol.json").touch()
            if name not in lacking:
                (folder / "baseline-0006.params").touch()
        self.set(checks.resources, "models_dir", lambda: self.folder / "models")

    def versions(self, numpy, python):
        self.set(sys.modules["numpy"], "__version__", numpy)
        self.set(checks.platform, "python_version", lambda: python)

    def cores(self, quota, threads=None):
        self.set(os, "sched_getaffinity", lambda pid: set(range(8)))
        self.set(cores, "cpu_quota", lambda: quota)
        self.env("ECE408_THREADS", threads or "")

    def full_cache(self):
        (self.cache / "resized").mkdir(parents=True)
        resize.cached_path("t10k", 70).touch()
        self.set(os, "access", lambda *_: False)

    def no_cache(self):
        (self.folder / "file").touch()
        self.env("ECE408_CACHE", str(self.folder / "file" / "cache"))

    def disk(self, usage):
        self.set(checks.shutil, "disk_usage", usage)


@pytest.fixture
def machine(tools, tmp_path, monkeypatch):
    return Machine(tmp_path, tools, monkeypatch)


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
    assert details["CUDA compiler"].startswith("nvcc 13.0, /")
    assert details["PyCUDA"] == "2026.1"
    assert details["models"] == "2017fa, 2018sp, 2019sp, 2019fa"
    assert details["Python"] == ".".join(map(str, sys.version_info[:3]))


def test_nothing_is_fetched_or_created(machine, monkeypatch):
    monkeypatch.delenv("ECE408_DATA")
    monkeypatch.setattr(fashion_data, "PACKAGE_FOLDER", machine.folder / "package")
    monkeypatch.setattr("ece408_op.course.dataset.fetch.fetch", Mock(side_effect=AssertionError))
    found = _finding("Fashion-MNIST")
    assert (found.status, found.detail) == (NOTE, "not here yet")
    assert "`ece408 data fetch`" in found.hint
    assert _finding("training images").hint == "only `ece408 train` needs them; `ece408 data fetch`"
    assert doctor.diagnose().ready("cpu")
    assert not machine.cache.exists()


def test_the_text_is_aligned_and_hints_have_lines_of_their_own():
    diagnosis = Diagnosis(
        {
            "cpu": [Finding("MXNet", OK, "1.9.1"), Finding("disk space", NOTE, "0.1 GiB free")],
            "gpu": [Finding("nvcc", MISSING, "not found", "install the CUDA toolkit")],
        }
    )
    assert diagnosis.text().splitlines() == [
        *("To run on the CPU:", "ok  MXNet       1.9.1", "    disk space  0.1 GiB free", ""),
        *("Only to compute on a GPU:", "--  nvcc        not found"),
        *("                -> install the CUDA toolkit", ""),
        "CPU milestones (m1.1, m2.1) and your models: cannot run: needs Python, NumPy, SciPy, "
        "CPU kernels, Fashion-MNIST, models, cache folder",
        "kernels of your own: cannot run: needs C++ compiler",
        f"{GPU}cannot run: needs Python, NumPy, SciPy, CPU kernels, Fashion-MNIST, models, "
        "cache folder, CUDA kernels, C++ compiler, CUDA compiler, NVIDIA driver, GPU, PyCUDA",
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
    machine.no_driver()
    machine.without("pycuda.driver")
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


# What is checked, a change to the machine, and what is found: status, words of the detail -> words
# of the hint, and after a / what cannot run.
FOUND = [
    ("MXNet's GPU code", lambda m: m.mxnet_for_cuda("sm_70", "sm_90"), "ok: for sm_70, sm_90"),
    ("MXNet's GPU code", lambda m: m.mxnet_for_cuda("compute_80"), "ok: for compute_80"),
    ("MXNet's GPU code", lambda m: m.mxnet_for_cuda("sm_80", "sm_86"),
     "note: for sm_80, sm_86; GPU 0 is sm_90 -> m1.2"),
    ("MXNet's GPU code", lambda m: (m.mxnet_for_cuda("sm_80"), m.no_driver()),
     "note: for sm_80; no GPU to compare it with / gpu"),
    ("MXNet's GPU code", lambda m: m.mxnet_for_cuda(), "missing: broken: ValueError: damaged"),
    ("GPU 1", lambda m: m.driver(V100), "missing: Tesla V100, sm_70, 16.0 -> sm_75 or newer / gpu"),
    ("GPU 1", lambda m: m.driver(V100, H200), "missing: Tesla V100 -> sm_75 or newer"),
    ("PyCUDA", lambda m: m.without("pycuda.driver"),
     "missing: 2026.1 does not import ( -> run ece408 gpu-setup / gpu"),
    ("PyCUDA", lambda m: m.without("pycuda"),
     "missing: not installed -> run ece408 gpu-setup / gpu"),
    ("CUDA compiler", lambda m: _script(m.tools / "nvcc", "out of order", 1),
     "missing: does not run -> CUDA_HOME / gpu"),
    ("CUDA compiler", lambda m: m.set(gpu, "find_nvcc", lambda: None),
     "missing: neither NVRTC nor nvcc -> run ece408 gpu-setup / gpu"),
    ("CUDA compiler", lambda m: m.nvrtc("NVRTC 13.0"), "ok: /x; nvcc 13.0, /"),
    ("CUDA compiler", lambda m: (m.nvrtc("NVRTC 13.0"), m.set(gpu, "find_nvcc", lambda: None)),
     "note: NVRTC 13.0, /x; no nvcc, which kernels of your own need -> CUDA_HOME"),
    ("C++ compiler", lambda m: m.compiler("clang++", "clang 17"), "ok: clang 17"),
    ("C++ compiler", lambda m: m.compiler("none"),
     "missing: no g++, clang++ or c++ -> apt install g++ / build gpu"),
    ("C++ compiler", lambda m: m.compiler("none", cxx="icpx -O3"),
     "missing: CXX=icpx is not there / build gpu"),
    ("C++ compiler", lambda m: m.compiler("icpx", "Intel", "icpx -O3"), "ok: Intel"),
    ("C++ compiler", lambda m: m.compiler("none", cxx="'unbalanced"),
     "missing: broken: ValueError -> report / build gpu"),
    ("CUDA kernels", lambda m: m.kernel.unlink(), "missing:  -> run pip install again / gpu"),
    ("CPU kernels", lambda m: m.set(native, "library", lambda: _raise(NO_KERNELS)),
     "missing: the compiled CPU kernels are not at x -> run `pip install .` / cpu gpu"),
    ("training images", lambda m: (m.folder / "named" / idx.files("train")[1].name).unlink(),
     "note: has no train-labels-idx1-ubyte"),
    ("Fashion-MNIST", lambda m: m.env("ECE408_DATA", "/nowhere"),
     "missing: /nowhere, which is not a folder, has no t10k-images -> ECE408_DATA / cpu gpu"),
    ("models", lambda m: m.models("2018sp"),
     "note: 2017fa, 2019sp, 2019fa; not 2018sp -> `ece408 train 2018sp`"),
    ("models", lambda m: m.models("2019fa"),
     "missing: 2017fa, 2018sp, 2019sp; not 2019fa -> `ece408 train 2019fa` / cpu gpu"),
    ("models", lambda m: m.models(*course_terms.TERMS),
     "missing: none; not 2017fa, 2018sp, 2019sp, 2019fa -> `ece408 train 2017fa` / cpu gpu"),
    ("NumPy", lambda m: m.versions("1.20.3", "3.12.1"),
     "missing: 1.20.3; from 1.21 to below 1.27 -> pip install 'numpy>=1.21,<1.27' / cpu gpu"),
    ("NumPy", lambda m: m.versions("1.26.4", "3.12.1"), "ok: 1.26.4"),
    ("NumPy", lambda m: m.versions("2.0.1", "3.12.1"),
     "missing: 2.0.1; from 1.21 to below 1.27 is needed / cpu gpu"),
    ("NumPy", lambda m: m.versions("1.26.4", "3.13.0"),
     "missing: 1.26.4; from 2.1 to below 3.0 is needed -> pip install 'numpy>=2.1,<3.0' / cpu gpu"),
    ("NumPy", lambda m: m.versions("2.5.5", "3.14.0"), "ok: 2.5.5"),
    ("Python", lambda m: m.versions("1.26.4", "3.8.20"), "missing: 3.8.20 / cpu gpu"),
    ("Python", lambda m: m.versions("1.26.4", "3.9.0"), "ok: 3.9.0"),
    ("Python", lambda m: m.versions("2.5.5", "3.14.1"), "ok: 3.14.1"),
    ("Python", lambda m: m.versions("2.5.5", "3.15.0"), "missing: 3.15.0 / cpu gpu"),
    ("SciPy", lambda m: m.without("scipy.ndimage"),
     "missing: does not import ( -> pip install 'scipy>=1.7,<2.0' / cpu gpu"),
    ("memory", lambda m: m.set(footprint, "available_bytes", lambda: 1 << 30),
     "note: 1.0 GiB available; 10000 images of 2019fa in one batch take  -> --batch-size"),
    ("cores", lambda m: m.cores(None), "ok: 8 usable, no CPU quota: 8 threads"),
    ("cores", lambda m: m.cores(2.5), "ok: 8 usable, CPU quota of 2.5: 2 threads"),
    ("cores", lambda m: m.cores(2.5, "4"),
     "note: 8 usable, CPU quota of 2.5: 4 threads -> set ECE408_THREADS=2 or leave it unset"),
    ("cache folder", lambda m: None, "ok: cache, made when it is needed"),
    ("cache folder", lambda m: m.no_cache(),
     "missing: cache is not writable -> ECE408_CACHE / cpu gpu"),
    ("cache folder", lambda m: m.full_cache(), "note:  / build gpu"),
    ("disk space", lambda m: m.disk(lambda path: SimpleNamespace(free=100 << 20)),
     "note: 0.1 GiB free for the cache -> make room"),
    ("disk space", lambda m: m.disk(lambda path: _raise(OSError(errno.EIO, "no"))),
     "missing: broken: OSError:  -> report"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), FOUND)
def test_what_is_found(machine, name, change, expected):
    change(machine)
    diagnosis = doctor.diagnose()
    found = _finding(name, diagnosis)
    expected, _, cannot = expected.partition(" / ")
    expected, _, hint = expected.partition(" -> ")
    status, _, detail = expected.partition(": ")
    assert found.status == status
    assert detail in found.detail
    assert hint in found.hint
    assert [each for each in checks.CHECKS if not diagnosis.ready(each)] == cannot.split()


def test_the_last_lines_say_what_can_run(machine):
    machine.mxnet_for_cuda("sm_90")
    assert _last_lines(doctor.diagnose()) == [CPU_CAN, GPU + "can run"]
    machine.compiler("none")
    diagnosis = doctor.diagnose()
    assert _last_lines(diagnosis) == [CPU_CAN, GPU + "cannot run: needs C++ compiler"]
    lacking = "kernels of your own: cannot run: needs C++ compiler"
    assert diagnosis.text().splitlines()[-2] == lacking
    machine.driver(V100)
    assert doctor.diagnose().exit_code == doctor.EXIT_CPU_ONLY


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
