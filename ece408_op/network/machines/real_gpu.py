"""A network's GPU, through PyCUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ... import settings
from ...backends import Done, as_array
from ...backends.cuda.kernel_plan import Code, Defines, Plan, architecture
from ...backends.cuda.runtime import device, launcher
from ...backends.cuda.runtime.compiler import compile_plan
from ...backends.cuda.runtime.device import Gpu, Lane, reported
from ...backends.cuda.runtime.graphs import Recording
from ...backends.cuda.runtime.page_locked import pool
from ...backends.cuda.work import done
from ...op_log import GpuTime
from .gpu_steps import GpuSteps
from .machine import GpuMachine, Recorded, Run

# Without a setting, networks use at most this fraction of a GPU's free memory.
_FRACTION_OF_FREE = 0.5


class RealGpu(GpuMachine):
    """A GPU through PyCUDA."""

    backend = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        self.key = ("cuda", gpu.index)
        self._gpu = gpu
        self.lock = gpu.staging
        self.cores = gpu.cores
        self._blocks: dict[int, Any] = {}

    def lowering(self, precision: str) -> GpuSteps:
        return GpuSteps(self._gpu, precision)

    def done(self, plan: Plan, seconds: float) -> Done:
        return done(GpuTime(seconds), [plan])

    def active(self) -> contextlib.AbstractContextManager[None]:
        return self._gpu.active()

    def budget(self, own: int) -> int:
        limit = settings.gpu_memory()
        if limit is not None:
            return limit
        gpu = self._gpu
        return int(_FRACTION_OF_FREE * (gpu.free_bytes() + gpu.reserved_bytes() + own))

    def allocate(self, nbytes: int) -> int:
        with reported(f"allocating {nbytes} bytes for a network on {self._gpu}"):
            block = self._gpu.cuda.mem_alloc(max(1, nbytes))
        # It is freed explicitly, with the GPU current; device.py says why.
        self._blocks[int(block)] = device.immortal(block)
        return int(block)

    def free(self, address: int) -> None:
        self._blocks.pop(address).free()

    def reaches(self, other: RealGpu) -> bool:
        return other is self or self._gpu.reaches(other._gpu)

    def upload(self, address: int, source: int, nbytes: int) -> None:
        with reported("a copy of weights to the GPU"):
            self._gpu.cuda.memcpy_htod(address, as_array(source, (nbytes,), "uint8"))

    def download(self, to: int, address: int, nbytes: int) -> None:
        with reported("a copy from the GPU"):
            self._gpu.cuda.memcpy_dtoh(as_array(to, (nbytes,), "uint8"), address)

    def is_page_locked(self, address: int, nbytes: int) -> bool:
        return pool.covers(address, nbytes)

    def load(self, plans: Sequence[Plan]) -> list[Any]:
        gpu, folder = self._gpu, launcher.cache_folder()
        wanted = {(plan.kernel, plan.macros) for plan in plans}

        def compiled(each: tuple[Code, Defines]) -> None:
            # If there is no code for this GPU, `launcher.load` raises.
            name = architecture(each[0].architectures, gpu.capability)
            if name is not None:
                compile_plan(each[0].source, each[1], name, folder)

        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as threads:
            list(threads.map(compiled, wanted))
        return [launcher.load(gpu, plan) for plan in plans]

    def lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> contextlib.AbstractContextManager[Sequence[Lane]]:
        return self._gpu.lanes(count, device_bytes, host_bytes, limit)

    def record(self, lane: Lane, runs: Sequence[Run]) -> Recorded:
        def enqueue() -> None:
            for run in runs:
                lane.launch(run.loaded, run.pointers)

        with reported("recording a network's launches"):
            return Recording(lane.stream, enqueue)

    def timed(self, lane: Lane, runs: Sequence[Run]) -> list[float]:
        events = self._events(len(runs) + 1)
        events[0].record(lane.stream)
        for run, event in zip(runs, events[1:]):
            lane.launch(run.loaded, run.pointers)
            event.record(lane.stream)
        lane.wait()
        return [end.time_since(begin) / 1e3 for begin, end in zip(events, events[1:])]

    def _events(self, count: int) -> list[Any]:
        """Return events, which are never destroyed; device.py says why."""
        kept = _events.setdefault(self._gpu.index, [])
        kept += [device.immortal(self._gpu.cuda.Event()) for _ in range(count - len(kept))]
        return kept[:count]


_events: dict[int, list[Any]] = {}


_real_gpus: dict[int, RealGpu] = {}


def real_gpu(index: int) -> RealGpu:
    """Return the GPU with this number. Raises `NoUsableGpu`."""
    gpu = device.get(index)
    return _real_gpus.setdefault(index, RealGpu(gpu))
