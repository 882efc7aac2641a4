"""Checks of `ece408 doctor`, one per item, and their findings."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Union

from .. import settings
from ..backends.cpu import native
from ..backends.cuda.runtime import nvrtc_compiler
from ..course import course_terms
from ..course.dataset import fashion_data, resize
from ..course.milestone import TEST_IMAGES
from ..errors import DataMissing, Ece408Error, MXNetMissing, NoUsableGpu
from ..files import resources
from ..host import cores, fatbin, footprint, gpu
from ..operator import compiled_operator, networks
from ..operator.loading import load_mxnet

OK = "ok"
MISSING = "missing"
NOTE = "note"

_GIB = 1 << 30
_COMMAND_SECONDS = 30
MXNETS_GPU_CODE = "MXNet's GPU code"
_COMPILED_OPERATOR = "compiled operator"
_WHOLE_NETWORKS = "whole networks"
_SETUP = "run ece408 gpu-setup, which installs it"
# Memory of all 10000 images of the default term in one batch, if MXNet cannot compute it.
USUAL_NEED_BYTES = int(4.1 * _GIB)
# Both sets of images, original and resized for the default term, take about 400 MB.
_ROOMY_BYTES = _GIB // 2


@dataclass(frozen=True)
class Finding:
    """One item; its status is "ok", "missing", or "note", which is neither good nor bad."""

    name: str
    status: str
    detail: str
    hint: str = ""


_Found = Union[Finding, "list[Finding]"]
Check = Callable[[], _Found]


def run(name: str, check: Check) -> list[Finding]:
    """Return a check's findings; our errors become findings of missing items, others are bugs."""
    try:
        found = check()
    except Ece408Error as error:
        problem, _, remedy = _one_line(error).partition("; ")
        return [Finding(name, MISSING, problem, remedy)]
    except Exception as error:
        text = f"broken: {type(error).__name__}: {_one_line(error)}"
        return [Finding(name, MISSING, text, "this check itself failed; please report it")]
    return [found] if isinstance(found, Finding) else found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _versioned(name: str, version: str, oldest: str, too_new: str, hint: str) -> Finding:
    """Return whether a version is at least `oldest` and below `too_new`."""
    if _number(oldest) <= _number(version) < _number(too_new):
        return Finding(name, OK, version)
    return Finding(name, MISSING, f"{version}; from {oldest} to below {too_new} is needed", hint)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _python() -> Finding:
    hint = "make a virtual environment with another Python, and install there"
    return _versioned("Python", platform.python_version(), "3.9", "3.15", hint)


def _package(name: str, module: str, oldest: str, too_new: str) -> Finding:
    hint = f"pip install '{name.lower()}>={oldest},<{too_new}'"
    try:
        importlib.import_module(module)
    except Exception as error:  # One built for another NumPy fails in more ways than one.
        return Finding(name, MISSING, f"does not import ({_one_line(error)})", hint)
    return _versioned(name, sys.modules[name.lower()].__version__, oldest, too_new, hint)


def _numpy() -> Finding:
    # MXNet needs NumPy 1, and does not run on Python 3.13.
    limits = ("1.21", "1.27")
    if _number(platform.python_version()) >= (3, 13):
        limits = ("2.1", "3.0")
    return _package("NumPy", "numpy", *limits)


def _scipy() -> Finding:
    # The module that is used, which contains compiled code.
    return _package("SciPy", "scipy.ndimage", "1.7", "2.0")


def _mxnet() -> Finding:
    mx = load_mxnet()
    cuda = mx.runtime.Features().is_enabled("CUDA")
    return Finding("MXNet", OK, f"{mx.__version__}, built for {'CUDA' if cuda else 'the CPU'}")


