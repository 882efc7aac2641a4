"""A CPU kernel in a user's C++ file: compiled by a C++ compiler, kept, loaded.

Two forms of the course, unchanged: new-forward.h, to 2019, defines mxnet::op::forward of three
tensors; cpu-new-forward.cc, from 2020 on, conv_forward_cpu of three pointers.
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

# For the processor at hand: what is kept of one machine is compiled again on another.
_OPTIONS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-w")


@dataclass(frozen=True)
class CompiledFile:
    """A compiled file: its `forward`, as the header kernels/files/entry.h has it."""

    library: ctypes.CDLL

    @property
    def address(self) -> int:
        """Where its forward function is."""
        found = ctypes.cast(self.library.ece408_file_forward, ctypes.c_void_p)
        return found.value or 0

    @property
    def takes_strides(self) -> bool:
        return bool(self.library.ece408_file_takes_strides())


@functools.lru_cache(maxsize=64)
def load(file: KernelFile) -> CompiledFile:
    """The file's kernel. Raises what `library` raises."""
    return CompiledFile(kernel_file.load(file, library(file)))


@functools.lru_cache(maxsize=64)
def library(file: KernelFile) -> bytes:
    """What the file is compiled to, once for each text of the file and of its headers.

    Raises `KernelCompileFailed` with file and line, `KernelsMissing` without a C++ compiler, and
    `CacheUnwritable`.
    """
    found = compiler()
    made = (_command(found, file), compiler_versions(found), settings.cache() / "cpu-kernels")
    return kernel_file.compiled(file, *made, compiler_missing(found))


def compiler() -> str:
    """The C++ compiler: CXX, or what there is. Raises `KernelsMissing`."""
    asked = shlex.split(os.environ.get("CXX", ""))[:1]
    for name in asked or ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise KernelsMissing(
        f"no C++ compiler ({' '.join(asked) or 'g++, clang++, c++'}) to compile a kernel file "
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
    """What the compiler says of itself, and of the processor that -march=native means.

    Raises `KernelsMissing` if it does not run.
    """
    options = (["--version"], ["-march=native", "-Q", "--help=target"])
    # Its text fits the terminal and speaks the user's language; it is a key of what is kept.
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
