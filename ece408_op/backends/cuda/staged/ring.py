"""A staged call's chunks on one GPU: one thread moves them through a ring of lanes.

All GPU work is asynchronous: while the host copies one chunk with all cores, the other lanes'
chunks use both directions of the bus and the GPU. A single thread suffices and never waits for
another one to release Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import GpuFailed
from ...cpu.native import Copy, copy, populate
from ..kernel_plan import Plan
from ..runtime import page_locked
from ..runtime.device import COMPUTED, COPIED_OUT, Gpu, Lane
from ..work import OVER_BATCH, Work, shape_of
from .chunk_layout import Layout

# Memory touched in advance: enough huge pages to keep all cores busy.
_MADE_AHEAD = 64 << 20

Interval = tuple[float, float]
Loader = Callable[[Gpu, Plan], Any]


@dataclass
class Outcome:
    """Results of chunks: intervals of copies and kernels, plans used, sums over the batch by role,
    and total seconds."""

    copies: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.copies += other.copies
        self.kernels += other.kernels
        self.plans += other.plans
        for role, values in other.sums.items():
            self.add_sum(role, values)

    def add_sum(self, role: str, values: np.ndarray) -> None:
        self.sums[role] = self.sums.get(role, 0.0) + values


@dataclass(frozen=True)
class _Move:
    """A copy between a caller's array and a lane: the caller's address of image 0 and bytes per
    image, the offset in the lane's memory, the bytes of a chunk, and whether the caller's array is
    page-locked, so that the GPU accesses it directly."""

    address: int
    stride: int
    offset: int
    nbytes: int
    is_reached: bool

    def at(self, image: int) -> int:
        return self.address + image * self.stride

    def filling(self, lane: Lane, first: int) -> Copy:
        """Return the host copy to page-locked memory for the chunk that starts at image `first`."""
        return lane.host + self.offset, self.at(first), self.nbytes

    def emptying(self, lane: Lane, first: int) -> Copy:
        """Return the host copy of results from page-locked memory to the caller's array."""
        return self.at(first), lane.host + self.offset, self.nbytes


@dataclass(frozen=True)
class _Size:
    """Bytes of a chunk on the device and on the host."""

    inputs: tuple[_Move, ...]
    outputs: tuple[_Move, ...]
    loaded: tuple[Any, ...]


@dataclass(frozen=True)
class _Chunk:
    """A chunk that starts at image `first`, in its lane."""

    lane: Lane
    size: _Size
    first: int

    @property
    def results(self) -> list[_Move]:
        """The results that the host copies to the caller's arrays."""
        return [move for move in self.size.outputs if move.stride and not move.is_reached]

    @property
    def copied(self) -> list[_Move]:
        """The inputs that the host copies from the caller's arrays."""
        return [move for move in self.size.inputs if not move.is_reached]

    def reached(self, move: _Move) -> int | None:
        """Return the caller's address of the chunk if the GPU accesses it directly, else `None`."""
        return move.at(self.first) if move.is_reached else None


