"""CPU backend with the forward kernel of a user's C++ file."""

from __future__ import annotations

import ctypes

import numpy as np

from ... import settings
from ...errors import KernelFailed
from ...problem import ConvProblem
from .. import Done, NativeFunction, as_array, kernel_file
from ..kernel_file import KernelFile
from . import native
from .compiled_file import load
from .cpu_backend import CpuBackend


class FileBackend(CpuBackend):
    """The file computes the forward pass; the CPU backend computes gradients.

    Methods raise what `load` raises.
    """

    def __init__(self, file: KernelFile, gradient_precision: str = "float32") -> None:
        super().__init__(gradient_precision=gradient_precision)
        self._file = file

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return None
        reason = kernel_file.why_not(problem, load(self._file).takes_strides)
        return reason and f"kernel file {self._file.name} computes {reason}"

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        load(self._file)

    def native_function(self, problem: ConvProblem, direction: str) -> NativeFunction | None:
        if direction != "forward":
            return super().native_function(problem, direction)
        found = load(self._file)
        return NativeFunction(found.address, settings.threads(), 0, 0, self._file.name)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with the exception that the file's code threw."""
        self.require(problem, "forward")
        found = load(self._file)
        out = np.empty(problem.y_shape, np.float32) if accumulate else None
        arrays = [ctypes.c_void_p(a) for a in (x, w, None, y if out is None else out.ctypes.data)]
        call = found.library.ece408_file_forward
        if call(ctypes.byref(native.as_struct(problem)), *arrays, 0, settings.threads(), 0, 0):
            reason = kernel_file.message(found.library)
            raise KernelFailed(f"kernel file {self._file.path}: {reason} ({problem})")
        if out is not None:
            total = as_array(y, problem.y_shape)
            total += out
        return Done(self._file.name)
