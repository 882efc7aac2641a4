"""CUDA backend for a user's file in one of the course's forms.

Such a file launches its kernels itself: new-forward.cuh, until 2019, on arrays on the GPU;
new-forward.cu, since 2020, on host arrays. nvcc compiles it to a shared library.
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
    """Common part of both file backends; the other base class computes the gradients."""

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
    """The backend for host arrays, on the first GPU in `settings.devices`."""

    def __init__(self, file: KernelFile, gradient_precision: str = "float32") -> None:
        super().__init__(gradient_precision=gradient_precision)
        self._file = file
        self._arguments = (file, gradient_precision)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Raises `KernelFailed` with the exception of the file's code or the CUDA error."""
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
    """The backend for arrays in the memory of GPU number `index`."""

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
        """Raises `KernelFailed`, and `UnsupportedProblem` if the result is to be added to y."""
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
    """Compile the file to a library for a GPU. Raises what `kernel_file.compiled` raises, and
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
    """Return nvcc's command that makes the library for an architecture such as "90", without the
    output option. Raises `NoUsableGpu` without nvcc."""
    source = kernel_file.source_of(file)
    # nvcc treats an unescaped comma as a separator of values.
    defines = [f'-DECE408_FILE="{file.path}"'.replace(",", "\\,")]
    defines += [f"-D{name}" for name in kernel_file.macros(file)]
    nvcc = str(require_nvcc())
    return [nvcc, *LIBRARY_OPTIONS, gencode(name), *defines, f"-I{source.parent}", str(source)]


@contextmanager
def _on_gpu(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, x: int, w: int, y: np.ndarray
) -> Iterator[tuple[int, int, int]]:
    """Provide x, w and y at addresses of the kind that the file's form expects; copy y back at the
    end."""
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
    """Round up to 256 bytes, the alignment of cudaMalloc."""
    return -(-nbytes // 256) * 256


def _call(file: KernelFile, gpu: Gpu, problem: ConvProblem, x: int, w: int, y: int) -> _Seconds:
    """Compute y; the GPU must be active. Raises `KernelFailed`."""
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
    """Call the file's kernels on each set of x, w and y on the GPU, in order; in form course_2020
    this calls conv_forward_gpu. The GPU must be active. Raises `KernelFailed`."""
    library = _load(file, gpu.capability)
    addresses = [address for each in sets for address in each]
    arrays = (ctypes.c_void_p * len(addresses))(*addresses)
    if library.ece408_file_call_each(ctypes.byref(as_struct(problem)), arrays, len(sets)):
        raise _failed(file, library, problem)


def has_prolog(file: KernelFile, capability: Capability) -> bool:
    """Return whether a file of form course_2020 has separate copy methods (prolog and epilog).
    Files of fall 2020 have only conv_forward_gpu, on host arrays. Loads the file's code."""
    return bool(_load(file, capability).ece408_file_has_prolog())


def call_method(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, name: str, x: int, w: int, y: int
) -> None:
    """Call one method of a file of form course_2020: "prolog", which starts a call with these host
    arrays; "compute", on the file's own arrays on the GPU; or "epilog". The GPU must be active.
    Raises `KernelFailed`."""
    library = _load(file, gpu.capability)
    addresses = [ctypes.c_void_p(address) for address in (x, w, y)]
    function = library.ece408_file_method
    if function(name.encode(), ctypes.byref(as_struct(problem)), *addresses):
        raise _failed(file, library, problem)


def fill_allocations(file: KernelFile, gpu: Gpu, fills: bool) -> None:
    """Fill the file's later allocations on the GPU with NaN, or stop doing so. Filling takes
    time."""
    _load(file, gpu.capability).ece408_file_fill_allocations(int(fills))


def _failed(file: KernelFile, library: ctypes.CDLL, problem: ConvProblem) -> KernelFailed:
    return KernelFailed(
        f"kernel file {file.path}: {kernel_file.message(library)} ({problem}){RESTART}"
    )
