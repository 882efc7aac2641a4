"""Arrays that are on the GPU already, as under MXNet's `gpu()` context: kernels work in place."""

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
    """Do the work on addresses on this GPU; returns when it is done.

    MXNet starts an operator when its inputs are complete, and knows nothing of the work that is
    enqueued here: so it is waited for. Raises `NotEnoughMemory` when a kernel's workspace does
    not fit, `GpuFailed`, and what compiling raises.
    """
    with ready(work, gpu) as run:
        return run(work.addresses)


class Ready:
    """Work that is compiled and loaded, with a stream and memory of its own; made by `ready`."""

    def __init__(self, loaded: list[Any], lane: Lane) -> None:
        self._loaded, self._lane = loaded, lane

    def __call__(self, addresses: Mapping[str, int]) -> Done:
        """Do it on arrays at these addresses; returns when it is done."""
        self._lane.mark(BEGIN)
        self.begin(addresses)
        self._lane.mark(COMPUTED)
        self._lane.wait()
        time = GpuTime(kernel_seconds=self._lane.seconds(BEGIN, COMPUTED))
        return done(time, (each.plan for each in self._loaded))

    def begin(self, addresses: Mapping[str, int]) -> None:
        """Enqueue it; what is enqueued later begins after it."""
        pointers = {**addresses, "workspace": self._lane.device}
        for each in self._loaded:
            self._lane.launch(each, pointers)

    def hold(self, microseconds: int) -> None:
        """Enqueue a pause."""
        self._lane.launch(pause.load(self._lane.gpu, microseconds), {})


@contextlib.contextmanager
def ready(work: Work, gpu: Gpu) -> Iterator[Ready]:
    """Get the work ready, to be done on any arrays, as often as is wanted. Raises what `compute`
    raises."""
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


# What MXNet can be asked for at once, in bytes.
_MOST_WORKSPACE = 2**31 - 1


def native_launches(work: Work, gpu: Gpu) -> NativeLaunches | None:
    """The work, compiled and loaded, for those who launch it on a stream of their own; `None` if
    that needs Python. Raises what `compute` raises."""
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
