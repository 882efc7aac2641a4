"""Compilation of CUDA sources by nvcc."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....errors import KernelCompileFailed, NoUsableGpu
from ....files.resources import cuda_folders, kernels_dir
from ....host.gpu import find_nvcc
from ...kernel_file import first_error, guarded
from ..kernel_plan import Defines

OPTIONS = ("-std=c++17", "-O3", "--restrict")
# Line information for tools such as compute-sanitizer; the code stays the same.
LINES = "-lineinfo"
# Options for the library of a user's file, which contains host code.
LIBRARY_OPTIONS = (
    *("-std=c++17", "-O3", "-cudart=static", "-Xcompiler=-fPIC", "-w", LINES),
    # kernels/files/entry.cuh says why.
    "-Xlinker=--wrap=cudaMalloc",
)


def require_nvcc() -> Path:
    """Return the path of nvcc. Raises `NoUsableGpu` if it is not found."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise NoUsableGpu(
            "nvcc, which compiles the CUDA kernels, is not on PATH, in CUDA_HOME, in "
            "/usr/local/cuda or among pip's packages; install the CUDA toolkit or "
            "`pip install nvidia-cuda-nvcc nvidia-cuda-cccl`, or set CUDA_HOME"
        )
    return nvcc


@functools.cache
def nvcc_version(nvcc: Path) -> str:
    """Return the output of nvcc --version. Raises `NoUsableGpu` when it does not run."""
    try:
        result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True)
    except OSError as error:
        raise nvcc_missing(nvcc) from error
    if result.returncode != 0:
        raise NoUsableGpu(f"{nvcc} --version fails with {result.returncode}; reinstall CUDA")
    return result.stdout


def nvcc_missing(nvcc: Path) -> NoUsableGpu:
    """Return the error for an nvcc that does not run."""
    return NoUsableGpu(f"{nvcc} does not run; reinstall CUDA")


def options(defines: Defines, architecture: str) -> tuple[str, ...]:
    """Return nvcc's options for a source with these macros."""
    # nvcc treats an unescaped comma as the start of another macro.
    macros = (f"-D{name}={value}".replace(",", "\\,") for name, value in defines)
    return (*OPTIONS, gencode(architecture), *macros)


def gencode(architecture: str) -> str:
    """Return nvcc's option for machine code for an architecture such as "90"."""
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


@dataclass(frozen=True)
class Resources:
    """Compiler statistics of a function: registers and spilled bytes per thread, static shared
    memory per block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def plan_command(source: str, defines: Defines, architecture: str) -> list[str]:
    """Return nvcc's command for compiling a source as `compile_plan` does, without the output
    option. Raises `NoUsableGpu` without nvcc."""
    path = kernels_dir() / "cuda" / source
    return _command(require_nvcc(), path, options(defines, architecture))


def _command(nvcc: Path, path: Path, options: Sequence[str]) -> list[str]:
    return [str(nvcc), "-cubin", *options, *(f"-I{each}" for each in cuda_folders()), str(path)]


@functools.lru_cache(maxsize=64)
def resources(command: tuple[str, ...]) -> dict[str, Resources]:
    """Return the resources of each kernel that nvcc's command compiles to a cubin, by symbol; empty
    if it does not compile. The command has no output option."""
    with tempfile.TemporaryDirectory(prefix="ece408-nvcc-") as folder:
        own = ["-Xptxas=-v", "-o", str(Path(folder) / "kernel.cubin")]
        result = subprocess.run([*command, *own], capture_output=True, text=True)
    found = {}
    for part in result.stderr.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        spilled = re.search(r"(\d+) bytes spill stores", part)
        shared = re.search(r"(\d+) bytes smem", part)
        numbers = (int(each[1]) if each else 0 for each in (registers, spilled, shared))
        found[part.partition("'")[0]] = Resources(*numbers)
    return found


def compile_source(nvcc: Path, path: Path, options: Sequence[str]) -> bytes:
    """Compile the file to a cubin. Raises `KernelCompileFailed`."""
    with tempfile.TemporaryDirectory(prefix="ece408-nvcc-") as folder:
        output = Path(folder) / "kernel.cubin"
        command = [*_command(nvcc, path, options), "-o", str(output)]
        result = subprocess.run(
            guarded(command, path), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if result.returncode == 0:
            return output.read_bytes()
    raise KernelCompileFailed(
        f"{first_error(result.stderr, path)} (exit code {result.returncode} of: "
        f"{shlex.join(command)})"
    )