class Ring:
    """The part of a staged call that one GPU computes, on lanes of its own; `threads` host threads
    copy."""

    def __init__(
        self, work: Work, layout: Layout, lanes: Sequence[Lane], load: Loader, threads: int
    ) -> None:
        self._work = work
        self._layout = layout
        self._lanes = lanes
        self._gpu = lanes[0].gpu
        self._load = load
        self._threads = threads
        # By address of an output: the image up to which its pages have been touched.
        self._made: dict[int, int] = {}
        # End of the part (one past its last image).
        self._end = 0
        self._summed = [role for role in work.outputs if role not in OVER_BATCH]
        self._adds = any(role in work.inputs for role in work.outputs)

    def run(self, chunks: Sequence[tuple[int, int]]) -> Outcome:
        """Compute these consecutive chunks, given as first image and number of images."""
        self._end = sum(chunks[-1])
        sizes = {images: self._size(images) for images in dict.fromkeys(n for _, n in chunks)}
        outcome = Outcome(plans=[each.plan for s in sizes.values() for each in s.loaded])
        under_way: deque[_Chunk] = deque()
        with _held(sizes.values()), self._ended():
            self._lanes[0].start_clock()
            constants = self._constants()
            for number, (first, images) in enumerate(chunks):
                lane = self._lanes[number % len(self._lanes)]
                is_new = number < len(self._lanes)
                if is_new:
                    self._send(constants, lane)
                ended = None if is_new else under_way.popleft()
                begun = _Chunk(lane, sizes[images], first)
                self._turn(ended, begun, outcome)
                under_way.append(begun)
            while under_way:
                self._turn(under_way.popleft(), None, outcome)
        return outcome

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """If the block fails, wait for all enqueued work, which may write to the caller's
        arrays."""
        try:
            yield
        except BaseException:
            for lane in self._lanes:
                with contextlib.suppress(GpuFailed):
                    lane.drain()
            raise

    def _turn(self, ended: _Chunk | None, begun: _Chunk | None, outcome: Outcome) -> None:
        """Wait for the chunk in a lane, take its results, and start another one in the same lane.
        The host copies of both are one call, because each call wakes all threads; if results are
        accumulated they are two, as both use the same page-locked memory."""
        results: list[Copy] = []
        inputs: list[Copy] = []
        if ended:
            self._wait(ended)
            results = [move.emptying(ended.lane, ended.first) for move in ended.results]
        if begun:
            inputs = [move.filling(begun.lane, begun.first) for move in begun.copied]
        for copies in (results, inputs) if self._adds else ([*results, *inputs],):
            if copies:
                copy(copies, self._threads)
        if ended:
            self._account(ended.lane, outcome)
        if begun:
            self._begin(begun)

    def _begin(self, chunk: _Chunk) -> None:
        """Enqueue a chunk's work on the GPU; its inputs are in page-locked memory."""
        lane, size = chunk.lane, chunk.size
        pointers = {role: lane.device + at for role, at in self._layout.offsets.items()}
        lane.mark_bringing()
        for move in size.inputs:
            lane.bring(move.offset, move.nbytes, chunk.reached(move))
        lane.brought()
        for each in size.loaded:
            lane.launch(each, pointers)
        lane.mark(COMPUTED)
        for move in size.outputs:
            lane.copy_out(move.offset, move.nbytes, chunk.reached(move))
        lane.mark(COPIED_OUT)

    def _wait(self, chunk: _Chunk) -> None:
        """Wait for a chunk; meanwhile touch pages for later results."""
        for move in chunk.results:
            self._make(move, chunk.first)
        chunk.lane.rest()

    def _account(self, lane: Lane, outcome: Outcome) -> None:
        """Record the sums and times of the completed chunk in a lane."""
        for role in self._summed:
            address = lane.host + self._layout.offsets[role]
            outcome.add_sum(role, array_at(self._work, role, address).astype(np.float64))
        begin, copied_in, computed, copied_out = lane.times(self._lanes[0])
        outcome.copies += [(begin, copied_in), (computed, copied_out)]
        outcome.kernels.append((copied_in, computed))

    def _make(self, move: _Move, first: int) -> None:
        """Touch the pages of results for the chunk that starts at image `first` and some later
        ones, if the caller's array is fresh. The threads of other GPUs touch their own parts."""
        made = self._made.get(move.address, first)
        end = first + move.nbytes // move.stride
        if made < end:
            end = min(end + _MADE_AHEAD // move.stride, self._end)
            populate(move.at(made), (end - made) * move.stride, self._threads)
            self._made[move.address] = end

    def _constants(self) -> list[_Move]:
        """Copy the arrays that all chunks share to the first lane's page-locked memory."""
        shared = [self._move(role, 1) for role in self._work.inputs if role not in OVER_BATCH]
        if shared:
            copy([move.filling(self._lanes[0], 0) for move in shared], self._threads)
        return shared

    def _send(self, constants: Sequence[_Move], lane: Lane) -> None:
        """Enqueue the copies of the shared arrays to a lane's memory on the GPU."""
        for move in constants:
            lane.copy_in(move.offset, move.nbytes, self._lanes[0].host + move.offset)

    def _size(self, images: int) -> _Size:
        work = self._work
        return _Size(
            inputs=tuple(self._move(r, images) for r in work.inputs if r in OVER_BATCH),
            outputs=tuple(self._move(role, images) for role in work.outputs),
            loaded=tuple(self._load(self._gpu, plan) for plan in work.plans(self._gpu, images)),
        )

    def _move(self, role: str, images: int) -> _Move:
        work = self._work
        stride = work.nbytes(role, 1) if role in OVER_BATCH else 0
        address, offset = work.addresses[role], self._layout.offsets[role]
        return _Move(address, stride, offset, work.nbytes(role, images), is_reached(work, role))


def is_reached(work: Work, role: str) -> bool:
    """Return whether the GPU accesses the caller's array of a batched role directly."""
    if page_locked.pool.is_empty or role not in OVER_BATCH or role not in work.addresses:
        return False
    return page_locked.pool.covers(work.addresses[role], work.nbytes(role, work.problem.batch))


@contextlib.contextmanager
def _held(sizes: Iterable[_Size]) -> Iterator[None]:
    """Lock the modules that have constants against other calls; the chunks of this call use equal
    ones."""
    loaded = [each for size in sizes for each in size.loaded if each.plan.constants]
    with contextlib.ExitStack() as stack:
        for lock in {id(each.lock): each.lock for each in loaded}.values():
            stack.enter_context(lock)
        yield


def array_at(work: Work, role: str, address: int) -> np.ndarray:
    """Return the memory at an address as the array of a role without a batch axis."""
    memory = (ctypes.c_ubyte * work.nbytes(role, 1)).from_address(address)
    flat = np.ctypeslib.as_array(memory).view(work.problem.dtype)
    return flat.reshape(shape_of(work.problem, role))
