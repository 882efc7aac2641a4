"""Worker process of a session: compiles a kernel's file, enters the sandbox, and then executes
requests, one line of JSON per call.

    python -m ece408_op.lab.worker KERNEL SCRATCH BYTES REQUESTS REPLIES ARRAYS [MODE]

KERNEL is a file, the name of a CUDA kernel of this package, or "cpu" or "cuda". BYTES is its memory
limit; the next three are descriptors. What the kernel prints goes to standard output and error.
With MODE "observed" a tool such as compute-sanitizer observes the process: arrays on the GPU are
then allocations of this process, of exactly their sizes, and not filled. With "emulated" CUDA
kernels run without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import select
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Callable, TextIO

from .. import dispatch, settings
from ..backends import Backend, kernel_file
from ..backends.cpu import compiled_file
from ..backends.cuda import cuda_file_backend, work, zero_copy
from ..backends.cuda.runtime import device
from ..backends.cuda.runtime.device import Gpu, reported
from ..backends.emulator import counts, findings
from ..backends.emulator import emulator_backend as emulator
from ..backends.emulator import library as emulator_library
from ..backends.emulator.library import Emulation
from ..backends.kernel_file import KernelFile
from ..dispatch import Layer
from ..errors import Ece408Error, UnsupportedProblem
from ..problem import ConvProblem
from . import compile_sandbox, sandbox
from .guarded_arrays import Mapped, Place

_ROLES = ("x", "w", "y")
# Waking a sleeping process takes 0.1 to 0.3 ms, which must not count as part of a call.
_AWAKE_SECONDS = 0.02
# The GPU pauses for this time before several calls, so that the host can enqueue them.
_PAUSE_US = 100
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> None:
    kernel, scratch = arguments[0], Path(arguments[1])
    memory, requests, replies, number = map(int, arguments[2:6])
    mode = arguments[6] if len(arguments) > 6 else ""
    if mode != "observed":
        # A tool may start it from a thread that ends.
        sandbox.end_with_parent()
    guarded = kernel_file.guarding(compile_sandbox.guard(scratch))
    with open(requests) as lines, open(replies, "w", buffering=1) as answers, guarded:
        try:
            worker, lacking = _prepare(kernel, scratch, memory, number, mode)
        except Ece408Error as error:
            _answer(answers, _failure(error))
            return
        _answer(answers, {"lacking": lacking})
        for line in lines:
            request = json.loads(line)
            _answer(answers, worker.answer(request))
            if "wake" in request or "method" in request:
                _stay_awake(requests)


def _prepare(
    kernel: str, scratch: Path, memory: int, number: int, mode: str
) -> tuple[_Worker, list[str]]:
    """Compile the file, while that is still possible, and isolate this process; return also the
    result of `sandbox.isolate`."""
    limits = sandbox.Limits(memory)
    if kernel == "cpu":
        return _CpuWorker(Layer(backend="cpu"), number), []
    file = kernel_file.find(kernel) if kernel_file.device_of(kernel) else None
    if mode == "emulated":
        # The parent process compiles the file.
        emulator_library.load_runtime()
        emulated = _EmulatedWorker(emulator.of_kernel(file or kernel), number)
        return emulated, sandbox.isolate(scratch, limits, Path(kernel))
    if file is not None and file.device == "cpu":
        compiled_file.library(file)
        lacking = sandbox.isolate(scratch, limits, file.path)
        return _CpuWorker(Layer(cuda_kernel=kernel), number), lacking
    observed = mode == "observed"
    gpu = device.get(settings.devices()[0])
    name = None if kernel == "cuda" else kernel
    layer = Layer(device="gpu", index=gpu.index, cuda_kernel=name)
    if file is None or file.form == "declared":
        # None of its code runs on the host, and nvcc compiles it for each layer.
        return _ObservedWorker(layer, None, number) if observed else _GpuWorker(layer, None), []
    cuda_file_backend.library(file, gpu.capability)
    if file.form == "course_2020":
        worker: _Worker = _MethodsWorker(file, gpu, number, observed)
    else:
        worker = _ObservedWorker(layer, file, number) if observed else _GpuWorker(layer, file)
    # CUDA maps all memory of the machine and the GPU, and opens many files.
    limits = dataclasses.replace(limits, memory=0, open_files=0)
    return worker, sandbox.isolate(scratch, limits, file.path, gpu=True, observed=observed)


class _Worker(ABC):
    """Computes as a network's layer would: one request describes problem and arrays, the next one
    starts the calls."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        # The prepared call for each set of arrays.
        self._calls: list[Callable[[], object]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request; return the reply."""
        try:
            if "problem" in request:
                self._problem = ConvProblem.parse(request["problem"])
                self._calls = self._prepared(request)
            elif "go" in request:
                self._go(self._calls)
            elif "idle" in request:
                self._go([])
            elif "method" in request:
                self._method(request["method"])
            elif "findings" in request:
                return {"findings": findings.take()}
            elif "counts" in request:
                return {"counts": counts.take()}
            elif "has_prolog" in request:
                return {"has_prolog": self._has_prolog()}
            elif "wake" in request and self._gpu is not None:
                _wake(self._gpu)
        except Ece408Error as error:
            return _failure(error)
        return {"done": True}

    def _go(self, calls: list[Callable[[], object]]) -> None:
        for call in calls:
            call()
        if self._gpu is not None:
            _wait_for_all(self._gpu)

    @abstractmethod
    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        """Return the calls that compute all sets of arrays in the request."""

    def _method(self, name: str) -> None:
        raise UnsupportedProblem("the file has no methods")

    def _has_prolog(self) -> bool:
        return False

    def _backend(self, layer: Layer) -> Backend:
        backend = dispatch.select(self._problem, layer, "forward")
        backend.prepare(self._problem, "forward")
        return backend


class _CpuWorker(_Worker):
    """Host arrays, in a memory file that the parent writes and reads."""

    def __init__(self, layer: Layer, number: int, gpu: Gpu | None = None) -> None:
        super().__init__(gpu)
        self._layer = layer
        self._mapping = _Mapping(number)

    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        x, w, y = self._mapping.addresses(request)
        forward = self._backend(self._layer).forward
        return [functools.partial(forward, self._problem, x, w, None, y, False)]


class _EmulatedWorker(_CpuWorker):
    """A CUDA kernel in the emulator, which keeps findings and counts until they are requested."""

    def __init__(self, emulated: emulator.Emulated, number: int) -> None:
        super().__init__(Layer(), number)
        self._emulated = emulated

    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        self._emulated.given = Path(request["library"]).read_bytes()
        self._emulated.emulation = Emulation(*request["emulation"])
        return super()._prepared(request)

    def _backend(self, layer: Layer) -> Backend:
        return self._emulated


class _Mapping:
    """Host arrays, in a memory file that the parent writes and reads."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.mapped: list[Mapped] = []

    def addresses(self, request: dict[str, Any]) -> list[int]:
        """Return the addresses of x, w and y for a request."""
        for each in self.mapped:
            each.close()
        self.mapped = []
        for role, (offset, nbytes) in zip(_ROLES, request["places"]):
            place = Place(offset, nbytes)
            self.mapped.append(Mapped(self._number, place, role != "y", request["margins"]))
        return [each.address for each in self.mapped]


class _GpuWorker(_Worker):
    """GPU arrays, in the parent's memory."""

    _gpu: Gpu

    def __init__(self, layer: Layer, file: KernelFile | None) -> None:
        super().__init__(device.get(layer.index))
        self._layer = layer
        # A file that launches its kernels itself.
        self._file = file
        self._opened = _Opened(self._gpu)
        self._ready = contextlib.ExitStack()
        # Pause before several calls, if the host launches them one by one.
        self._pause: Callable[[], object] = _nothing

    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        if self._file is not None:
            cuda_file_backend.fill_allocations(self._file, self._gpu, request["fills"])
        return self._gpu_calls(self._opened.sets(request))

    def _go(self, calls: list[Callable[[], object]]) -> None:
        self._pause()
        super()._go(calls)

    def _gpu_calls(self, sets: list[list[int]]) -> list[Callable[[], object]]:
        """Return calls that compute all sets of arrays on the GPU."""
        self._ready.close()
        self._pause = _nothing
        if self._file is not None:
            self._backend(self._layer)
            return [_calls_of_file(self._file, self._gpu, self._problem, sets)]
        forward = work.forward(self._problem, 0, 0, None, 0, False, self._layer.cuda_kernel)
        run = self._ready.enter_context(zero_copy.ready(forward, self._gpu))
        if len(sets) > 1:
            self._pause = functools.partial(run.hold, _PAUSE_US * len(sets))
            # This compiles it.
            run.hold(0)
        return [functools.partial(run.begin, dict(zip(_ROLES, each))) for each in sets]


class _ObservedWorker(_GpuWorker):
    """Host arrays, copied to allocations of exactly their sizes."""

    def __init__(self, layer: Layer, file: KernelFile | None, number: int) -> None:
        super().__init__(layer, file)
        self._mapping = _Mapping(number)

    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        self._mapping.addresses(request)
        return [self._copied]

    def _copied(self) -> None:
        arrays = [each.buffer() for each in self._mapping.mapped]
        with self._gpu.active(), reported("a copy"):
            blocks = [self._gpu.cuda.mem_alloc(len(each)) for each in arrays]
            for block, array in zip(blocks[:2], arrays):
                self._gpu.cuda.memcpy_htod(block, array)
        super()._go(self._gpu_calls([[int(each) for each in blocks]]))
        with self._gpu.active(), reported("a copy"):
            self._gpu.cuda.memcpy_dtoh(arrays[2], blocks[2])
            for block in blocks:
                block.free()


class _MethodsWorker(_CpuWorker):
    """A course file since 2020: host arrays, copied by methods of the file, which can be called
    separately; the computing one can also take arrays on the GPU."""

    _gpu: Gpu

    def __init__(self, file: KernelFile, gpu: Gpu, number: int, observed: bool) -> None:
        super().__init__(Layer(backend="cuda", cuda_kernel=str(file.path)), number, gpu)
        self._file = file
        self._opened = _Opened(gpu)
        self._observed = observed

    def _prepared(self, request: dict[str, Any]) -> list[Callable[[], object]]:
        fills = request["fills"] and not self._observed
        cuda_file_backend.fill_allocations(self._file, self._gpu, fills)
        if "memory" in request:
            sets = self._opened.sets(request)
            return [_calls_of_file(self._file, self._gpu, self._problem, sets)]
        return super()._prepared(request)

    def _method(self, name: str) -> None:
        arrays = [each.address for each in self._mapping.mapped]
        self._call(name, *(arrays if name == "prolog" else (0, 0, 0)))
        _wait_for_all(self._gpu)

    def _has_prolog(self) -> bool:
        return cuda_file_backend.has_prolog(self._file, self._gpu.capability)

    def _call(self, name: str, x: int, w: int, y: int) -> None:
        with self._gpu.active():
            cuda_file_backend.call_method(self._file, self._gpu, self._problem, name, x, w, y)


class _Opened:
    """The parent's GPU memory, opened once as long as it stays the same."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._memory = ""
        self._handle: Any = None

    def sets(self, request: dict[str, Any]) -> list[list[int]]:
        """Return the addresses of x, w and y for each set in a request."""
        with self._gpu.active(), reported("opening another process's memory on the GPU"):
            if self._handle is not None and self._memory != request["memory"]:
                self._handle.close()
                self._handle = None
            if self._handle is None:
                self._memory = request["memory"]
                handle = bytearray.fromhex(self._memory)
                self._handle = self._gpu.cuda.IPCMemoryHandle(handle)
        begin = int(self._handle)
        return [[begin + offset for offset in each] for each in request["sets"]]


def _calls_of_file(
    file: KernelFile, gpu: Gpu, problem: ConvProblem, sets: list[list[int]]
) -> Callable[[], object]:
    """Return a call that makes a file with its own launches compute all sets of arrays on the
    GPU."""

    def call() -> None:
        with gpu.active():
            cuda_file_backend.call_each(file, gpu, problem, sets)

    return call


def _nothing() -> None:
    pass


def _stay_awake(requests: int) -> None:
    """Busy-wait for the next request, for a limited time."""
    end = time.monotonic() + _AWAKE_SECONDS
    while not select.select([requests], [], [], 0)[0] and time.monotonic() < end:
        pass


def _wait_for_all(gpu: Gpu) -> None:
    """Wait for all work of this process on the GPU, on all streams."""
    with gpu.active(), reported("a kernel"):
        gpu.cuda.Context.synchronize()


def _wake(gpu: Gpu) -> None:
    """Make the GPU do something for this process."""
    with gpu.active(), gpu.lane(4) as lane, reported("a kernel"):
        gpu.cuda.memset_d32(lane.device, 0, 1)
        gpu.cuda.Context.synchronize()


def _failure(error: Ece408Error) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    # Flush the kernel's output before the answer.
    _libc.fflush(None)
    answers.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
