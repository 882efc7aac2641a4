"""Host arrays computed on the GPU: chunks through page-locked memory, copies beside kernels.

The batch is cut into chunks of images, which go round a ring of lanes, each with streams and memory
of its own (`ring.py`): a chunk's inputs are copied to page-locked memory, copy, kernels and copy
back are enqueued, and when they are done the results are copied to where they belong.

Several GPUs share the chunks that one would have, by their measured speed (`sharing.py`). Chunks
are the same, and are finished in a fixed order, so no result depends on which GPU is faster. Sums
over the batch are added up in float64, where an order shows in float64 results only: for these
shares are equal.

The bus reads and writes the caller's arrays in place where they lie in page-locked memory of this
package's (`runtime/page_locked.py`). Other arrays are not page-locked: how long they live is not
known, and a driver that still thinks it knows where freed memory lies would copy to and from the
wrong place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ....errors import NotEnoughMemory
from ....op_log import GpuTime
from ... import Done
from ...cpu.native import ask_for_huge_pages
from ..runtime import crew
from ..runtime.device import Gpu, Lane
from ..sharing import Shares, numbers, ranges
from ..work import OVER_BATCH, Step, Work, done
from .chunks import Division, divide
from .ring import Interval, Loader, Outcome, Ring, array_at, is_reached

# One being filled, one being emptied, and the rest on the bus and the GPU.
_MOST_LANES = 4
# Shapes whose shares are remembered.
_MOST_KNOWN = 1024
# Calls that copy less are one GPU's: before others have begun, it is nearly done.
_SHARED_FROM_BYTES = 32 << 20
# Of what is free of a GPU's memory, staging uses at most this share unless it is told.
_SHARE_OF_FREE = 0.5


@dataclass(frozen=True)
class _Cut:
    """A call on several GPUs: the images of a chunk, and how chunks are shared out; of one chunk
    there is nothing to share."""

    images: int
    shares: Shares | None


@dataclass(frozen=True)
class Staging:
    """How to stage, and what was learnt of it. `most_bytes` may be used of a GPU's memory, or half
    of what is free if it is `None`; `threads` is the number of cores to copy with, and `load` makes
    a plan ready on the GPU that is active. By the `clock`'s seconds GPUs get their shares."""

    most_bytes: int | None
    threads: int
    load: Loader
    clock: Callable[[], float] = time.perf_counter
    _cuts: dict[Hashable, _Cut] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def budget(self, gpu: Gpu) -> int:
        """Bytes of the GPU's memory that may be used."""
        if self.most_bytes is not None:
            return self.most_bytes
        return int(_SHARE_OF_FREE * (gpu.free_bytes() + gpu.reserved_bytes()))

    def cut(self, work: Work, gpus: Sequence[Gpu]) -> _Cut:
        """How calls like this one are cut. Raises `NotEnoughMemory`."""
        asked = (work.problem, work.steps, work.outputs, work.kernel, work.precision)
        # Where the bus reaches the caller's arrays, more GPUs may be faster.
        key = (*asked, *map(functools.partial(is_reached, work), sorted(OVER_BATCH)), *gpus)
        with self._lock:
            if key not in self._cuts:
                if len(self._cuts) == _MOST_KNOWN:
                    self._cuts.clear()
                self._cuts[key] = self._made(work, gpus)
            return self._cuts[key]

    def _made(self, work: Work, gpus: Sequence[Gpu]) -> _Cut:
        with gpus[0].active():
            division = divide(work, gpus[0], self.budget(gpus[0]), _MOST_LANES)
        batch, images = work.problem.batch, division.layout.images
        chunks = math.ceil(batch / images)
        most = min(len(gpus), chunks)
        tried = [most] if _must_be_equal(work) else numbers(most)
        return _Cut(images, Shares(dict.fromkeys(tried, chunks)) if chunks > 1 else None)


def compute(work: Work, gpus: Sequence[Gpu], staging: Staging) -> Done:
    """Do the work, whose addresses are on the host, on the GPUs; returns when it is done.

    Where there turns out to be less memory than budgeted, chunks become smaller.

    Raises `NotEnoughMemory`, `GpuFailed`, and what loading a plan raises.
    """
    for role in work.outputs:
        if role in OVER_BATCH:
            ask_for_huge_pages(work.addresses[role], work.nbytes(role, work.problem.batch))
    outcomes = _compute_shared(_without_sums(work), gpus, staging)
    _write_sums(work, outcomes)
    # GPUs work at the same time; the busiest one counts.
    busy = GpuTime(
        kernel_seconds=max(covered(outcome.kernels) for outcome in outcomes),
        copy_seconds=max(covered(outcome.copies) for outcome in outcomes),
    )
    return done(busy, (plan for outcome in outcomes for plan in outcome.plans))


