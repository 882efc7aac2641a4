"""CUDA kernels run on the CPU by the emulator: this package's own, and those in users' files.

What kernels did wrong with memory `findings.take` tells, for all of a process; `findings.located`
finds the lines by what `content` returns, the library that computes a problem. `counts` does the
same for what their warps did.
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
    """Kernels whose launches Python plans, for arrays in the host's memory: one of this package, by
    name, or one in a file that declares its launch. Gradients are `general_backward_...`'s, or with
    a `precision` of "strict" `general_strict_backward_...`'s."""

    name = "emulator"

    def __init__(
        self, kernel: str, emulation: Emulation = CHECKED, precision: str = "float32"
    ) -> None:
        super().__init__(kernel, precision, precision)
        self.emulation = emulation
        self._arguments = (kernel, emulation, precision)
        # `content` of the problem that comes next, where nothing can be compiled.
        self.given: bytes | None = None

    def gpus(self) -> list[Any]:
        return [plans.GPU]

    def _compute(self, asked: Work, gpus: list[Any]) -> Done:
        if self.given:
            findings.keep()
        return plans.compute(asked, self.emulation, self.given)

    def _prepare(self, problem: ConvProblem, direction: str) -> None:
        plans.prepare(self._example(problem, direction), self.emulation)

    def content(self, problem: ConvProblem) -> bytes:
        asked = work.forward(problem, 0, 0, None, 0, False, self._kernel)
        return plans.content(asked, self.emulation)


class EmulatedFileBackend(Backend):
    """The forward kernel of a file in a form of the course, which launches it itself; for arrays in
    the host's memory. Constructing it runs nothing."""

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
        """Raises `KernelFailed` with what the file's code threw, or the CUDA error it left, and
        unless the library is given with the line that made it."""
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
        """The file's methods, or its function with arrays on the GPU."""
        if self._file.form == "course_2020":
            self._call(library, problem, arrays)
        else:
            # Arrays on the GPU.
            shapes = problem.x_shape, problem.w_shape, problem.y_shape
            sizes = [4 * int(np.prod(shape)) for shape in shapes]
            with allocated(library, sizes) as places:
                # As memory that a file allocates.
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
    """What runs a CUDA file, or the kernel of this package that has this name; gradients, where it
    has any, are as exact as `precision` at least."""
    if isinstance(kernel, str):
        return EmulatedBackend(kernel, emulation, precision)
    if kernel.form == "declared":
        return EmulatedBackend(str(kernel.path), emulation, precision)
    return EmulatedFileBackend(kernel, emulation)
