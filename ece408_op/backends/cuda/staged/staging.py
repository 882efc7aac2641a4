"""Staging of host arrays: chunks go through page-locked memory; copies overlap kernels.

The batch is split into chunks of images. Chunks take turns on a ring of lanes, each with its own
streams and memory (`ring.py`). For each chunk the host copies the inputs to page-locked memory and
enqueues the copy to the GPU, the kernels and the copy back; later it copies the results to the
caller's arrays.

With several GPUs, `load_balancer.py` assigns chunks to them by their measured speed. Chunk sizes
and the order of their completion are fixed, so results do not depend on which GPU is faster. Sums
over the batch are accumulated in float64, so their order shows only in float64 results: for these
all GPUs get equal numbers of chunks.

If the caller's arrays are in this package's page-locked memory (`runtime/page_locked.py`), the GPU
copies directly from and to them. Other arrays are not page-locked in place: their lifetime is
unknown, and a driver with a stale registration of freed memory would copy from and to the wrong
place.
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
from ..load_balancer import LoadBalancer, gpu_counts, ranges
from ..runtime import gpu_threads
from ..runtime.device import Gpu, Lane
from ..work import OVER_BATCH, Step, Work, done
from .chunk_layout import Division, divide
from .ring import Interval, Loader, Outcome, Ring, array_at, is_reached

# One lane being filled, one being emptied, and the rest on the bus and the GPU.
_MOST_LANES = 4
# Maximum number of partitions kept, by shape.
_MOST_KNOWN = 1024
# Calls that copy less use one GPU: it is nearly done before others have begun.
_SPLIT_FROM_BYTES = 32 << 20
# Without a setting, staging uses at most this fraction of a GPU's free memory.
_FRACTION_OF_FREE = 0.5


@dataclass(frozen=True)
class _Partition:
    """A call on several GPUs: images per chunk, and the load balancer (`None` for a single
    chunk)."""

    images: int
    balancer: LoadBalancer | None


@dataclass(frozen=True)
class Staging:
    """Settings and learned partitions of staging. `most_bytes` limits the GPU memory (`None`: half
    of the free memory); `threads` host threads copy; `load` loads a plan on the active GPU. Times
    for load balancing come from `clock`."""

    most_bytes: int | None
    threads: int
    load: Loader
    clock: Callable[[], float] = time.perf_counter
    _partitions: dict[Hashable, _Partition] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def budget(self, gpu: Gpu) -> int:
        """Return the bytes of the GPU's memory that may be used."""
        if self.most_bytes is not None:
            return self.most_bytes
        return int(_FRACTION_OF_FREE * (gpu.free_bytes() + gpu.reserved_bytes()))

    def partition(self, work: Work, gpus: Sequence[Gpu]) -> _Partition:
        """Return the partition for calls like this one. Raises `NotEnoughMemory`."""
        parts = (work.problem, work.steps, work.outputs, work.kernel, work.precision)
        # More GPUs may be faster if they access the caller's arrays directly.
        key = (*parts, *map(functools.partial(is_reached, work), sorted(OVER_BATCH)), *gpus)
        with self._lock:
            if key not in self._partitions:
                if len(self._partitions) == _MOST_KNOWN:
                    self._partitions.clear()
                self._partitions[key] = self._made(work, gpus)
            return self._partitions[key]

    def _made(self, work: Work, gpus: Sequence[Gpu]) -> _Partition:
        with gpus[0].active():
            division = divide(work, gpus[0], self.budget(gpus[0]), _MOST_LANES)
        batch, images = work.problem.batch, division.layout.images
        chunks = math.ceil(batch / images)
        most = min(len(gpus), chunks)
        tried = [most] if _must_be_equal(work) else gpu_counts(most)
        balancer = LoadBalancer(dict.fromkeys(tried, chunks)) if chunks > 1 else None
        return _Partition(images, balancer)


