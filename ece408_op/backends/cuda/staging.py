"""Host arrays computed on the GPU: chunks through page-locked memory, copies beside kernels.

Each lane (a stream with memory of its own) has a host thread and takes every so-manieth chunk of
images: the thread copies the chunk's inputs to page-locked memory, enqueues copy, kernels and copy
back, waits, and copies the results to where they belong. While one lane's thread copies on the
host, others have the bus, each direction of it, and the GPU. Chunks go to lanes in a fixed order,
so that no result depends on which thread is faster.

The caller's arrays are not page-locked in place: how long they live is not known, and a driver
that still thinks it knows where freed memory lies would copy to and from the wrong place.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...errors import NotEnoughMemory
from ...op_log import GpuTime
from . import pages
from .chunks import Division, Layout, divide
from .device import BEGIN, COMPUTED, COPIED_IN, COPIED_OUT, Gpu, Lane
from .plan import Plan
from .work import OVER_BATCH, Step, Work, shape_of

Interval = tuple[float, float]
Task = TypeVar("Task")
Result = TypeVar("Result")

# Below, a lane's copies on the host would leave the bus idle; above, the host's memory is busy.
_FEWEST_LANES = 3
_MOST_LANES = 12


@dataclass(frozen=True)
class Staging:
    """How to stage. `budget` gives the bytes that may be used of a GPU's memory, `threads` is the
    number of cores to copy with, and `load` makes a plan ready on the GPU that is active."""

    budget: Callable[[Gpu], int]
    threads: int
    load: Callable[[Gpu, Plan], Any]

    @property
    def most_lanes(self) -> int:
        return max(_FEWEST_LANES, min(self.threads, _MOST_LANES))


@dataclass
class _Outcome:
    """What lanes leave behind: when copies and kernels ran, and sums over the batch by role."""

    copies: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, other: _Outcome) -> None:
        self.copies += other.copies
        self.kernels += other.kernels
        for role, values in other.sums.items():
            self.sums[role] = self.sums.get(role, 0.0) + values


def compute(work: Work, gpus: Sequence[Gpu], staging: Staging) -> GpuTime:
    """Do the work, whose addresses are on the host, on the GPUs; returns what kept them busy.

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
    return GpuTime(
        kernel_seconds=max(covered(outcome.kernels) for outcome in outcomes),
        copy_seconds=max(covered(outcome.copies) for outcome in outcomes),
    )


def prepare(work: Work, gpus: Sequence[Gpu], staging: Staging) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    whole = _without_sums(work)
    for gpu, (first, count) in zip(gpus, _equal_parts(work.problem.batch, len(gpus))):
        with contextlib.ExitStack() as stack:
            division, _ = _reserve(stack, _part(whole, first, count), gpu, staging)
            for images in {size for _, size in division.chunks(count)}:
                for plan in whole.plans(gpu.capability, images):
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
    """First image and number of images of at most so many parts, none of them empty."""
    size = math.ceil(batch / most)
    return [(first, min(size, batch - first)) for first in range(0, batch, size)]


def _compute_part(work: Work, gpu: Gpu, part: tuple[int, int], staging: Staging) -> _Outcome:
    part_work = _part(work, *part)
    with contextlib.ExitStack() as stack:
        division, lanes = _reserve(stack, part_work, gpu, staging)
        chunks = division.chunks(part[1])
        lanes[0].start_clock()
        tasks = [(lane, chunks[n :: len(lanes)]) for n, lane in enumerate(lanes)]
        total = _Outcome()
        for outcome in _run_all(
            lambda task: _run_lane(part_work, division.layout, *task, lanes[0], staging), tasks
        ):
            total.add(outcome)
    return total


def _reserve(
    stack: contextlib.ExitStack, work: Work, gpu: Gpu, staging: Staging
) -> tuple[Division, list[Lane]]:
    """A division and lanes for it, held until the stack is closed, as is the active GPU."""
    stack.enter_context(gpu.staging)
    stack.enter_context(gpu.active())
    budget = staging.budget(gpu)
    while True:
        division = divide(work, gpu.capability, budget, staging.most_lanes)
        layout = division.layout
        request = (division.lanes, layout.device_bytes, layout.host_bytes, budget)
        try:
            return division, stack.enter_context(gpu.lanes(*request))
        except NotEnoughMemory:
            if (division.lanes, layout.images) == (1, 1):
                raise
            budget = division.device_bytes // 2


