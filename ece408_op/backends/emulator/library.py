"""Loader of emulated libraries; the emulated GPU's memory and settings."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import KernelCompileFailed, KernelFailed, NotEnoughMemory
from ...host import cores
from . import elf, emulator_compiler

TO_GPU, FROM_GPU, ON_GPU = 1, 2, 3  # cudaMemcpyKind
# kernels/emulator/host.cpp has the same order.
MODES = ("fast", "checked", "counted")


@dataclass(frozen=True)
class Emulation:
    """How kernels run. `mode` is "checked" (checks each memory access), "counted" (counts warps'
    work per line) or "fast"; `threads` cores, all if 0; with a `seed` threads and blocks run on one
    core in a random order that it determines."""

    mode: str = "checked"
    threads: int = 0
    seed: int | None = None


CHECKED = Emulation()
# Libraries by content, without the emulator itself.
_loaded: dict[bytes, ctypes.CDLL] = {}
_lock = threading.Lock()


def load(content: bytes) -> ctypes.CDLL:
    """Load a compiled library into this process, once; its code runs from now on."""
    load_runtime()
    with _lock:
        if content not in _loaded:
            _loaded[content] = _opened(content)
            _tell_variables(_loaded[content], content)
        return _loaded[content]


def _opened(content: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(content)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = str(error).rpartition(": ")[2]
            raise KernelCompileFailed(f"the library does not load: {reason}") from None


def _tell_variables(library: ctypes.CDLL, content: bytes) -> None:
    """Tell the emulator the addresses of the library's variables, so that it detects overruns."""
    numbers = [number for variable in elf.variables(content) for number in variable]
    pairs = (ctypes.c_uint64 * len(numbers))(*numbers)
    handle = ctypes.c_void_p(library._handle)
    _loaded[b""].ece408_emulator_variables(handle, pairs, len(numbers) // 2)


def load_runtime() -> None:
    """Load the common runtime, once. Raises what `emulator_compiler.library` raises."""
    with _lock:
        if not _loaded:
            with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
                _loaded[b""] = ctypes.CDLL(str(emulator_compiler.write_runtime(Path(folder))))


def runtime() -> ctypes.CDLL | None:
    """Return the emulator's runtime, if it is loaded."""
    return _loaded.get(b"")


def begin(library: ctypes.CDLL, emulation: Emulation) -> None:
    """Prepare a library for a call: clear the error of an earlier one."""
    threads = emulation.threads or cores.usable()
    is_random = emulation.seed is not None
    seed = ctypes.c_uint64(emulation.seed or 0)
    mode = MODES.index(emulation.mode)
    library.ece408_emulator_set(threads, mode, int(is_random), seed)
    library.cudaDeviceReset()


@contextmanager
def allocated(library: ctypes.CDLL, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Allocate arrays of these sizes in emulated GPU memory. Raises `NotEnoughMemory`."""
    places: list[int] = []
    try:
        for size in sizes:
            place = ctypes.c_void_p()
            if library.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size)):
                raise NotEnoughMemory(f"the emulated GPU has no room for {size} bytes more")
            places.append(place.value or 0)
        yield places
    finally:
        for each in places:
            library.cudaFree(ctypes.c_void_p(each))


def copy(library: ctypes.CDLL, to: int, from_: int, nbytes: int, kind: int) -> None:
    """Copy memory. Raises `KernelFailed` if a kernel has left a sticky error."""
    places = ctypes.c_void_p(to), ctypes.c_void_p(from_)
    if library.cudaMemcpy(*places, ctypes.c_size_t(nbytes), kind):
        raise KernelFailed(f"a copy fails: {error_of(library)}")


def error_of(library: ctypes.CDLL) -> str:
    """Return CUDA's name of the last error, or an empty string."""
    number = library.cudaGetLastError()
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library.cudaGetErrorString(number).decode() if number else ""