def prepare(work: Work, gpus: Sequence[Gpu], staging: Staging) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    whole = _without_sums(work)
    is_shared = _can_be_shared(whole, gpus)
    most = staging.cut(whole, gpus).images if is_shared else None
    for gpu in gpus if is_shared else gpus[:1]:
        with contextlib.ExitStack() as stack:
            division, _ = _reserve(stack, whole, gpu, staging, most)
            for images in {size for _, size in division.chunks(range(work.problem.batch))}:
                for plan in whole.plans(gpu, images):
                    staging.load(gpu, plan)


def _compute_shared(work: Work, gpus: Sequence[Gpu], staging: Staging) -> list[Outcome]:
    """Do the work on as many of the GPUs as is best."""
    batch = work.problem.batch
    cut = staging.cut(work, gpus) if _can_be_shared(work, gpus) else None
    if cut is None or cut.shares is None:
        return [_compute_part(work, gpus[0], range(batch), staging, staging.threads, None)]
    dealt = cut.shares.deal()
    threads = max(1, staging.threads // len(dealt))
    parts = [range(p.start * cut.images, min(p.stop * cut.images, batch)) for p in ranges(dealt)]
    start = staging.clock()
    outcomes = crew.run_all(
        [
            (gpu, functools.partial(_compute_part, work, gpu, part, staging, threads, cut.images))
            for gpu, part in zip(gpus, parts)
        ]
    )
    seconds = staging.clock() - start
    if not _must_be_equal(work):
        cut.shares.took(dealt, [outcome.seconds for outcome in outcomes], seconds)
    return outcomes


def _can_be_shared(work: Work, gpus: Sequence[Gpu]) -> bool:
    """Whether there are several GPUs and images, and enough to copy for more than one of them."""
    if min(len(gpus), work.problem.batch) == 1:
        return False
    copied = sum(work.nbytes(role, work.problem.batch) for role in work.addresses)
    return copied >= _SHARED_FROM_BYTES


def _must_be_equal(work: Work) -> bool:
    """Whether results would depend on how the batch is shared out: sums in float64 of numbers in
    float64."""
    sums = any(role not in OVER_BATCH for role in work.outputs)
    return sums and work.problem.dtype == "float64"


def _without_sums(work: Work) -> Work:
    """The work with results over the whole batch not accumulated: the host adds the chunks'."""
    if all(role in OVER_BATCH for role in work.outputs):
        return work
    return dataclasses.replace(work, steps=tuple(Step(s.direction, False) for s in work.steps))


def _compute_part(
    work: Work, gpu: Gpu, images: range, staging: Staging, threads: int, most_images: int | None
) -> Outcome:
    """Do these images of the work, in chunks of at most `most_images`."""
    with contextlib.ExitStack() as stack:
        division, lanes = _reserve(stack, work, gpu, staging, most_images)
        ring = Ring(work, division.layout, lanes, staging.load, threads)
        start = staging.clock()
        outcome = ring.run(division.chunks(images))
        outcome.seconds = staging.clock() - start
        return outcome


def _reserve(
    stack: contextlib.ExitStack, work: Work, gpu: Gpu, staging: Staging, most_images: int | None
) -> tuple[Division, list[Lane]]:
    """A division and lanes for it, held until the stack is closed, as is the active GPU."""
    stack.enter_context(gpu.staging)
    stack.enter_context(gpu.active())
    most = staging.most_bytes or gpu.memory_bytes
    # Where no memory has to be made, nobody asks how much is free: that takes 65 us.
    wanted = divide(work, gpu, most, _MOST_LANES, most_images)
    sizes = (wanted.layout.device_bytes, wanted.layout.host_bytes)
    ready = stack.enter_context(gpu.ready_lanes(wanted.lanes, *sizes, most))
    if ready:
        return wanted, ready
    budget = staging.budget(gpu)
    while True:
        division = divide(work, gpu, budget, _MOST_LANES, most_images)
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