def compute(work: Work, gpus: Sequence[Gpu], staging: Staging) -> Done:
    """Compute work on host arrays with the GPUs; return when it is done.

    If less memory is available than budgeted, chunks become smaller.

    Raises `NotEnoughMemory`, `GpuFailed`, and the errors of loading a plan.
    """
    for role in work.outputs:
        if role in OVER_BATCH:
            ask_for_huge_pages(work.addresses[role], work.nbytes(role, work.problem.batch))
    outcomes = _compute_split(_without_sums(work), gpus, staging)
    _write_sums(work, outcomes)
    # GPUs work concurrently; the busiest one counts.
    busy = GpuTime(
        kernel_seconds=max(covered(outcome.kernels) for outcome in outcomes),
        copy_seconds=max(covered(outcome.copies) for outcome in outcomes),
    )
    return done(busy, (plan for outcome in outcomes for plan in outcome.plans))


def prepare(work: Work, gpus: Sequence[Gpu], staging: Staging) -> None:
    """Compile, load and allocate what `compute` will need. Raises what it raises."""
    whole = _without_sums(work)
    is_split = _can_be_split(whole, gpus)
    most = staging.partition(whole, gpus).images if is_split else None
    for gpu in gpus if is_split else gpus[:1]:
        with contextlib.ExitStack() as stack:
            division, _ = _reserve(stack, whole, gpu, staging, most)
            for images in {size for _, size in division.chunks(range(work.problem.batch))}:
                for plan in whole.plans(gpu, images):
                    staging.load(gpu, plan)


def _compute_split(work: Work, gpus: Sequence[Gpu], staging: Staging) -> list[Outcome]:
    """Compute the work on the best number of GPUs."""
    batch = work.problem.batch
    partition = staging.partition(work, gpus) if _can_be_split(work, gpus) else None
    if partition is None or partition.balancer is None:
        return [_compute_part(work, gpus[0], range(batch), staging, staging.threads, None)]
    assigned = partition.balancer.assign()
    threads = max(1, staging.threads // len(assigned))
    size = partition.images
    parts = [range(p.start * size, min(p.stop * size, batch)) for p in ranges(assigned)]
    start = staging.clock()
    outcomes = gpu_threads.run_all(
        [
            (
                gpu,
                functools.partial(
                    _compute_part, work, gpu, part, staging, threads, partition.images
                ),
            )
            for gpu, part in zip(gpus, parts)
        ]
    )
    seconds = staging.clock() - start
    if not _must_be_equal(work):
        partition.balancer.record(assigned, [outcome.seconds for outcome in outcomes], seconds)
    return outcomes


def _can_be_split(work: Work, gpus: Sequence[Gpu]) -> bool:
    """Return whether several GPUs, several images and enough bytes make splitting worthwhile."""
    if min(len(gpus), work.problem.batch) == 1:
        return False
    copied = sum(work.nbytes(role, work.problem.batch) for role in work.addresses)
    return copied >= _SPLIT_FROM_BYTES


def _must_be_equal(work: Work) -> bool:
    """Return whether results depend on the partition: float64 sums of float64 arrays do."""
    sums = any(role not in OVER_BATCH for role in work.outputs)
    return sums and work.problem.dtype == "float64"


def _without_sums(work: Work) -> Work:
    """Return the work with sums over the batch not accumulated: the host adds up the chunks'
    sums."""
    if all(role in OVER_BATCH for role in work.outputs):
        return work
    return dataclasses.replace(work, steps=tuple(Step(s.direction, False) for s in work.steps))


def _compute_part(
    work: Work, gpu: Gpu, images: range, staging: Staging, threads: int, most_images: int | None
) -> Outcome:
    """Compute these images of the work, in chunks of at most `most_images`."""
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
    """Reserve lanes for a division, held until the stack is closed, as is the active GPU."""
    stack.enter_context(gpu.staging)
    stack.enter_context(gpu.active())
    most = staging.most_bytes or gpu.memory_bytes
    # If the lanes have enough memory, skip the query of free memory, which takes 65 us.
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
    """Write the float64 sums of all lanes to the caller's arrays, or add them."""
    total = Outcome()
    for outcome in outcomes:
        total.add(outcome)
    accumulate = dict(zip(work.outputs, (step.accumulate for step in work.steps)))
    for role, values in total.sums.items():
        target = array_at(work, role, work.addresses[role])
        target[...] = values + target if accumulate[role] else values


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
