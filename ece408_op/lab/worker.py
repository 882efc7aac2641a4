"""The process that runs a kernel: compiles its file, gives up what a kernel has no need of, and
then does what it is asked to, a line of JSON for each call.

    python -m ece408_op.lab.worker KERNEL SCRATCH BYTES REQUESTS REPLIES ARRAYS

KERNEL is a file, the name of a CUDA kernel of this package, or "cpu" or "cuda". BYTES is the most
memory that it may take, the last three are descriptors. What the kernel prints goes to standard
output and error.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Callable, TextIO

from .. import dispatch, settings
from ..backends import kernel_file
from ..backends.cpu import compiled_file
from ..backends.cuda import file_backend, work, zero_copy
from ..backends.cuda.runtime import device
from ..backends.cuda.runtime.device import Gpu, reported
from ..backends.kernel_file import KernelFile
from ..dispatch import Layer
from ..errors import Ece408Error, UnsupportedProblem
from ..problem import ConvProblem
from . import sandbox
from .arrays import CANARY, Mapped, Place

_ROLES = ("x", "w", "y")
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> None:
    kernel, scratch = arguments[0], Path(arguments[1])
    memory, requests, replies, number = map(int, arguments[2:])
    with open(requests) as lines, open(replies, "w", buffering=1) as answers:
        try:
            worker, lacking = _prepare(kernel, scratch, memory, number)
        except Ece408Error as error:
            _answer(answers, _failure(error))
            return
        _answer(answers, {"lacking": lacking})
        for line in lines:
            _answer(answers, worker.answer(json.loads(line)))


def _prepare(kernel: str, scratch: Path, memory: int, number: int) -> tuple[_Worker, list[str]]:
    """Compile the file, while that is still possible, and isolate this process; returns what
    `sandbox.isolate` returns, too."""
    limits = sandbox.Limits(memory)
    if kernel == "cpu":
        return _CpuWorker(Layer(backend="cpu"), number), []
    file = kernel_file.find(kernel) if kernel_file.device_of(kernel) else None
    if file is not None and file.device == "cpu":
        compiled_file.library(file)
        return _CpuWorker(Layer(cuda_kernel=kernel), number), sandbox.isolate(scratch, limits)
    gpu = device.get(settings.devices()[0])
    name = None if kernel == "cuda" else kernel
    launches_itself = file is not None and file.form != "declared"
    layer = Layer(device="gpu", index=gpu.index, cuda_kernel=name)
    worker: _Worker = _GpuWorker(layer, launches_itself)
    if file is None or not launches_itself:
        # Nothing of it runs on the host, and nvcc compiles it for each layer.
        return worker, []
    file_backend.library(file, gpu.capability)
    if file.form == "course_2020":
        worker = _MethodsWorker(file, gpu, number)
    # CUDA maps all of the machine's memory and the GPU's.
    limits = dataclasses.replace(limits, memory=0)
    return worker, sandbox.isolate(scratch, limits, sockets=True)


class _Worker(ABC):
    """Computes as a layer of a network would: a request gives problem and arrays, the next one
    has the call made."""

    _layer: Layer
    _gpu: Gpu | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for; what to reply."""
        try:
            if "problem" in request:
                self._problem = ConvProblem.parse(request["problem"])
                self._arrays = self._open(request)
                self._set_up()
            elif "go" in request:
                self._go()
            elif "method" in request:
                return {"done": True, "arrays": self._method(request["method"])}
            elif "wake" in request and self._gpu is not None:
                _wake(self._gpu)
        except Ece408Error as error:
            return _failure(error)
        return {"done": True}

    @abstractmethod
    def _open(self, request: dict[str, Any]) -> list[int]:
        """Addresses of x, w and y."""

    def _set_up(self) -> None:
        """Have `_run` be all that is left to do."""
        backend = dispatch.select(self._problem, self._layer, "forward")
        backend.prepare(self._problem, "forward")
        x, w, y = self._arrays
        self._run: Callable[[], object] = functools.partial(
            backend.forward, self._problem, x, w, None, y, False
        )

    def _go(self) -> None:
        self._run()
        if self._gpu is not None:
            _wait_for_all(self._gpu)

    def _method(self, name: str) -> list[Any]:
        raise UnsupportedProblem("the file has no methods")


