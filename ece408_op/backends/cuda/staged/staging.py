"""Host arrays computed on the GPU: chunks through page-locked memory, copies beside kernels.

The batch is cut into chunks of images, which go round a ring of lanes, each a stream with memory of
its own (`ring.py`): a chunk's inputs are copied to page-locked memory, copy, kernels and copy back
are enqueued, and when they are done the results are copied to where they belong. Chunks are begun
and finished in a fixed order, so that no result depends on what is faster.

The caller's arrays are not page-locked in place: how long they live is not known, and a driver
that still thinks it knows where freed memory lies would copy to and from the wrong place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ....errors import NotEnoughMemory
from ....op_log import GpuTime
from ... import Done
from ..runtime.device import Gpu, Lane
from ..work import OVER_BATCH, Step, Work, done
from . import pages
from .chunks import Division, divide
from .ring import Interval, Loader, Outcome, Ring, array_at

Task = TypeVar("Task")
Result = TypeVar("Result")

# One being filled, one being emptied, and the rest on the bus and the GPU.
_MOST_LANES = 4


@dataclass(frozen=True)
class Staging:
    """How to stage. `budget` gives the bytes that may be used of a GPU's memory, `threads` is the
    number of cores to copy with, and `load` makes a plan ready on the GPU that is active."""

    budget: Callable[[Gpu], int]
    threads: int
    load: Loader


def compute(work: Work, gpus: Sequence[Gpu], staging: Staging) -> Done:
    """Do the work, whose addresses are on the host, on the GPUs; returns when it is done.

    Each GPU gets an equal part of the batch. Where there turns out to be less memory than
    budgeted, chunks become smaller.

    Raises `NotEnoughMemory`, `GpuFailed`, and what loading a plan raises.
    """
    for role in work.outputs:
        if role in OVER_BATCH:
            pages.advise_huge(work.addresses[role], work.nbytes(role, work.problem.batch))
    whole = _without_sums(work)
    parts = _equal_parts(work.problem.batch, len(gpus))
    outcomes = _run_all(lambda task: _compute_part(whole, *task, staging), list(zip(gpus, parts)))
    _write_sums(work, outcomes)
    # GPUs work at the same time; the busiest one counts.
    time = GpuTime(
        kernel_seconds=max(covered(outcome.kernels) for outcome in outcomes),
        copy_seconds=max(covered(outcome.copies) for outcome in outcomes),
    )
    return done(time, (plan for outcome in outcomes for plan in outcome.plans))


def prepare(work: Work, gpus: Sequence[Gpu], staging: Staging) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    whole = _without_sums(work)
    for gpu, (first, count) in zip(gpus, _equal_parts(work.problem.batch, len(gpus))):
        with contextlib.ExitStack() as stack:
            division, _ = _reserve(stack, _part(whole, first, count), gpu, staging)
            for images in {size for _, size in division.chunks(count)}:
                for plan in whole.plans(gpu, images):
                    staging.load(gpu, plan)


def _without_sums(work: Work) -> Work:
    """The work with results over the whole batch not accumulated: the host adds the chunks'."""
    if all(role in OVER_BATCH for role in work.outputs):
        return work
    return dataclasses.replace(work, steps=tuple(Step(s.direction, False) for s in work.steps))


def _part(work: Work, first: int, count: int) -> Work:
    """The work on `count` images from `first` on."""
    addresses = {
        role: address + (work.nbytes(role, first) if role in OVER_BATCH else 0)
        for role, address in work.addresses.items()
    }
    problem = dataclasses.replace(work.problem, batch=count)
    return dataclasses.replace(work, problem=problem, addresses=addresses)


def _equal_parts(batch: int, most: int) -> list[tuple[int, int]]:
    """First image and number of images of each part; at most the parts asked for, none empty."""
    size = math.ceil(batch / most)
    return [(first, min(size, batch - first)) for first in range(0, batch, size)]


def _compute_part(work: Work, gpu: Gpu, part: tuple[int, int], staging: Staging) -> Outcome:
    part_work = _part(work, *part)
    with contextlib.ExitStack() as stack:
        division, lanes = _reserve(stack, part_work, gpu, staging)
        ring = Ring(part_work, division.layout, lanes, staging.load, staging.threads)
        return ring.run(division.chunks(part[1]))


def _reserve(
    stack: contextlib.ExitStack, work: Work, gpu: Gpu, staging: Staging
) -> tuple[Division, list[Lane]]:
    """A division and lanes for it, held until the stack is closed, as is the active GPU."""
    stack.enter_context(gpu.staging)
    stack.enter_context(gpu.active())
    budget = staging.budget(gpu)
    while True:
        division = divide(work, gpu, budget, _MOST_LANES)
        layout = division.layout
        request = (division.lanes, layout.device_bytes, layout.host_bytes, budget)
        try:
            return division, stack.enter_context(gpu.lanes(*request))
        except NotEnoughMemory:
            if (division.lanes, layout.images) == (1, 1):
                raise
            budget = division.device_bytes // 2


def _write_sums(work: Work, outcomes: Sequence[Outcome]) -> None:
    """Write what the lanes summed in float64 to the caller's arrays, or add it to them."""
    total = Outcome()
    for outcome in outcomes:
        total.add(outcome)
    accumulate = dict(zip(work.outputs, (step.accumulate for step in work.steps)))
    for role, values in total.sums.items():
        target = array_at(work, role, work.addresses[role])
        target[...] = values + target if accumulate[role] else values


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _run_all(function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """The function's results for all tasks, each on a thread of its own unless there is one."""
    if len(tasks) == 1:
        return [function(tasks[0])]
    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(function, tasks))