def _run_lane(
    work: Work,
    layout: Layout,
    lane: Lane,
    chunks: list[tuple[int, int]],
    clock: Lane,
    staging: Staging,
) -> _Outcome:
    """All chunks of one lane, one after the other."""
    outcome = _Outcome()
    with lane.gpu.active():
        for role in work.inputs:
            if role not in OVER_BATCH:
                _fill(work, layout, lane, role, 0, 1)
                lane.copy_in(layout.offsets[role], work.nbytes(role, 1))
        for first, images in chunks:
            _run_chunk(work, layout, lane, first, images, staging)
            begin, copied_in, computed, copied_out = lane.times(clock)
            outcome.copies += [(begin, copied_in), (computed, copied_out)]
            outcome.kernels.append((copied_in, computed))
            for role in work.outputs:
                _empty(work, layout, lane, role, first, images, outcome.sums)
    return outcome


def _run_chunk(
    work: Work, layout: Layout, lane: Lane, first: int, images: int, staging: Staging
) -> None:
    moving = [role for role in work.inputs if role in OVER_BATCH]
    for role in moving:
        _fill(work, layout, lane, role, first, images)
    loaded = [staging.load(lane.gpu, plan) for plan in work.plans(lane.gpu.capability, images)]
    pointers = {role: lane.device + offset for role, offset in layout.offsets.items()}
    with contextlib.ExitStack() as stack:
        for each in loaded:
            if each.plan.constants:
                # Other lanes' launches would overwrite the module's constants.
                stack.enter_context(each.lock)
        lane.mark(BEGIN)
        for role in moving:
            lane.copy_in(layout.offsets[role], work.nbytes(role, images))
        lane.mark(COPIED_IN)
        for each in loaded:
            lane.launch(each, pointers)
        lane.mark(COMPUTED)
        for role in work.outputs:
            lane.copy_out(layout.offsets[role], work.nbytes(role, images))
        lane.mark(COPIED_OUT)
        lane.wait()


def _fill(work: Work, layout: Layout, lane: Lane, role: str, first: int, images: int) -> None:
    """Copy a role's part of the caller's array into page-locked memory."""
    source = work.addresses[role] + work.nbytes(role, first) * (role in OVER_BATCH)
    ctypes.memmove(lane.host + layout.offsets[role], source, work.nbytes(role, images))


def _empty(
    work: Work,
    layout: Layout,
    lane: Lane,
    role: str,
    first: int,
    images: int,
    sums: dict[str, np.ndarray],
) -> None:
    """Copy a result out of page-locked memory to the caller's array, or add it to the sums."""
    source = lane.host + layout.offsets[role]
    if role in OVER_BATCH:
        target = work.addresses[role] + work.nbytes(role, first)
        ctypes.memmove(target, source, work.nbytes(role, images))
    else:
        sums[role] = sums.get(role, 0.0) + _array(work, role, source).astype(np.float64)


def _write_sums(work: Work, outcomes: Sequence[_Outcome]) -> None:
    """Write what the lanes summed in float64 to the caller's arrays, or add it to them."""
    total = _Outcome()
    for outcome in outcomes:
        total.add(outcome)
    accumulate = dict(zip(work.outputs, (step.accumulate for step in work.steps)))
    for role, values in total.sums.items():
        target = _array(work, role, work.addresses[role])
        target[...] = values + target if accumulate[role] else values


def _array(work: Work, role: str, address: int) -> np.ndarray:
    """The memory at an address as the array of a role that is not cut along the batch."""
    memory = (ctypes.c_ubyte * work.nbytes(role, 1)).from_address(address)
    flat = np.ctypeslib.as_array(memory).view(work.problem.dtype)
    return flat.reshape(shape_of(work.problem, role))


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