class _CpuWorker(_Worker):
    """Arrays on the host, in a file that another process writes and reads."""

    def __init__(self, layer: Layer, number: int) -> None:
        self._layer = layer
        self._number = number
        self._mapped: list[Mapped] = []

    def _open(self, request: dict[str, Any]) -> list[int]:
        for each in self._mapped:
            each.close()
        self._mapped = []
        for role, (offset, nbytes) in zip(_ROLES, request["places"]):
            place = Place(offset, nbytes)
            self._mapped.append(Mapped(self._number, place, role != "y", request["margins"]))
        return [each.address for each in self._mapped]


class _GpuWorker(_Worker):
    """Arrays on the GPU, in another process's memory."""

    _gpu: Gpu

    def __init__(self, layer: Layer, launches_itself: bool) -> None:
        self._layer = layer
        self._launches_itself = launches_itself
        self._gpu = device.get(layer.index)
        self._opened: tuple[str, Any] | None = None
        self._ready = contextlib.ExitStack()

    def _set_up(self) -> None:
        self._ready.close()
        super()._set_up()
        if self._launches_itself:
            return
        x, w, y = self._arrays
        asked = work.forward(self._problem, x, w, None, y, False, self._layer.cuda_kernel)
        self._run = self._ready.enter_context(zero_copy.ready(asked, self._gpu))

    def _open(self, request: dict[str, Any]) -> list[int]:
        memory = request["memory"]
        with self._gpu.active(), reported("opening another process's memory on the GPU"):
            if self._opened is not None and self._opened[0] != memory:
                self._opened[1].close()
                self._opened = None
            if self._opened is None:
                handle = self._gpu.cuda.IPCMemoryHandle(bytearray.fromhex(memory))
                self._opened = (memory, handle)
        return [int(self._opened[1]) + offset for offset in request["offsets"]]


class _MethodsWorker(_CpuWorker):
    """A file of the course from 2020 on: arrays on the host, copied by methods of the file's own,
    which can be called one by one."""

    _gpu: Gpu

    def __init__(self, file: KernelFile, gpu: Gpu, number: int) -> None:
        super().__init__(Layer(backend="cuda", cuda_kernel=str(file.path)), number)
        self._file, self._gpu = file, gpu

    def _set_up(self) -> None:
        super()._set_up()
        shapes = (self._problem.x_shape, self._problem.w_shape, self._problem.y_shape)
        _poison(self._gpu, [4 * math.prod(shape) for shape in shapes])

    def _method(self, name: str) -> list[Any]:
        with self._gpu.active():
            addresses = file_backend.call_method(
                self._file, self._gpu, self._problem, name, *self._arrays
            )
            _wait_for_all(self._gpu)
            return [self._shared(address) for address in addresses if name == "prolog"]

    def _shared(self, address: int) -> tuple[str, int] | None:
        """How another process opens memory of the file's, if that is possible."""
        cuda = self._gpu.cuda
        with contextlib.suppress(cuda.Error):
            begin, _ = cuda.mem_get_address_range(address)
            handle = bytes(cuda.mem_get_ipc_handle(int(begin)))
            return handle.hex(), address - int(begin)
        return None


def _wait_for_all(gpu: Gpu) -> None:
    """Wait for all work of this process on the GPU, on whichever stream."""
    with gpu.active(), reported("a kernel"):
        gpu.cuda.Context.synchronize()


def _wake(gpu: Gpu) -> None:
    """Have the GPU do something for this process."""
    with gpu.active(), gpu.lane(4) as lane, reported("a kernel"):
        gpu.cuda.memset_d32(lane.device, 0, 1)
        gpu.cuda.Context.synchronize()


def _poison(gpu: Gpu, sizes: list[int]) -> None:
    """Leave NaN in memory that the next allocations of these sizes are likely to get."""
    with gpu.active(), contextlib.suppress(gpu.cuda.Error):
        blocks = [gpu.cuda.mem_alloc(size) for size in sizes]
        for block, size in zip(blocks, sizes):
            gpu.cuda.memset_d8(block, CANARY, size)
        gpu.cuda.Context.synchronize()
        for block in blocks:
            block.free()


def _failure(error: Ece408Error) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    # What the kernel printed comes before what is said of it.
    _libc.fflush(None)
    answers.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