def _mxnets_gpu_code() -> _Found:
    try:
        mx = load_mxnet()
    except MXNetMissing:
        return []
    if not mx.runtime.Features().is_enabled("CUDA"):
        hint = "only m1.2 needs it: pip uninstall mxnet, then pip install 'ece408_op[cu117]'"
        return Finding(MXNETS_GPU_CODE, NOTE, "none", hint)
    built_for = fatbin.architectures(mx.libinfo.find_lib_path()[0])
    text = ", ".join(built_for)
    driver = _driver_or_none()
    if driver is None:
        return Finding(MXNETS_GPU_CODE, NOTE, f"for {text}; no GPU to compare it with")
    # MXNet computes on the first one.
    device = driver.gpus[0]
    if any(fatbin.runs_on(each, device.capability) for each in built_for):
        return Finding(MXNETS_GPU_CODE, OK, f"for {text}")
    detail = f"for {text or 'no architecture'}; GPU 0 is {device.architecture}"
    hint = "only m1.2 needs it, and cannot run on this GPU; stay with mx.cpu() in your own models"
    return Finding(MXNETS_GPU_CODE, NOTE, detail, hint)


def _driver_or_none() -> gpu.Driver | None:
    try:
        return gpu.find_driver()
    except NoUsableGpu:
        return None


def _cpu_kernels() -> Finding:
    native.library()
    return Finding("CPU kernels", OK, f"{native.LIBRARY.name}, with {', '.join(native.isas())}")


def _compiled_operator() -> Finding:
    load_mxnet()
    missing = compiled_operator.missing()
    if missing is None:
        return Finding(_COMPILED_OPERATOR, OK, compiled_operator.LIBRARY.name)
    return Finding(_COMPILED_OPERATOR, NOTE, missing, "networks run, but slower, by Python's")


def _cuda_kernels() -> Finding:
    folder = resources.kernels_dir() / "cuda"
    count = len(list(folder.rglob("*.cu")))
    if not count:
        return Finding("CUDA kernels", MISSING, f"no sources in {folder}", "run pip install again")
    return Finding("CUDA kernels", OK, f"{count} in {folder}")


def _compiler() -> Finding:
    hint = "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a C++ compiler"
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]) is not None:
            return _tool("C++ compiler", command, hint, lambda output: output.splitlines()[0])
    detail = f"CXX={named[0]} is not there" if named else "no g++, clang++ or c++"
    return Finding("C++ compiler", MISSING, detail, hint)


def computes_rightly(backend: Any) -> bool:
    """Return whether a backend computes a small convolution. Raises the backend's errors."""
    import numpy as np

    from ..problem import ConvProblem

    problem = ConvProblem.parse("b1,c2,h4,w4,m1,k3")
    x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))
    y = np.empty(problem.y_shape, np.float32)
    backend.forward(problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data, False)
    return bool((y == problem.channels * 9).all())


def _emulator() -> Finding:
    """Run one of this package's kernels on the CPU; compile it first if necessary."""
    from ..backends.emulator.emulator_backend import EmulatedBackend

    cache = settings.cache()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ece408-doctor-") as folder,
            settings.override(cache=cache if cache.is_dir() else folder),
        ):
            is_right = computes_rightly(EmulatedBackend("general"))
    except Ece408Error as error:
        reason, _, remedy = _one_line(error).partition("; ")
        return Finding("emulator", NOTE, f"does not run: {reason}", remedy)
    if not is_right:
        return Finding("emulator", NOTE, "computes wrongly", "see lab check --emulate")
    return Finding("emulator", OK, "runs CUDA kernels without a GPU: ece408 lab check --emulate")


def _cuda_compiler() -> Finding:
    """Return whether NVRTC compiles our kernels, and nvcc a user's; nvcc can do both."""
    name, hint = "CUDA compiler", "install the CUDA toolkit, or set CUDA_HOME to it"
    nvrtc, path = gpu.find_nvrtc(), gpu.find_nvcc()
    library = nvrtc and f"{nvrtc_compiler.version(nvrtc.library)}, {nvrtc.library}"
    if path is None:
        if library is None:
            return Finding(name, MISSING, "neither NVRTC nor nvcc is found", _SETUP)
        return Finding(name, NOTE, f"{library}; no nvcc, which kernels of your own need", hint)

    def describe(output: str) -> str:
        release = re.search(r"release ([\d.]+)", output)
        nvcc = f"nvcc {release[1] if release else 'of unknown version'}, {path}"
        return f"{library}; {nvcc}" if library else f"{nvcc}; no NVRTC, which is faster"

    return _tool(name, [str(path)], hint, describe)


