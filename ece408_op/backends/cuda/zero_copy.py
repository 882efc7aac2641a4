"""Zero-copy calls: kernels read and write arrays on the GPU, as under MXNet's `gpu()` context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...op_log import GpuTime
from .. import Done, NativeLaunches
from .runtime import native_plans, pause
from .runtime.device import BEGIN, COMPUTED, Gpu, Lane
from .runtime.launcher import load
from .work import Work, done


def compute(work: Work, gpu: Gpu) -> Done:
    """Compute work on GPU addresses; return when it is done.

    MXNet starts an operator when its inputs are complete, and does not know about work enqueued
    here: so this waits for it. Raises `NotEnoughMemory` when a kernel's workspace does not fit,
    `GpuFailed`, and compiler errors.
    """
    with ready(work, gpu) as run:
        return run(work.addresses)


class Ready:
    """Compiled and loaded work, with its own stream and memory; created by `ready`."""

    def __init__(self, loaded: list[Any], lane: Lane) -> None:
        self._loaded, self._lane = loaded, lane

    def __call__(self, addresses: Mapping[str, int]) -> Done:
        """Compute on arrays at these addresses; return when it is done."""
        self._lane.mark(BEGIN)
        self.begin(addresses)
        self._lane.mark(COMPUTED)
        self._lane.wait()
        time = GpuTime(kernel_seconds=self._lane.seconds(BEGIN, COMPUTED))
        return done(time, (each.plan for each in self._loaded))

    def begin(self, addresses: Mapping[str, int]) -> None:
        """Enqueue the work; work enqueued later starts after it."""
        pointers = {**addresses, "workspace": self._lane.device}
        for each in self._loaded:
            self._lane.launch(each, pointers)

    def hold(self, microseconds: int) -> None:
        """Enqueue a pause."""
        self._lane.launch(pause.load(self._lane.gpu, microseconds), {})


@contextlib.contextmanager
def ready(work: Work, gpu: Gpu) -> Iterator[Ready]:
    """Prepare work for repeated calls on any arrays. Raises what `compute` raises."""
    with gpu.active(), contextlib.ExitStack() as stack:
        loaded = _load(work, gpu)
        lane = stack.enter_context(gpu.lane(max(each.plan.workspace_bytes for each in loaded)))
        for each in loaded:
            if each.plan.constants:
                # Launches on other threads would overwrite the module's constants.
                stack.enter_context(each.lock)
        yield Ready(loaded, lane)


def prepare(work: Work, gpu: Gpu) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    with gpu.active():
        loaded = _load(work, gpu)
        with gpu.lane(max(each.plan.workspace_bytes for each in loaded)):
            pass


# Maximum bytes of one workspace request to MXNet.
_MOST_WORKSPACE = 2**31 - 1


def native_launches(work: Work, gpu: Gpu) -> NativeLaunches | None:
    """Return the compiled and loaded launches for callers with a stream of their own; `None` if
    they need Python. Raises what `compute` raises."""
    plans = work.plans(gpu, work.problem.batch)
    workspace = max(plan.workspace_bytes for plan in plans)
    # Launches on other streams would overwrite constants, and a user's file may change.
    needs_python = any(plan.constants or Path(plan.kernel.source).is_absolute() for plan in plans)
    if needs_python or workspace > _MOST_WORKSPACE:
        return None
    with gpu.active():
        found = tuple(each for plan in plans for each in native_plans.launches(plan, gpu))
    return NativeLaunches(found, workspace, done(None, plans))


def _load(work: Work, gpu: Gpu) -> list[Any]:
    return [load(gpu, plan) for plan in work.plans(gpu, work.problem.batch)]
