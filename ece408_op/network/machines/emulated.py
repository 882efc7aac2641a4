"""A network's GPU, emulated; its memory is the host's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import settings
from ...backends import Done
from ...backends.cuda.kernel_plan import Capability, Plan
from ...backends.cuda.runtime.device import COPIED_IN, COPIED_OUT
from ...backends.cuda.work import done
from ...backends.emulator import plans as emulated_plans
from ...backends.emulator.library import (
    FROM_GPU,
    ON_GPU,
    TO_GPU,
    Emulation,
    begin,
    copy,
    load,
    load_runtime,
    runtime,
)
from ...errors import NotEnoughMemory
from .gpu_steps import GpuSteps
from .machine import GpuMachine, Run


class _Target:
    """The target of plans: a GPU whose kernels need no inline PTX."""

    name = "emulated GPU"
    capability: Capability = (7, 5)
    driver = 13000


class _Loaded:
    """A plan and the library compiled from its source."""

    def __init__(self, plan: Plan, emulation: Emulation) -> None:
        self.plan = plan
        self.library = load(emulated_plans.compiled(plan, emulation))

    def launch(self, pointers: Mapping[str, int]) -> None:
        emulated_plans.run(self.plan, self.library, pointers)


class _Lane:
    """Memory on both sides; copies and launches are synchronous."""

    def __init__(self, machine: EmulatedMachine, device_bytes: int, host_bytes: int) -> None:
        self._machine = machine
        self._host = np.empty(max(1, host_bytes), np.uint8)
        self.host = self._host.ctypes.data
        self.device = machine.allocate(device_bytes)
        self.host_bytes, self.device_bytes = host_bytes, device_bytes
        self._started = 0.0
        self._marks: dict[int, float] = {}

    def copy_in(self, offset: int, nbytes: int, address: int | None = None) -> None:
        source = self.host + offset if address is None else address
        self._machine.copy(self.device + offset, source, nbytes, TO_GPU)

    bring = copy_in

    def brought(self) -> None:
        self.mark(COPIED_IN)

    def after(self, other: _Lane) -> None:
        pass

    def copy_out(self, offset: int, nbytes: int, address: int | None = None) -> None:
        to = self.host + offset if address is None else address
        self._machine.copy(to, self.device + offset, nbytes, FROM_GPU)

    def move(self, to: int, source: int, nbytes: int) -> None:
        self._machine.copy(to, source, nbytes, ON_GPU)

    def launch(self, loaded: _Loaded, pointers: Mapping[str, int]) -> None:
        loaded.launch(pointers)

    def mark(self, event: int) -> None:
        self._marks[event] = time.perf_counter()

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def times(self, clock: _Lane) -> tuple[float, ...]:
        return tuple(self._marks[event] - clock._started for event in range(COPIED_OUT + 1))

    def wait(self) -> None:
        pass

    rest = wait_for_copies = wait


@dataclass(frozen=True)
class _Recorded:
    """A list of launches, executed synchronously."""

    runs: Sequence[Run]

    def launch(self) -> None:
        for run in self.runs:
            run.loaded.launch(run.pointers)

    def close(self) -> None:
        pass


class EmulatedMachine(GpuMachine):
    """The emulator; its memory is unlimited unless a limit is set."""

    backend = "emulator"

    def __init__(self, mode: str) -> None:
        self.key = ("emulator", mode)
        self.target = _Target()
        self.lock = _lock
        self.cores = frozenset(os.sched_getaffinity(0))
        self._emulation = Emulation(mode)
        self._idle: list[_Lane] = []

    def lowering(self, precision: str) -> GpuSteps:
        return GpuSteps(self.target, precision)

    def done(self, plan: Plan, seconds: float) -> Done:
        return done(None, [plan])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        load_runtime()
        begin(self._library(), self._emulation)
        yield

    def budget(self, own: int) -> int:
        return settings.gpu_memory() or 1 << 40

    def allocate(self, nbytes: int) -> int:
        place = ctypes.c_void_p()
        if self._library().cudaMalloc(ctypes.byref(place), ctypes.c_size_t(max(1, nbytes))):
            raise NotEnoughMemory(f"the emulated GPU has no room for {nbytes} bytes more")
        return place.value or 0

    def free(self, address: int) -> None:
        self._library().cudaFree(ctypes.c_void_p(address))

    def reaches(self, other: EmulatedMachine) -> bool:
        return True

    def upload(self, address: int, source: int, nbytes: int) -> None:
        self.copy(address, source, nbytes, TO_GPU)

    def download(self, to: int, address: int, nbytes: int) -> None:
        self.copy(to, address, nbytes, FROM_GPU)

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        copy(self._library(), to, source, nbytes, kind)

    def load(self, plans: Sequence[Plan]) -> list[Any]:
        return [_Loaded(plan, self._emulation) for plan in plans]

    @contextlib.contextmanager
    def lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> Iterator[Sequence[_Lane]]:
        lanes = [self._lane(device_bytes, host_bytes) for _ in range(count)]
        try:
            yield lanes
        finally:
            self._idle += lanes

    def _lane(self, device_bytes: int, host_bytes: int) -> _Lane:
        """Return an idle lane that is large enough, or a new one."""
        if self._idle:
            lane = self._idle.pop()
            if lane.device_bytes >= device_bytes and lane.host_bytes >= host_bytes:
                return lane
            self.free(lane.device)
        return _Lane(self, device_bytes, host_bytes)

    def record(self, lane: Any, runs: Sequence[Run]) -> _Recorded:
        return _Recorded(runs)

    def timed(self, lane: Any, runs: Sequence[Run]) -> list[float]:
        seconds = []
        for run in runs:
            start = time.perf_counter()
            run.loaded.launch(run.pointers)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _library(self) -> ctypes.CDLL:
        found = runtime()
        assert found is not None
        return found


# The emulator's settings apply to the whole process.
_lock = threading.Lock()


@functools.lru_cache(maxsize=4)
def _machine(mode: str) -> EmulatedMachine:
    return EmulatedMachine(mode)


def emulated() -> EmulatedMachine:
    """Return the emulator for the mode in `settings.emulation`."""
    return _machine(settings.emulation())