def _tool(name: str, command: list[str], hint: str, describe: Callable[[str], str]) -> Finding:
    """Return whether a compiler runs, described by its version output."""
    try:
        result = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name, MISSING, f"{command[0]} does not run ({_one_line(error)})", hint)
    return Finding(name, OK, describe(result.stdout or "unknown version"))


def versions() -> list[str]:
    """Return lines with the versions of MXNet, the CUDA compiler and the driver."""
    mxnet = "none"
    for name in ("mxnet", "mxnet-cu117"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            mxnet = f"{name} {importlib.metadata.version(name)}"
    driver = _driver_or_none()
    cuda = f"for CUDA up to {driver.cuda_version}" if driver else "none"
    details = (mxnet, _cuda_compiler().detail, cuda)
    return list(map(": ".join, zip(("MXNet", "CUDA compiler", "NVIDIA driver"), details)))


def _driver() -> list[Finding]:
    driver = gpu.find_driver()
    found = Finding("NVIDIA driver", OK, f"for CUDA up to {driver.cuda_version}")
    if _number(driver.cuda_version) < (gpu.OLDEST_CUDA,):
        detail = f"{found.detail}, and {gpu.OLDEST_CUDA}.0 is needed"
        found = Finding(found.name, MISSING, detail, "install a newer driver")
    return [found, *map(_gpu, driver.gpus)]


def _gpu(device: gpu.Gpu) -> Finding:
    name = f"GPU {device.index}"
    memory = f"{device.memory_bytes / _GIB:.1f} GiB"
    detail = f"{device.name}, {device.architecture}, {memory}"
    if device.capability >= gpu.OLDEST_CAPABILITY:
        return Finding(name, OK, detail)
    oldest = "sm_{}{}".format(*gpu.OLDEST_CAPABILITY)
    hint = f"the CUDA kernels need {oldest} or newer; the CPU milestones run without a GPU"
    return Finding(name, MISSING, detail, hint)


def _pycuda() -> Finding:
    if importlib.util.find_spec("pycuda") is None:
        return Finding("PyCUDA", MISSING, "not installed", _SETUP)
    try:
        version = importlib.metadata.version("pycuda")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    if _driver_or_none() is None:
        return Finding("PyCUDA", NOTE, f"{version}, not tried without a driver")
    try:
        importlib.import_module("pycuda.driver")
    except Exception as error:
        detail = f"{version} does not import ({_one_line(error)})"
        return Finding("PyCUDA", MISSING, detail, _SETUP)
    return Finding("PyCUDA", OK, version)


def _whole_networks() -> Finding:
    load_mxnet()
    reason = networks.why_no_gpu()
    if reason is None:
        return Finding(_WHOLE_NETWORKS, OK, "run there by our kernels: ece408_op.to_gpu, final")
    problem, _, remedy = reason.partition("; ")
    return Finding(_WHOLE_NETWORKS, NOTE, f"run on the CPU, by MXNet: {problem}", remedy)


def _test_set() -> Finding:
    folder = fashion_data.find("t10k")
    if folder is None:
        hint = "`ece408 data fetch` gets it, and so does the first milestone"
        return Finding("Fashion-MNIST", NOTE, "not here yet", hint)
    return Finding("Fashion-MNIST", OK, str(folder))


def _training_set() -> Finding:
    hint = "only `ece408 train` needs them; "
    try:
        folder = fashion_data.find("train")
    except DataMissing as error:
        problem, _, remedy = _one_line(error).partition("; ")
        return Finding("training images", NOTE, problem, hint + remedy)
    if folder is None:
        return Finding("training images", NOTE, "not here yet", f"{hint}`ece408 data fetch`")
    return Finding("training images", OK, str(folder))


def _models() -> Finding:
    folder = resources.models_dir()
    there = [
        name for name, term in course_terms.TERMS.items() if _has_checkpoint(folder / name, term)
    ]
    lacking = [name for name in course_terms.TERMS if name not in there]
    if not lacking:
        return Finding("models", OK, ", ".join(there))
    detail = f"{', '.join(there) or 'none'}; not {', '.join(lacking)}"
    hint = f"pip install the package again, or `ece408 train {lacking[0]}`"
    status = NOTE if course_terms.DEFAULT_TERM in there else MISSING
    return Finding("models", status, detail, hint)


def _has_checkpoint(folder: Path, term: course_terms.Term) -> bool:
    symbols = all((folder / f"{model}-symbol.json").is_file() for model in term.models)
    return symbols and any(folder.glob(f"{course_terms.BASELINE}-[0-9][0-9][0-9][0-9].params"))


def _memory() -> Finding:
    free, need = footprint.available_bytes(), _needed_bytes()
    detail = (
        f"{free / _GIB:.1f} GiB available; {TEST_IMAGES} images of {course_terms.DEFAULT_TERM} in "
        f"one batch take {need / _GIB:.1f} GiB"
    )
    if free >= need:
        return Finding("memory", OK, detail)
    return Finding("memory", NOTE, detail, "give milestones --batch-size 1000 or less")


def _needed_bytes() -> int:
    term = course_terms.TERMS[course_terms.DEFAULT_TERM]
    try:
        symbol = course_terms.network(term)
    except Exception:  # Another finding says why MXNet does not work.
        return USUAL_NEED_BYTES
    return footprint.required_bytes(symbol, TEST_IMAGES, TEST_IMAGES, term.image_size)


def _cores() -> Finding:
    allowed, quota = len(os.sched_getaffinity(0)), cores.cpu_quota()
    limit = "no CPU quota" if quota is None else f"CPU quota of {quota:g}"
    detail = f"{allowed} usable, {limit}: {settings.threads()} threads"
    if settings.threads() <= cores.usable():
        return Finding("cores", OK, detail)
    return Finding("cores", NOTE, detail, f"set ECE408_THREADS={cores.usable()} or leave it unset")


def _cache_folder() -> Finding:
    folder = settings.cache()
    nearest = _nearest(folder)
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        detail = str(folder) if nearest == folder else f"{folder}, made when it is needed"
        return Finding("cache folder", OK, detail)
    # Scoring only reads the cache once it has the resized images.
    term = course_terms.TERMS[course_terms.DEFAULT_TERM]
    made = os.path.exists(resize.cached_path("t10k", term.image_size))
    hint = "make it writable, or set ECE408_CACHE to a folder that is"
    return Finding("cache folder", NOTE if made else MISSING, f"{folder} is not writable", hint)


def _disk_space() -> Finding:
    free = shutil.disk_usage(_nearest(settings.cache())).free
    detail = f"{free / _GIB:.1f} GiB free for the cache"
    if free >= _ROOMY_BYTES:
        return Finding("disk space", OK, detail)
    return Finding("disk space", NOTE, detail, "make room, or set ECE408_CACHE to another folder")


def _nearest(path: Path) -> Path:
    """Return the path itself, or its closest existing ancestor."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if os.path.exists(each))


CPU, BUILD, GPU = "cpu", "build", "gpu"
# Checks of each purpose of an installation.
CHECKS: dict[str, dict[str, Check]] = {
    CPU: {
        "Python": _python,
        "NumPy": _numpy,
        "SciPy": _scipy,
        "MXNet": _mxnet,
        "CPU kernels": _cpu_kernels,
        _COMPILED_OPERATOR: _compiled_operator,
        "Fashion-MNIST": _test_set,
        "training images": _training_set,
        "models": _models,
        "memory": _memory,
        "cores": _cores,
        "cache folder": _cache_folder,
        "disk space": _disk_space,
    },
    BUILD: {
        "C++ compiler": _compiler,
        "emulator": _emulator,
    },
    GPU: {
        "CUDA kernels": _cuda_kernels,
        "CUDA compiler": _cuda_compiler,
        "NVIDIA driver": _driver,
        "PyCUDA": _pycuda,
        MXNETS_GPU_CODE: _mxnets_gpu_code,
        _WHOLE_NETWORKS: _whole_networks,
    },
}
