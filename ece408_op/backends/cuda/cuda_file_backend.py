"""The CUDA backend with the forward kernel of a user's file in a form of the course.

Such a file launches its kernels itself: new-forward.cuh, to 2019, from arrays on the GPU;
new-forward.cu, from 2020 on, from arrays on the host. It is compiled to a library by nvcc.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ...errors import KernelFailed, UnsupportedProblem
from ...op_log import GpuTime
from ...problem import ConvProblem
from .. import Done, as_array, kernel_file
from ..cpu.native import as_struct
from ..kernel_file import KernelFile
from .cuda_backend import CudaBackend, StagedBackend, ZeroCopyBackend
from .kernel_plan import ARCHITECTURES, Capability, architecture
from .runtime.device import RESTART, Gpu, reported
from .runtime.launcher import cache_folder
from .runtime.nvcc_compiler import (
    LIBRARY_OPTIONS,
    gencode,
    nvcc_missing,
    nvcc_version,
    require_nvcc,
)


class _Seconds(ctypes.Structure):
    """`ece408_file_seconds` of kernels/files/entry.cuh."""

    _fields_ = [("kernels", ctypes.c_double), ("around", ctypes.c_double)]


class _FileBackend(CudaBackend):
    """What both ways in have in common; gradients are the other base class's."""

    _file: KernelFile

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return None
        reason = kernel_file.why_not(problem, kernel_file.has_stride(self._file))
        return reason and f"kernel file {self._file.name} computes {reason}"

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        if direction == "forward":
            _load(self._file, self.gpus()[0].capability)
        else:
            super().prepare(problem, direction)


class StagedFileBackend(_FileBackend, StagedBackend):
    """For arrays in the host's memory, on the first of the GPUs that `settings.devices` names."""

    def __init__(self, file: KernelFile, gradient_precision: str = "float32") -> None:
        super().__init__(gradient_precision=gradient_precision)
        self._file = file
        self._arguments = (file, gradient_precision)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with what the file's code threw, or the CUDA error it left."""
        self.require(problem, "forward")
        gpu = self.gpus()[0]
        out = as_array(y, problem.y_shape)
        found = np.empty(problem.y_shape, np.float32) if accumulate else out
        with gpu.active(), _on_gpu(self._file, gpu, problem, x, w, found) as arrays:
            seconds = _call(self._file, gpu, problem, *arrays)
        if accumulate:
            out += found
        time = GpuTime(kernel_seconds=seconds.kernels, copy_seconds=seconds.around)
        return Done(self._file.name, gpu=time)


