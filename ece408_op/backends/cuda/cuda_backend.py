"""CUDA backends for arrays on the GPU (zero-copy) and for host arrays (staged).

CUDA is imported, and GPUs are looked for, only when a first call needs them.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any

from ... import settings
from ...problem import ITEM_BYTES, ConvProblem
from .. import Backend, Done, HostMemory, NativeLaunches
from . import work, zero_copy
from .runtime import device, launcher, page_locked
from .runtime.device import Gpu
from .staged import staging
from .staged.staging import Staging
from .work import Work


class CudaBackend(Backend):
    """A backend for every problem and direction.

    `kernel` names a forward kernel; without it, `precision` is the minimum precision of the forward
    pass, and `gradient_precision` that of gradients.

    All methods raise `NoUsableGpu`, `KernelCompileFailed`, `GpuFailed`, `NotEnoughMemory`,
    `InvalidSetting` for an unknown kernel, and the errors that `Backend` lists.
    """

    name = "cuda"

    def __init__(
        self,
        kernel: str | None = None,
        precision: str = "float32",
        gradient_precision: str = "float32",
    ) -> None:
        self._kernel = kernel
        self._precision, self._gradient_precision = precision, gradient_precision
        # Arguments for creating an equal backend.
        self._arguments: tuple[Any, ...] = (kernel, precision, gradient_precision)

    @abstractmethod
    def gpus(self) -> list[Gpu]:
        """Return the GPUs that compute."""

    @abstractmethod
    def _compute(self, request: Work, gpus: list[Gpu]) -> Done:
        """Compute the work."""

    @abstractmethod
    def _prepare(self, problem: ConvProblem, direction: str) -> None:
        """Compile and load kernels, and allocate memory."""

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        _prepare_once(type(self), self._arguments, problem, direction)

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        kernel = self._kernel
        if kernel is None:
            return None
        reasons = (
            work.rejection(problem, direction, gpu.capability, kernel) for gpu in self.gpus()
        )
        return next(filter(None, reasons), None)

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        self.require_bias(problem, bias)
        request = work.forward(problem, x, w, bias, y, accumulate, self._kernel, self._precision)
        return self._run(request)

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        precision = self._gradient_precision
        return self._run(work.backward_data(problem, w, dy, dx, accumulate, precision))

    def backward_weight(
        self,
        problem: ConvProblem,
        x: int,
        dy: int,
        dw: int | None,
        dbias: int | None,
        accumulate_w: bool,
        accumulate_bias: bool,
    ) -> Done:
        request = work.backward_weight(
            problem, x, dy, dw, dbias, accumulate_w, accumulate_bias, self._gradient_precision
        )
        return self._run(request)

    def _example(self, problem: ConvProblem, direction: str) -> Work:
        forward = direction == "forward"
        precision = self._precision if forward else self._gradient_precision
        return work.example(problem, direction, self._kernel, precision)

    def _run(self, request: Work) -> Done:
        return self._compute(request, self.gpus())


@functools.lru_cache(maxsize=4096)
def _prepare_once(
    kind: type[CudaBackend], arguments: tuple[Any, ...], problem: ConvProblem, direction: str
) -> None:
    kind(*arguments)._prepare(problem, direction)


class ZeroCopyBackend(CudaBackend):
    """The backend for arrays in the memory of GPU number `index`."""

    def __init__(
        self,
        index: int,
        kernel: str | None = None,
        precision: str = "float32",
        gradient_precision: str = "float32",
    ) -> None:
        super().__init__(kernel, precision, gradient_precision)
        self._index = index
        self._arguments = (index, *self._arguments)

    def gpus(self) -> list[Gpu]:
        return [device.get(self._index)]

    def _compute(self, request: Work, gpus: list[Gpu]) -> Done:
        return zero_copy.compute(request, gpus[0])

    def _prepare(self, problem: ConvProblem, direction: str) -> None:
        zero_copy.prepare(self._example(problem, direction), *self.gpus())

    def native_launches(self, problem: ConvProblem, direction: str) -> NativeLaunches | None:
        if direction != "forward":
            return None
        return zero_copy.native_launches(self._example(problem, direction), *self.gpus())


class StagedBackend(CudaBackend):
    """The backend for host arrays, on the GPUs in `settings.devices`."""

    def gpus(self) -> list[Gpu]:
        return [device.get(index) for index in settings.devices()]

    def result_memory(self, problem: ConvProblem) -> HostMemory | None:
        nbytes = math.prod(problem.y_shape) * ITEM_BYTES[problem.dtype]
        return page_locked.pool.lend(nbytes, self.gpus()[0], settings.threads())

    def _compute(self, request: Work, gpus: list[Gpu]) -> Done:
        return staging.compute(request, gpus, _staging(settings.gpu_memory(), settings.threads()))

    def _prepare(self, problem: ConvProblem, direction: str) -> None:
        how = _staging(settings.gpu_memory(), settings.threads())
        staging.prepare(self._example(problem, direction), self.gpus(), how)


@functools.lru_cache(maxsize=16)
def _staging(gpu_memory: int | None, threads: int) -> Staging:
    return Staging(gpu_memory, threads, launcher.load)
