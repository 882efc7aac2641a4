"""From a source in kernels/cuda to machine code, by nvcc, kept on disk.

PyCUDA's own cache runs the preprocessor before every lookup as soon as a source includes a header,
and its compiler needs the driver; so nvcc is called here, on machines without a GPU as well, and
PyCUDA loads what it made.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shlex
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ....errors import KernelCompileFailed, NoUsableGpu
from ....files.resources import cuda_folders, kernels_dir
from ....files.sealed import kept_or_compiled
from ....host.gpu import find_nvcc
from ...kernel_file import first_error, guarded
from ..kernel_plan import Defines

OPTIONS = ("-std=c++17", "-O3", "--restrict")
# Which instruction is of which line, for tools such as compute-sanitizer; the code is the same.
LINES = "-lineinfo"
# For the library of a user's file, with code for the host as well.
LIBRARY_OPTIONS = (
    *("-std=c++17", "-O3", "-cudart=static", "-Xcompiler=-fPIC", "-w", LINES),
    # kernels/files/entry.cuh says why.
    "-Xlinker=--wrap=cudaMalloc",
)
_asking = threading.Lock()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.M)


def compile_plan(source: str, defines: Defines, architecture: str, cache_folder: Path) -> bytes:
    """Machine code (a cubin) of kernels/cuda/`source` for an architecture such as "90"; a source
    given by an absolute path may include the headers there as well.

    It is compiled once for each text of the source and its headers, macros, options, architecture
    and version of nvcc, however many threads and processes ask for it, and kept in `cache_folder`;
    and again, with a line on stderr, where what is kept is damaged or not to be trusted.

    Raises `NoUsableGpu` without nvcc, `KernelCompileFailed` with file, line and command when the
    source does not compile, `KernelsMissing`, and `CacheUnwritable`.
    """
    nvcc = require_nvcc()
    folder = kernels_dir() / "cuda"
    options = _options(defines, architecture)
    if Path(source).is_absolute():
        options += (LINES,)
    # So that threads that come at the same time do not all ask.
    with _asking:
        version = nvcc_version(nvcc)
    key = hashlib.sha256()
    for part in (version, *options, *_texts(folder, source)):
        key.update(part.encode() + b"\0")
    stem = f"{Path(source).stem}-sm_{architecture}-{key.hexdigest()[:24]}"
    kept = cache_folder / f"{stem}.cubin"
    return kept_or_compiled(kept, source, lambda: compile_source(nvcc, folder / source, options))


def require_nvcc() -> Path:
    """Where nvcc is. Raises `NoUsableGpu` when it is nowhere."""
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
    """What nvcc says about its version. Raises `NoUsableGpu` when it does not run."""
    try:
        result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True)
    except OSError as error:
        raise nvcc_missing(nvcc) from error
    if result.returncode != 0:
        raise NoUsableGpu(f"{nvcc} --version fails with {result.returncode}; reinstall CUDA")
    return result.stdout


def nvcc_missing(nvcc: Path) -> NoUsableGpu:
    """That nvcc is there and does not run."""
    return NoUsableGpu(f"{nvcc} does not run; reinstall CUDA")


def _options(defines: Defines, architecture: str) -> tuple[str, ...]:
    # nvcc takes a comma as the beginning of another macro.
    macros = (f"-D{name}={value}".replace(",", "\\,") for name, value in defines)
    return (*OPTIONS, gencode(architecture), *macros)


def gencode(architecture: str) -> str:
    """nvcc's option for machine code for an architecture such as "90"."""
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


def _texts(folder: Path, source: str) -> list[str]:
    """The text of a source and of all headers that it includes from its folder or ours."""
    paths, texts, folders = [folder / source], [], cuda_folders()
    for path in paths:
        status = path.stat()
        text, includes = _text(path, status.st_mtime_ns, status.st_size)
        texts.append(text)
        for name in includes:
            # One that is nowhere is nvcc's to complain about.
            places = (place / name for place in (path.parent, *folders))
            found = [place for place in places if place.is_file()]
            paths += [header for header in found[:1] if header not in paths]
    return texts


# Networks ask for the same few sources with many macros.
@functools.lru_cache(maxsize=256)
def _text(path: Path, written: int, size: int) -> tuple[str, list[str]]:
    """A file's text, as it was `written` at that time, and what it includes."""
    text = path.read_text(encoding="utf-8")
    return text, _INCLUDE.findall(text)


@dataclass(frozen=True)
class Resources:
    """What the compiler gives a function: registers and bytes of spilled ones of a thread, bytes of
    static shared memory of a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def plan_command(source: str, defines: Defines, architecture: str) -> list[str]:
    """nvcc's command that compiles a source as `compile_plan` does, without where to write it.
    Raises `NoUsableGpu` without nvcc."""
    path = kernels_dir() / "cuda" / source
    return _command(require_nvcc(), path, _options(defines, architecture))


def _command(nvcc: Path, path: Path, options: tuple[str, ...]) -> list[str]:
    return [str(nvcc), "-cubin", *options, *(f"-I{each}" for each in cuda_folders()), str(path)]


@functools.lru_cache(maxsize=64)
def resources(command: tuple[str, ...]) -> dict[str, Resources]:
    """The resources of each kernel of which nvcc's command makes a cubin, by its symbol, or none if
    it does not compile. The command is without where to write it."""
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


def compile_source(nvcc: Path, path: Path, options: tuple[str, ...]) -> bytes:
    """The cubin that nvcc makes of the file. Raises `KernelCompileFailed`."""
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
