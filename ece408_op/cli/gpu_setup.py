"""`ece408 gpu-setup`: installs what computing on a GPU needs besides NVIDIA's driver."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from ..backends.cuda.cuda_backend import StagedBackend
from ..errors import InstallFailed, NoUsableGpu
from ..files.cachedir import write_text
from ..host import gpu
from . import arguments
from .doctor_checks import computes_rightly

# The package's extras that have NVIDIA's wheels, by CUDA's major version. `cuda` has PyCUDA.
_EXTRAS = {12: "gpu12", 13: "gpu"}
# Packages that the command installed into this environment.
_RECORD = Path(sys.prefix) / "share" / "ece408_op" / "gpu_setup.json"
# PyCUDA needs the driver's functions and their header. The linker needs a library of the driver's
# name only: the driver itself may be missing, as in an image.
_SITE = """\
CUDA_INC_DIR = {headers!r}
CUDADRV_LIB_DIR = [{folder!r}]
CUDA_ENABLE_CURAND = False
CXXFLAGS = ["-g0"]
"""


def add(commands: Any) -> None:
    """Add `ece408 gpu-setup`."""
    parser = arguments.add_command(
        commands,
        "gpu-setup",
        "install what computing on a GPU needs besides NVIDIA's driver",
        epilog="Installs by pip into this command's environment: the CUDA compiler, unless there "
        "is one for the driver, and PyCUDA, compiled with g++ in a minute or two. What is there "
        "stays as it is.",
    )
    parser.option(
        "--cuda N",
        "major version of CUDA, 12 or 13 (default: the driver's), such as in an image",
        choices=sorted(_EXTRAS),
    )
    parser.option("--undo", "remove what this command installed")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.undo:
        _undo()
        return
    driver = None if options.cuda else gpu.find_driver()
    major = options.cuda if driver is None else _major(driver)
    print(f"gpu-setup: CUDA {driver.cuda_version if driver else major}")
    before = _installed()
    # What is there when it is terminated is recorded, too.
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        headers = _install_compiler(major)
        _install_pycuda(headers, major, is_usable=driver is not None)
    finally:
        signal.signal(signal.SIGTERM, previous)
        _record(_installed() - before)
    if driver is not None:
        begin = time.monotonic()
        if not computes_rightly(StagedBackend("general")):
            raise InstallFailed("a first kernel computes wrongly; ece408 doctor says more")
        print(f"gpu-setup: a first kernel is right, in {time.monotonic() - begin:.1f} s")
    print("gpu-setup: ready; --undo removes what it installed")


def _major(driver: gpu.Driver) -> int:
    """Return the major version of CUDA to install for a driver."""
    major = int(driver.cuda_version.partition(".")[0])
    if major < gpu.OLDEST_CUDA:
        raise NoUsableGpu(
            f"the NVIDIA driver supports CUDA up to {driver.cuda_version}, and {gpu.OLDEST_CUDA}.0 "
            "is needed; install a newer driver"
        )
    return min(major, max(_EXTRAS))


def _install_compiler(major: int) -> Path:
    """Install NVRTC, unless there is one; return the folder of CUDA's headers."""
    found = gpu.find_nvrtc(major)
    if found is None:
        print("gpu-setup: installing the CUDA compiler, NVIDIA's wheels", flush=True)
        _pip("install", *_requirements(_EXTRAS[major]))
        importlib.invalidate_caches()
        found = gpu.find_nvrtc(major)
    if found is None:
        raise InstallFailed("pip installed the CUDA compiler, but NVRTC is not found")
    print(f"gpu-setup: CUDA compiler: {found.library}")
    return found.headers


def _install_pycuda(headers: Path, major: int, is_usable: bool) -> None:
    """Compile PyCUDA, unless it is there."""
    if not _has_pycuda(is_usable):
        header = Path(sysconfig.get_path("include"), "Python.h")
        for what, package, is_there in (
            (_compiler()[0], "g++", shutil.which(_compiler()[0])),
            (str(header), "python3-dev", header.is_file()),
        ):
            if not is_there:
                raise InstallFailed(
                    f"PyCUDA is compiled here, and {what} is not there; install {package} (Debian, "
                    f"Ubuntu: apt install {package})"
                )
        begin = time.monotonic()
        print("gpu-setup: compiling PyCUDA, which takes a minute or two", flush=True)
        with tempfile.TemporaryDirectory(prefix="ece408-pycuda-") as folder:
            _build_pycuda(headers, major, Path(folder))
        print(f"gpu-setup: compiled PyCUDA in {time.monotonic() - begin:.0f} s")
        importlib.invalidate_caches()
    print(f"gpu-setup: PyCUDA {importlib.metadata.version('pycuda')}")


