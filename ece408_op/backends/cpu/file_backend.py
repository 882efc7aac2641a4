"""The CPU backend with the forward kernel of a user's C++ file."""

from __future__ import annotations

import ctypes

import numpy as np

from ... import settings
from ...errors import KernelFailed
from ...problem import ConvProblem
from .. import Done, NativeFunction
from . import kernel_file, native
from .backend import CpuBackend

_FLOATS = ctypes.POINTER(ctypes.c_float)


class FileBackend(CpuBackend):
    """Forward what the file computes; gradients as the CPU backend does.

    Methods raise what `kernel_file.load` raises.
    """

    def __init__(self, name: str) -> None:
        self._path = kernel_file.find(name)

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return None
        reason = _why_not(problem, kernel_file.load(self._path).takes_strides)
        return reason and f"kernel file {self._path.name} computes {reason}"

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        kernel_file.load(self._path)

    def native_function(self, problem: ConvProblem) -> NativeFunction:
        found = kernel_file.load(self._path)
        return NativeFunction(found.address, settings.threads(), 0, 0, found.name)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with what the file's code threw."""
        self.require(problem, "forward")
        found = kernel_file.load(self._path)
        out = np.empty(problem.y_shape, np.float32) if accumulate else None
        arrays = [ctypes.c_void_p(a) for a in (x, w, None, y if out is None else out.ctypes.data)]
        call = found.library.ece408_file_forward
        if call(ctypes.byref(native.as_struct(problem)), *arrays, 0, settings.threads(), 0, 0):
            raise KernelFailed(f"kernel file {self._path}: {found.message()} ({problem})")
        if out is not None:
            total = np.ctypeslib.as_array(ctypes.cast(y, _FLOATS), problem.y_shape)
            total += out
        return Done(found.name)


def _why_not(problem: ConvProblem, takes_strides: bool) -> str | None:
    """What the files compute, where the problem is something else."""
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    if problem.bias:
        return "no bias"
    if problem.kernel[0] != problem.kernel[1]:
        return "square kernels only"
    if problem.pad != (0, 0) or problem.dilate != (1, 1) or problem.groups != 1:
        return "no padding, dilation or groups"
    if problem.stride != (1, 1) and not (takes_strides and problem.stride[0] == problem.stride[1]):
        return "the same stride both ways only" if takes_strides else "stride 1 only"
    return None
