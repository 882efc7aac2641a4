"""Compiler of CUDA files for the CPU: translation, then g++ with kernels/emulator."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ... import settings
from ...errors import (
    KernelCompileFailed,
    KernelNotSupported,
    KernelsMissing,
    NoUsableGpu,
)
from ...files.resources import cuda_folders, kernels_dir
from ...files.sealed import kept_or_compiled
from ...host import cores
from .. import kernel_file
from ..cpu.compiled_file import compiler, compiler_missing, compiler_versions
from ..cuda import cuda_file_backend
from ..cuda.kernel_plan import Defines
from ..cuda.runtime.nvcc_compiler import find_nvcc, nvcc_missing, plan_command
from ..kernel_file import KernelFile
from . import elf, translation

_COMMON = (
    "-std=gnu++17",
    "-O2",
    "-march=native",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-ftls-model=initial-exec",
    "-w",
)
# Identical functions must not be merged, nor calls at a function's end become jumps, or lines would
# be wrong; C++ allows the removal of infinite loops. Large stack frames must touch the guard page;
# each variable has its own section.
_PLAIN = (
    *("-fno-ipa-icf", "-fno-optimize-sibling-calls", "-fno-finite-loops"),
    *("-fstack-clash-protection", "-fdata-sections"),
)
_KERNELS = (
    *("-DECE408_EMULATED", "-D__CUDACC__", "-D__NVCC__", "-D__CUDA_ARCH__=900"),
    *_PLAIN,
)
# An access of the source, such as to a float4, must stay one access, and an instrumented one.
_HOOKS = (
    *("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
    *("-fno-tree-sra", "-fno-store-merging", "-fno-tree-loop-distribute-patterns"),
)
# Kinds of library. For counting warps, the code at which the lanes of a warp reconverge must follow
# the divergent code, and only once.
_MODES = {
    "fast": (),
    "checked": (*_HOOKS, "-fsanitize=bounds", "-fsanitize-recover=bounds"),
    "counted": (
        *(*_HOOKS, "-fsanitize-coverage=trace-pc", "-fno-tree-vectorize"),
        *("-fno-reorder-blocks", "-fno-reorder-blocks-and-partition", "-fno-thread-jumps"),
    ),
}
# Constant variables, which have the largest alignment, come first; others follow.
_LINK = ("-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,--sort-section=alignment")
# Host code's allocations also go through the emulator; those of kernels are in GPU memory.
_HEAP = ("malloc", "free", "_Znwm", "_Znam", "_ZdlPv", "_ZdlPvm", "_ZdaPv", "_ZdaPvm")
_WRAPPED = tuple(f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset", *_HEAP))
# The value of "-D__CUDA_ARCH__" for kernels.
_ARCHITECTURE = "90"
# The alignment of __constant__ variables in kernels/emulator/include/cuda_runtime.h.
_CONSTANT_ALIGNMENT = 1024
_MOST_CONSTANT = 64 << 10
# Files that nvcc has accepted, checked once for all macros and modes.
_taken: set[KernelFile] = set()


@functools.lru_cache(maxsize=64)
def library(file: KernelFile, mode: str) -> bytes:
    """Return the library for a file and mode ("fast", "checked" or "counted", as in
    `library.Emulation.mode`), cached by the text of the file and its headers.

    Raises `KernelCompileFailed` with file and line, `KernelNotSupported` for features that are not
    emulated, `KernelsMissing` without g++, and `CacheUnwritable`.
    """
    source = kernel_file.source_of(file)
    own = [f'-DECE408_FILE="{file.path}"', f"-I{source.parent}"]
    own += [f"-D{name}" for name in kernel_file.macros(file)]
    # kernels/files/entry.cuh defines the replacement for cudaMalloc.
    link = ["-Wl,--wrap=cudaMalloc"]
    command = cuda_file_backend.library_command(file, _ARCHITECTURE) if find_nvcc() else []
    nvcc = [*command, "-cubin"] if command else []
    return _library(file, mode, [*own, str(source)], link, nvcc)


@functools.lru_cache(maxsize=64)
def program(path: Path, mode: str = "checked") -> bytes:
    """Compile a CUDA file that launches its kernels itself and exports extern "C" functions. Raises
    what `library` raises."""
    file = KernelFile(path, "cuda", "program", path.read_text(encoding="utf-8", errors="replace"))
    return _library(file, mode, [str(path)], [])


@functools.lru_cache(maxsize=256)
def source(
    path: Path, defines: Defines, functions: tuple[str, ...], mode: str = "checked"
) -> bytes:
    """Compile a source with these macros. For each of its extern "C" `functions` the library
    exports `ece408_launch_NAME`, which takes the sizes of grid and block, the bytes of shared
    memory, and addresses of the arguments. Raises what `library` raises."""
    file = KernelFile(path, "cuda", "source", path.read_text(encoding="utf-8", errors="replace"))
    macros = [f"-D{name}={value}" for name, value in defines]
    launches = " ".join(f"ECE408_LAUNCH({each})" for each in functions)
    arguments = [f'-DECE408_SOURCE="{path}"', f"-DECE408_LAUNCHES={launches}", *macros]
    headers = [f"-I{each}" for each in cuda_folders()]
    arguments += [*headers, str(_sources() / "launches.cu")]
    is_ours = kernels_dir() in path.parents
    nvcc = [] if is_ours or not find_nvcc() else plan_command(str(path), defines, _ARCHITECTURE)
    return _library(file, mode, arguments, [], nvcc)


def _library(
    file: KernelFile,
    mode: str,
    arguments: Sequence[str],
    link: Sequence[str],
    nvcc: Sequence[str] = (),
) -> bytes:
    """Compile with g++; if a command of nvcc is given and refuses the file, the file is refused."""
    found = _gcc()
    versions = (*compiler_versions(found), _runtime(found)[0], *nvcc)
    hooks = _hooks(found, mode)
    include = f"-I{_sources() / 'include'}"
    command = [found, *_COMMON, *_KERNELS, *hooks, include, "-x", "c++", *arguments]
    build = functools.partial(_build, found, mode, link, file, nvcc)
    return kernel_file.compiled(
        file, command, versions, _folder(), compiler_missing(found), build=build
    )


def _build(
    found: str,
    mode: str,
    link: Sequence[str],
    file: KernelFile,
    nvcc: Sequence[str],
    text: str,
    run: Callable[[Sequence[str]], str],
) -> bytes:
    try:
        translated = translation.translate(text)
    except translation.Untranslated as error:
        kind = KernelNotSupported if error.is_unknown else KernelCompileFailed
        raise kind(str(error)) from None
    if nvcc and file not in _taken:
        _check_with_nvcc(file, nvcc)
        _taken.add(file)
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as name:
        folder = Path(name)
        (folder / "kernel.ii").write_text(translated, encoding="utf-8", errors="surrogateescape")
        runtime = write_runtime(folder)
        flags = [*_COMMON, *_PLAIN, *_hooks(found, mode)]
        kernel = [*flags, "-fpreprocessed", "-c", str(folder / "kernel.ii")]
        run([found, *kernel, "-o", str(folder / "kernel.o")])
        _check_constants(translated, (folder / "kernel.o").read_bytes())
        # The sanitizers' own libraries are not linked: the emulator defines their functions.
        objects = [str(folder / "kernel.o"), str(runtime)]
        made = [*kernel_file.COMPLETE, "-o", str(folder / "kernel.so")]
        run([found, *_COMMON, *_LINK, *_WRAPPED, *link, *objects, *made])
        return (folder / "kernel.so").read_bytes()


def _check_constants(text: str, compiled: bytes) -> None:
    """Raise `KernelCompileFailed`, with a line, if constant variables exceed constant memory. The
    compiled file has one section, with its alignment, per variable."""
    sizes = [size for size, alignment in elf.sections(compiled) if alignment == _CONSTANT_ALIGNMENT]
    if sum(sizes) > _MOST_CONSTANT:
        place = translation.last_place(text, f"aligned({_CONSTANT_ALIGNMENT})")
        raise KernelCompileFailed(
            f"{place}: the file's __constant__ variables up to here take {sum(sizes)} bytes; a GPU "
            f"has {_MOST_CONSTANT}"
        )


def _check_with_nvcc(file: KernelFile, command: Sequence[str]) -> None:
    """Raise the compiler's error if nvcc finds one in the file or in headers beside it, such as a
    host function called in a kernel, which g++ accepts."""
    missing = nvcc_missing(Path(command[0]))
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        own = [*command, "-Xptxas=-O0", "-o", f"{folder}/kernel.cubin"]
        try:
            kernel_file.run_compiler(own, file.path, missing)
        except NoUsableGpu:
            return
        except (KernelCompileFailed, KernelNotSupported) as error:
            # Errors in other files mean that the CUDA installation lacks something, which the
            # emulator provides.
            is_own = re.match(rf"{re.escape(str(file.path.parent))}/[^:]*:\d+: ", str(error))
            if is_own and "No such file" not in str(error):
                raise


@functools.cache
def _hooks(found: str, mode: str) -> tuple[str, ...]:
    """Return the compiler options that instrument code to call the emulator."""
    version = re.search(r"\) (\d+)\.", compiler_versions(found)[0])
    # Without it a loop that waits for another thread through a volatile variable would never end.
    knows_volatile = version is not None and int(version[1]) >= 11
    told = ("--param", "tsan-distinguish-volatile=1")
    return (*_MODES[mode], *(told if mode == "checked" and knows_volatile else ()))


def write_runtime(folder: Path) -> Path:
    """Write kernels/emulator as a library that all others need: once per process, because
    thread-local storage is scarce. Raises what `library` raises."""
    name, content = _runtime(_gcc())
    path = folder / name
    path.write_bytes(content)
    return path


@functools.lru_cache(maxsize=2)
def _runtime(found: str) -> tuple[str, bytes]:
    """Return its name, by which libraries find it among loaded ones, and its content."""
    sources = sorted(_sources().glob("*.cpp"))
    headers = sorted([*_sources().glob("*.h"), *(_sources() / "include").glob("*.h")])
    command = [found, *_COMMON]
    key = hashlib.sha256()
    for part in (*compiler_versions(found), *command, *_LINK, *map(str, sources)):
        key.update(part.encode() + b"\0")
    for path in (*sources, *headers):
        key.update(path.read_bytes() + b"\0")
    name = f"libece408-emulator-{key.hexdigest()[:24]}.so"
    run = functools.partial(
        kernel_file.run_compiler, path=sources[0], missing=compiler_missing(found)
    )

    def build() -> bytes:
        with tempfile.TemporaryDirectory(prefix="ece408-emulator-") as folder:
            # Half of the time is that of headers, which sources of one core read once.
            count = min(cores.usable(), len(sources))
            units = [Path(folder) / f"{number}.cpp" for number in range(count)]
            for number, unit in enumerate(units):
                unit.write_text("".join(f'#include "{each}"\n' for each in sources[number::count]))
            objects = [str(unit.with_suffix(".o")) for unit in units]
            each = [[*command, "-c", str(unit), "-o", o] for unit, o in zip(units, objects)]
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(run, each))
            made = Path(folder) / name
            run([*command, *_LINK, *objects, f"-Wl,-soname,{name}", "-o", str(made)])
            return made.read_bytes()

    return name, kept_or_compiled(_folder() / name, "the emulator", build)


@functools.cache
def _gcc() -> str:
    """Return g++, whose sanitizer hooks call the emulator. Raises `KernelsMissing` without it."""
    for found in (compiler(), shutil.which("g++")):
        if found is not None and "clang" not in compiler_versions(found)[0]:
            return found
    raise KernelsMissing("the emulator needs g++ (Debian, Ubuntu: apt install g++), not clang++")


def _folder() -> Path:
    return settings.cache() / "emulated-kernels"


def _sources() -> Path:
    return kernels_dir() / "emulator"
