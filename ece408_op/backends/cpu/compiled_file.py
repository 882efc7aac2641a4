"""CPU kernels in users' C++ files: compiled by a C++ compiler, cached and loaded.

Two unchanged forms of the course: new-forward.h, until 2019, defines mxnet::op::forward of three
tensors; cpu-new-forward.cc, since 2020, conv_forward_cpu of three pointers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from ... import settings
from ...errors import KernelsMissing
from .. import kernel_file
from ..kernel_file import KernelFile, source_of

# For this machine's processor: another machine compiles again.
_OPTIONS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-w")


@dataclass(frozen=True)
class CompiledFile:
    """A compiled file; its `forward` is declared in kernels/files/entry.h."""

    library: ctypes.CDLL

    @property
    def address(self) -> int:
        """Address of its forward function."""
        found = ctypes.cast(self.library.ece408_file_forward, ctypes.c_void_p)
        return found.value or 0

    @property
    def takes_strides(self) -> bool:
        return bool(self.library.ece408_file_takes_strides())


@functools.lru_cache(maxsize=64)
def load(file: KernelFile) -> CompiledFile:
    """Return the file's kernel. Raises what `library` raises."""
    return CompiledFile(kernel_file.load(file, library(file)))


@functools.lru_cache(maxsize=64)
def library(file: KernelFile) -> bytes:
    """Compile the file to a library, cached by its text and its headers.

    Raises `KernelCompileFailed` with file and line, `KernelsMissing` without a C++ compiler, and
    `CacheUnwritable`.
    """
    found = compiler()
    made = (_command(found, file), compiler_versions(found), settings.cache() / "cpu-kernels")
    return kernel_file.compiled(file, *made, compiler_missing(found))


def compiler() -> str:
    """Return the C++ compiler: CXX, or the first one found. Raises `KernelsMissing`."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    for name in named or ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise KernelsMissing(
        f"no C++ compiler ({' '.join(named) or 'g++, clang++, c++'}) to compile a kernel file "
        "with; install g++ (Debian, Ubuntu: apt install g++) or set CXX"
    )


def _command(compiler: str, file: KernelFile) -> list[str]:
    source = source_of(file)
    sources = [str(source)]
    if file.form == "course_2019":
        own = [f'-DECE408_FILE="{file.path}"']
    else:
        own = []
        sources.append(str(file.path))
    return [compiler, *_OPTIONS, *own, f"-I{source.parent}", "-x", "c++", *sources]


@functools.cache
def compiler_versions(compiler: str) -> tuple[str, ...]:
    """Return the compiler's version, and the processor options that -march=native implies.

    Raises `KernelsMissing` if it does not run.
    """
    options = (["--version"], ["-march=native", "-Q", "--help=target"])
    # The output depends on terminal width and language, and is part of the cache key.
    environment = {**os.environ, "COLUMNS": "80", "LC_ALL": "C"}
    try:
        return tuple(
            subprocess.run(
                [compiler, *each],
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
            ).stdout
            for each in options
        )
    except OSError:
        raise compiler_missing(compiler) from None


def compiler_missing(compiler: str) -> KernelsMissing:
    return KernelsMissing(f"the C++ compiler {compiler} does not run; set CXX")
