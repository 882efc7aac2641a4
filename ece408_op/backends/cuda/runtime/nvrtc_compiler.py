"""Compilation of this package's CUDA sources by NVRTC, CUDA's compiler as a library. It takes half
of nvcc's time, which runs other programs and compiles for the host, too."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....errors import KernelCompileFailed, NoUsableGpu
from ....files.resources import cuda_folders
from ....host.gpu import Nvrtc
from ...kernel_file import first_error
from ..kernel_plan import Defines

# Functions and lambdas without a mark are the GPU's. C's headers, which have INFINITY, are missing.
OPTIONS = ("-std=c++17", "-default-device", "-DINFINITY=__int_as_float(0x7f800000)")
_STDINT = b"""
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
"""


def version(library: Path) -> str:
    """Return the version, as text. Raises `NoUsableGpu` if the library cannot be loaded."""
    numbers = ctypes.c_int(), ctypes.c_int()
    _check(_loaded(library), "nvrtcVersion", *map(ctypes.byref, numbers))
    return f"NVRTC {numbers[0].value}.{numbers[1].value}"


def options(defines: Defines, architecture: str) -> tuple[str, ...]:
    """Return NVRTC's options for a source with these macros."""
    macros = (f"-D{name}={value}" for name, value in defines)
    return (*OPTIONS, f"-arch=sm_{architecture}", *macros)


def compile_source(nvrtc: Nvrtc, path: Path, options: Sequence[str]) -> bytes:
    """Compile the file to a cubin. Raises `KernelCompileFailed`, and `NoUsableGpu` if NVRTC does
    not run."""
    library, program = _loaded(nvrtc.library), ctypes.c_void_p()
    texts, names = (ctypes.c_char_p * 1)(_STDINT), (ctypes.c_char_p * 1)(b"stdint.h")
    given = path.read_bytes(), os.fsencode(path), 1, texts, names
    _check(library, "nvrtcCreateProgram", ctypes.byref(program), *given)
    try:
        folders = [f"-I{each}" for each in (*cuda_folders(), nvrtc.headers)]
        every = list(map(os.fsencode, (*options, *folders)))
        status = library.nvrtcCompileProgram(
            program, len(every), (ctypes.c_char_p * len(every))(*every)
        )
        if status == 0:
            return _text(library, "CUBIN", program)
        log = _text(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    raise KernelCompileFailed(
        f"{first_error(log, path)} (result {status} of NVRTC, {nvrtc.library}, with: "
        f"{shlex.join(options)})"
    )


@functools.cache
def _loaded(library: Path) -> Any:
    try:
        # NVRTC 13.0 of PyPI does not look into its own folder for this library.
        for part in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part))
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoUsableGpu(f"{library} cannot be loaded ({error}); reinstall CUDA") from error


def _text(library: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _check(library, f"nvrtcGet{what}", program, text)
    return text.raw


def _check(library: Any, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status != 0:
        raise NoUsableGpu(f"{function} of NVRTC fails with {status}; reinstall CUDA")
