"""Emulator backends: this package's CUDA kernels, and those in users' files, on the CPU.

`findings.take` returns memory errors of all kernels in the process; `findings.located` resolves
their lines with `content`, the library that computes a problem. `counts` does the same for warps'
counters.
"""

from __future__ import annotations

import ctypes
from typing import Any, Union

import numpy as np

from ...errors import KernelFailed
from ...problem import ConvProblem
from .. import Backend, Done, as_array, kernel_file
from ..cpu.native import as_struct
from ..cuda import work
from ..cuda.cuda_backend import CudaBackend
from ..cuda.work import Work
from ..kernel_file import KernelFile
from . import emulator_compiler, findings, plans
from .library import CHECKED, FROM_GPU, TO_GPU, Emulation, allocated, begin, copy, load


class EmulatedBackend(CudaBackend):
    """Backend for kernels whose launches Python plans, on host arrays: a kernel of this package, by
    name, or of a file that declares its launch. `general_backward_...` kernels compute gradients,
    or with `precision` "strict" `general_strict_backward_...`."""

    name = "emulator"

    def __init__(
        self, kernel: str, emulation: Emulation = CHECKED, precision: str = "float32"
    ) -> None:
        super().__init__(kernel, precision, precision)
        self.emulation = emulation
        self._arguments = (kernel, emulation, precision)
        # The library for the next problem, for processes that cannot compile.
        self.given: bytes | None = None

    def gpus(self) -> list[Any]:
        return [plans.GPU]

    def _compute(self, request: Work, gpus: list[Any]) -> Done:
        if self.given:
            findings.keep()
        return plans.compute(request, self.emulation, self.given)

    def _prepare(self, problem: ConvProblem, direction: str) -> None:
        plans.prepare(self._example(problem, direction), self.emulation)

    def content(self, problem: ConvProblem) -> bytes:
        request = work.forward(problem, 0, 0, None, 0, False, self._kernel)
        return plans.content(request, self.emulation)


class EmulatedFileBackend(Backend):
    """Backend for the forward kernel of a file in a form of the course, which launches its kernels
    itself, on host arrays. The constructor runs no code of the file."""

    name = "emulator"

    def __init__(self, file: KernelFile, emulation: Emulation = CHECKED) -> None:
        self._file, self.emulation = file, emulation
        self.given: bytes | None = None

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return "it is a forward kernel"
        reason = kernel_file.why_not(problem, kernel_file.has_stride(self._file))
        return reason and f"kernel file {self._file.name} computes {reason}"

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        """Raises what `emulator_compiler.library` raises."""
        self.content(problem)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with the exception of the file's code or the CUDA error, and,
        unless the library is given, with its line."""
        self.require(problem, "forward")
        out = as_array(y, problem.y_shape)
        found = np.empty(problem.y_shape, np.float32) if accumulate else out
        content = self.given or self.content(problem)
        library = load(content)
        library.ece408_file_message.restype = ctypes.c_char_p
        library.ece408_file_fill_allocations(1)
        begin(library, self.emulation)
        if self.given:
            findings.keep()
        arrays = [x, w, found.ctypes.data]
        try:
            self._run(library, problem, arrays)
        except KernelFailed as error:
            raise error if self.given else findings.explained(error, content) from None
        if accumulate:
            out += found
        return Done(self._file.name)

    def _run(self, library: ctypes.CDLL, problem: ConvProblem, arrays: list[int]) -> None:
        """Call the file's methods, or its function on arrays in emulated GPU memory."""
        if self._file.form == "course_2020":
            self._call(library, problem, arrays)
        else:
            # Arrays in emulated GPU memory.
            shapes = problem.x_shape, problem.w_shape, problem.y_shape
            sizes = [4 * int(np.prod(shape)) for shape in shapes]
            with allocated(library, sizes) as places:
                # As the emulator fills memory that a file allocates.
                ctypes.memset(places[2], 0xFF, sizes[2])
                for role in (0, 1):
                    copy(library, places[role], arrays[role], sizes[role], TO_GPU)
                self._call(library, problem, places)
                copy(library, arrays[2], places[2], sizes[2], FROM_GPU)

    def content(self, problem: ConvProblem) -> bytes:
        return emulator_compiler.library(self._file, self.emulation.mode)

    def _call(self, library: ctypes.CDLL, problem: ConvProblem, arrays: list[int]) -> None:
        seconds = (ctypes.c_double * 2)()
        addresses = [ctypes.c_void_p(each) for each in arrays]
        if library.ece408_file_forward(ctypes.byref(as_struct(problem)), *addresses, seconds):
            raise KernelFailed(
                f"kernel file {self._file.path}: {kernel_file.message(library)} ({problem})"
            )


Emulated = Union[EmulatedBackend, EmulatedFileBackend]


def of_kernel(
    kernel: KernelFile | str, emulation: Emulation = CHECKED, precision: str = "float32"
) -> Emulated:
    """Return the backend for a CUDA file, or for the kernel of this package with this name; its
    gradients, if any, are at least as exact as `precision`."""
    if isinstance(kernel, str):
        return EmulatedBackend(kernel, emulation, precision)
    if kernel.form == "declared":
        return EmulatedBackend(str(kernel.path), emulation, precision)
    return EmulatedFileBackend(kernel, emulation)