class ZeroCopyFileBackend(_FileBackend, ZeroCopyBackend):
    """For arrays in the memory of the GPU of this number."""

    def __init__(self, index: int, file: KernelFile, gradient_precision: str = "float32") -> None:
        super().__init__(index, gradient_precision=gradient_precision)
        self._file = file
        self._arguments = (index, file, gradient_precision)

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction == "forward" and self._file.form == "course_2020":
            return f"kernel file {self._file.name} takes arrays on the host; use mx.cpu()"
        return super().supports(problem, direction)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed`, and `UnsupportedProblem` where it is to add to y."""
        self.require(problem, "forward")
        if accumulate:
            raise UnsupportedProblem(
                f"kernel file {self._file.name} cannot add to what its output holds; use grad_req "
                "'write' for whatever needs this sum"
            )
        (gpu,) = self.gpus()
        with gpu.active():
            seconds = _call(self._file, gpu, problem, x, w, y)
        return Done(self._file.name, gpu=GpuTime(kernel_seconds=seconds.kernels))


@functools.lru_cache(maxsize=64)
def _load(file: KernelFile, capability: Capability) -> ctypes.CDLL:
    return kernel_file.load(file, library(file, capability))


@functools.lru_cache(maxsize=64)
def library(file: KernelFile, capability: Capability) -> bytes:
    """What the file is compiled to for a GPU. Raises what `kernel_file.compiled` raises, and
    `NoUsableGpu`."""
    nvcc = require_nvcc()
    name = architecture(ARCHITECTURES, capability)
    if name is None:
        raise UnsupportedProblem(
            f"kernel file {file.name} cannot be compiled for compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    command = library_command(file, name)
    made = (command, (nvcc_version(nvcc),), cache_folder())
    return kernel_file.compiled(file, *made, nvcc_missing(nvcc))


def library_command(file: KernelFile, name: str) -> list[str]:
    """nvcc's command that makes the library for an architecture such as "90", but for its output.
    Raises `NoUsableGpu` without nvcc."""
    source = kernel_file.source_of(file)
    # To nvcc a bare comma separates values.
    defines = [f'-DECE408_FILE="{file.path}"'.replace(",", "\\,")]
    defines += [f"-D{name}" for name in kernel_file.macros(file)]
    nvcc = str(require_nvcc())
    return [nvcc, *LIBRARY_OPTIONS, gencode(name), *defines, f"-I{source.parent}", str(source)]


@contextmanager
def _on_gpu(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, x: int, w: int, y: np.ndarray
) -> Iterator[tuple[int, int, int]]:
    """Addresses of x, w and y where the file's form wants them; y is copied back at the end."""
    if file.form == "course_2020":
        yield x, w, y.ctypes.data
        return
    inputs = [as_array(x, problem.x_shape), as_array(w, problem.w_shape)]
    sizes = [_aligned(array.nbytes) for array in inputs]
    with gpu.lane(sum(sizes) + y.nbytes) as lane:
        places = [lane.device, lane.device + sizes[0], lane.device + sum(sizes)]
        for place, array in zip(places, inputs):
            with reported("a copy to the GPU"):
                gpu.cuda.memcpy_htod(place, array)
        yield places[0], places[1], places[2]
        with reported("a copy from the GPU"):
            gpu.cuda.memcpy_dtoh(y, places[2])


def _aligned(nbytes: int) -> int:
    """As much memory as cudaMalloc would take: every array begins at a multiple of 256 bytes."""
    return -(-nbytes // 256) * 256


def _call(file: KernelFile, gpu: Gpu, problem: ConvProblem, x: int, w: int, y: int) -> _Seconds:
    """Compute y; the GPU is active. Raises `KernelFailed`."""
    library = _load(file, gpu.capability)
    seconds = _Seconds()
    arrays = [ctypes.c_void_p(address) for address in (x, w, y)]
    function = library.ece408_file_forward
    if function(ctypes.byref(as_struct(problem)), *arrays, ctypes.byref(seconds)):
        raise _failed(file, library, problem)
    return seconds


def call_each(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, sets: Sequence[Sequence[int]]
) -> None:
    """Have the file's kernels compute each set of x, w and y on the GPU, one after the other; of a
    file of form course_2020 that is conv_forward_gpu. The GPU is active. Raises `KernelFailed`."""
    library = _load(file, gpu.capability)
    addresses = [address for each in sets for address in each]
    arrays = (ctypes.c_void_p * len(addresses))(*addresses)
    if library.ece408_file_call_each(ctypes.byref(as_struct(problem)), arrays, len(sets)):
        raise _failed(file, library, problem)


def has_prolog(file: KernelFile, capability: Capability) -> bool:
    """Whether a file of form course_2020 copies in methods of their own; fall 2020's have
    conv_forward_gpu alone, for arrays on the host. Loads the file's code."""
    return bool(_load(file, capability).ece408_file_has_prolog())


def call_method(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, name: str, x: int, w: int, y: int
) -> None:
    """Call one method of a file of form course_2020: "prolog", which begins a call with these
    arrays on the host; "compute", on the file's own arrays on the GPU; or "epilog". The GPU is
    active. Raises `KernelFailed`.
    """
    library = _load(file, gpu.capability)
    addresses = [ctypes.c_void_p(address) for address in (x, w, y)]
    function = library.ece408_file_method
    if function(name.encode(), ctypes.byref(as_struct(problem)), *addresses):
        raise _failed(file, library, problem)


def fill_allocations(file: KernelFile, gpu: Gpu, fills: bool) -> None:
    """Have what the file's code allocates on the GPU from here on be filled with NaN, or left as it
    is. Filling takes time."""
    _load(file, gpu.capability).ece408_file_fill_allocations(int(fills))


def _failed(file: KernelFile, library: ctypes.CDLL, problem: ConvProblem) -> KernelFailed:
    return KernelFailed(
        f"kernel file {file.path}: {kernel_file.message(library)} ({problem}){RESTART}"
    )
