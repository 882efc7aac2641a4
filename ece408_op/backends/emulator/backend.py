"""The forward kernel of a user's CUDA file, run on the CPU by the emulator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import KernelFailed, NotEnoughMemory
from ...host import cores
from ...problem import ConvProblem
from .. import Backend, Done, kernel_file
from ..cpu.native import as_struct
from ..kernel_file import KernelFile
from . import compiler, findings

_TO_GPU, _FROM_GPU = 1, 2


class EmulatedFileBackend(Backend):
    """For arrays in the host's memory; on this machine's cores, all unless `threads` says how many.

    With `checked` each access to memory is checked: `findings` has what was found. With a `seed`
    threads and blocks run in an order that it gives, on one core. Constructing it runs nothing.
    """

    name = "emulator"

    def __init__(
        self, file: KernelFile, checked: bool = True, threads: int = 0, seed: int | None = None
    ) -> None:
        self._file, self._checked, self._seed = file, checked, seed
        self._threads = threads or cores.usable()

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return "the emulator runs forward kernels only"
        if self._file.form == "declared":
            return "files with a declared launch are not emulated"
        reason = kernel_file.why_not(problem, kernel_file.has_stride(self._file))
        return reason and f"kernel file {self._file.name} computes {reason}"

    def compile(self) -> None:
        """Raises what `compiler.library` raises."""
        compiler.library(self._file, self._checked)

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        self.compile()

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with what the file's code threw, or the CUDA error it left."""
        self.require(problem, "forward")
        shapes = problem.x_shape, problem.w_shape, problem.y_shape
        out = _array(y, problem.y_shape)
        found = np.empty(problem.y_shape, np.float32) if accumulate else out
        library = self._library()
        arrays = [x, w, found.ctypes.data]
        if self._file.form == "course_2020":
            self._call(library, problem, arrays)
        else:
            # Arrays on the GPU.
            sizes = [4 * int(np.prod(shape)) for shape in shapes]
            with _allocated(library, sizes) as places:
                for role in (0, 1):
                    _copy(library, places[role], arrays[role], sizes[role], _TO_GPU)
                self._call(library, problem, places)
                _copy(library, arrays[2], places[2], sizes[2], _FROM_GPU)
        if accumulate:
            out += found
        return Done(self._file.name)

    def take_findings(self) -> list[dict[str, Any]]:
        """What was found since the last call of this method, by all kernels of the file, as
        `findings.take` has it."""
        return findings.take(_load(self._file, self._checked))

    def _library(self) -> ctypes.CDLL:
        library = _load(self._file, self._checked)
        random = self._seed is not None
        seed = ctypes.c_uint64(self._seed or 0)
        library.ece408_emulator_set(self._threads, int(self._checked), int(random), seed)
        # An error that stays is the last call's.
        library.cudaDeviceReset()
        return library

    def _call(self, library: ctypes.CDLL, problem: ConvProblem, arrays: list[int]) -> None:
        seconds = (ctypes.c_double * 2)()
        addresses = [ctypes.c_void_p(each) for each in arrays]
        if library.ece408_file_forward(ctypes.byref(as_struct(problem)), *addresses, seconds):
            raise KernelFailed(
                f"kernel file {self._file.path}: {kernel_file.message(library)} ({problem})"
            )


@functools.lru_cache(maxsize=64)
def _load(file: KernelFile, checked: bool) -> ctypes.CDLL:
    return kernel_file.load(file, compiler.library(file, checked))


def _array(address: int, shape: tuple[int, ...]) -> np.ndarray:
    floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(floats, shape)


@contextmanager
def _allocated(library: ctypes.CDLL, sizes: list[int]) -> Iterator[list[int]]:
    """Arrays in the emulated GPU's memory."""
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


def _copy(library: ctypes.CDLL, to: int, from_: int, size: int, kind: int) -> None:
    places = ctypes.c_void_p(to), ctypes.c_void_p(from_)
    if library.cudaMemcpy(*places, ctypes.c_size_t(size), kind):
        # The kernel has left an error that stays; its call has raised it.
        raise KernelFailed("a copy to or from the emulated GPU fails")