def _has_pycuda(is_usable: bool) -> bool:
    """Return whether PyCUDA is there and, where a driver makes it usable, imports."""
    test = "pycuda.driver" if is_usable else "pycuda"
    return not subprocess.run(
        [sys.executable, "-c", f"import {test}"], capture_output=True
    ).returncode


def _build_pycuda(cuda: Path, major: int, folder: Path) -> None:
    headers = [cuda]
    if not (cuda / "cudaProfiler.h").is_file():
        # Only the build needs this one.
        name = "nvidia-cuda-profiler-api" + ("-cu12" if major == 12 else "<14")
        _pip("install", "--quiet", "--no-deps", "--target", str(folder / "more"), name)
        headers += [path.parent for path in (folder / "more").rglob("cudaProfiler.h")]
    (folder / "empty.c").touch()
    empty = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so", "empty.c"]
    if subprocess.run([*_compiler(), *empty], cwd=folder).returncode:
        raise InstallFailed(f"{_compiler()[0]} cannot link a library; its messages are above")
    _download_pycuda(folder)
    with tarfile.open(next(folder.glob("pycuda-*.tar.gz"))) as archive:
        archive.extractall(folder)
    source = next(path for path in folder.glob("pycuda-*") if path.is_dir())
    site = _SITE.format(headers=[str(each) for each in headers], folder=str(folder))
    (source / "siteconf.py").write_text(site)
    # The linker would leave the empty library out. Of the environment, the option comes before it.
    flags = f"{os.environ.get('LDFLAGS', '')} -Wl,--no-as-needed"
    _pip("install", "--force-reinstall", "--no-deps", "--no-cache-dir", str(source), LDFLAGS=flags)
    _pip("install", "--quiet", "pycuda")  # what it requires


def _download_pycuda(folder: Path) -> None:
    """Download PyCUDA's source. pip asks it twice what it requires, and each time it waits for ten
    seconds unless there is a configuration in the home folder."""
    (folder / ".aksetup-defaults.py").touch()
    home = Path.home()
    moved = {"XDG_CONFIG_HOME": home / ".config", "NETRC": home / ".netrc"}
    kept = {name: os.environ.get(name) or str(path) for name, path in moved.items()}
    command = ("download", "--quiet", "--no-deps", "--no-binary", "pycuda", "--dest", str(folder))
    _pip(*command, *_requirements("cuda"), HOME=str(folder), **kept)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra of this package."""
    found = (each.split(";") for each in importlib.metadata.requires("ece408_op") or ())
    return [what.strip() for what, *when in found if f'extra == "{extra}"' in "".join(when)]


def _pip(*arguments: str, **environment: str) -> None:
    """Run pip, which shows its progress. Raises `InstallFailed`."""
    if importlib.util.find_spec("pip") is None:
        raise InstallFailed(f"{sys.executable} has no pip; run `python -m ensurepip` first")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ | environment).returncode:
        raise InstallFailed(f"pip {arguments[0]} failed; its messages are above")


def _installed() -> set[str]:
    """Return the names of the packages in the environment."""
    return {each.metadata["Name"] for each in importlib.metadata.distributions()}


def _recorded() -> set[str]:
    return set(json.loads(_RECORD.read_text())) if _RECORD.is_file() else set()


def _record(added: set[str]) -> None:
    if added:
        _RECORD.parent.mkdir(parents=True, exist_ok=True)
        write_text(_RECORD, json.dumps(sorted(_recorded() | added)))


def _undo() -> None:
    """Remove what the record names."""
    if found := sorted(_recorded() & _installed()):
        _pip("uninstall", "--yes", *found)
    _RECORD.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _RECORD.parent.rmdir()
    print(f"gpu-setup: removed {', '.join(found) or 'nothing'}")
