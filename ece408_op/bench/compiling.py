"""Parallel compilation of many plans, before their kernels run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

from ..backends.cuda.kernel_plan import Plan, Target, architecture
from ..backends.cuda.runtime.compiler import compile_plan
from ..backends.cuda.runtime.launcher import cache_folder


def compile_all(gpu: Target, plans: Iterable[Plan]) -> None:
    """Compile the plans for this GPU on all cores. Raises what `compile_plan` raises."""
    wanted = {
        (plan.kernel.source, plan.macros, _architecture(plan, gpu), cache_folder()): None
        for plan in plans
    }
    cores = len(os.sched_getaffinity(0))
    # NVRTC compiles one source of a process at a time; starting a process takes as long as several.
    is_many = len(wanted) > 4 * cores > 4
    pool: Executor = (
        ProcessPoolExecutor(cores, get_context("spawn")) if is_many else ThreadPoolExecutor(cores)
    )
    with pool:
        for _ in pool.map(compile_plan, *zip(*wanted)):
            pass


def _architecture(plan: Plan, gpu: Target) -> str:
    return architecture(plan.kernel.architectures, gpu.capability) or ""
