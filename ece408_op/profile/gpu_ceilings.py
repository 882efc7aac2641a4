"""Measured peak rates of a GPU, to which kernels' rates are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends.cuda.kernel_plan import Capability, architecture
from ..backends.cuda.runtime import launcher
from ..backends.cuda.runtime.compiler import compile_plan
from ..backends.cuda.runtime.device import BEGIN, COMPUTED, Gpu, Lane, immortal

SOURCE = "measuring/ceilings.cu"
ARCHITECTURES = ("75", "80", "86", "89", "90", "90a", "100", "120")
_COPY_BYTES = 1 << 30
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 8
_REPEAT = 5
# Iterations for some milliseconds of arithmetic on any current GPU.
_ROUNDS = {"multiply_adds": 20_000, "tf32_products": 8_000, "half_products": 8_000}
# Tensor-core products per product at float32 accuracy.
_PRODUCTS = 3


@dataclass(frozen=True)
class GpuCeilings:
    """Peak rates: copies within the GPU's memory in GB/s, bytes read and written; float32
    multiply-adds, and TF32 and half-precision products on the tensor cores (0 if missing), in
    GFLOP/s."""

    copy_gbs: float
    fp32_gflops: float
    tf32_gflops: float
    fp16_gflops: float = 0.0

    def gflops(self, precision: str) -> float:
        """Return the highest rate for results of this precision: "float32", "tf32" or "float16".

        Numbers split into two halves give float32 accuracy in three products, and one product of
        scaled halves is as accurate as TF32; so tensor cores count for every precision.
        """
        tensor = max(self.tf32_gflops, self.fp16_gflops)
        if precision == "float32":
            return max(self.fp32_gflops, tensor / _PRODUCTS)
        pairs = 2 if precision == "float16" else 1
        return max(pairs * self.fp32_gflops, tensor)

    def __str__(self) -> str:
        rates = {
            "float32 multiply-adds": self.fp32_gflops,
            "TF32 on tensor cores": self.tf32_gflops,
            "half precision on tensor cores": self.fp16_gflops,
        }
        told = [f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items() if rate]
        return f"Measured ceilings: {', '.join([f'copies {self.copy_gbs:.0f} GB/s', *told])}"


def measure(gpu: Gpu) -> GpuCeilings:
    """Measure each rate; return the best of several runs.

    Raises `NotEnoughMemory` if 2 GiB are not free, and the errors of compiling and launching.
    """
    with gpu.active(), gpu.lane(2 * _COPY_BYTES) as lane:
        module = _module(gpu.capability)
        copy_s = _best_s(lane, lambda: _copy(gpu, lane))
        rates = []
        for name, rounds in _ROUNDS.items():
            operations = _operations(module, name)
            blocks = _BLOCKS_PER_PROCESSOR * _processors(gpu)
            function = module.get_function(name).prepare("Pi")

            def launch(function: Any = function, blocks: int = blocks, n: int = rounds) -> None:
                grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
                function.prepared_async_call(grid, block, lane.stream, lane.device, n)

            rates.append(operations * rounds * blocks / _best_s(lane, launch) / 1e9)
        return GpuCeilings(2 * _COPY_BYTES / copy_s / 1e9, *rates)


def _module(capability: Capability) -> Any:
    import pycuda.driver as cuda

    name = architecture(ARCHITECTURES, capability)
    assert name is not None, "the GPU was opened, so there is code for it"
    binary = compile_plan(SOURCE, (), name, launcher.cache_folder())
    return immortal(cuda.module_from_buffer(binary))


def _operations(module: Any, name: str) -> int:
    """Return the operations of a block in one round, as defined in the source."""
    import numpy as np
    import pycuda.driver as cuda

    value = np.empty(1, np.int32)
    cuda.memcpy_dtoh(value, module.get_global(f"{name}_operations")[0])
    return int(value[0])


def _processors(gpu: Gpu) -> int:
    import pycuda.driver as cuda

    return cuda.Context.get_device().get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)


def _copy(gpu: Gpu, lane: Lane) -> None:
    gpu.cuda.memcpy_dtod_async(lane.device + _COPY_BYTES, lane.device, _COPY_BYTES, lane.stream)


def _best_s(lane: Lane, enqueue: Callable[[], None]) -> float:
    samples = []
    for _ in range(_REPEAT):
        lane.mark(BEGIN)
        enqueue()
        lane.mark(COMPUTED)
        lane.wait()
        samples.append(lane.seconds(BEGIN, COMPUTED))
    return min(samples)
