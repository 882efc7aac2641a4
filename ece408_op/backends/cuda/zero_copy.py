"""Arrays that are on the GPU already, as under MXNet's `gpu()` context: kernels work in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from ...op_log import GpuTime
from .. import Done
from .runtime.device import BEGIN, COMPUTED, Gpu
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


@contextlib.contextmanager
def ready(work: Work, gpu: Gpu) -> Iterator[Callable[[Mapping[str, int]], Done]]:
    """Get the work ready; what is yielded does it on arrays at the addresses that it is given, as
    often as it is called, and returns when it is done. Raises what `compute` raises."""
    with gpu.active(), contextlib.ExitStack() as stack:
        loaded = _load(work, gpu)
        lane = stack.enter_context(gpu.lane(max(each.plan.workspace_bytes for each in loaded)))
        for each in loaded:
            if each.plan.constants:
                # Launches on other threads would overwrite the module's constants.
                stack.enter_context(each.lock)

        def run(addresses: Mapping[str, int]) -> Done:
            pointers = {**addresses, "workspace": lane.device}
            lane.mark(BEGIN)
            for each in loaded:
                lane.launch(each, pointers)
            lane.mark(COMPUTED)
            lane.wait()
            time = GpuTime(kernel_seconds=lane.seconds(BEGIN, COMPUTED))
            return done(time, (each.plan for each in loaded))

        yield run


def prepare(work: Work, gpu: Gpu) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    with gpu.active():
        loaded = _load(work, gpu)
        with gpu.lane(max(each.plan.workspace_bytes for each in loaded)):
            pass


def _load(work: Work, gpu: Gpu) -> list[Any]:
    return [load(gpu, plan) for plan in work.plans(gpu, work.problem.batch)]
