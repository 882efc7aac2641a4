"""One lane's share of a staged call: its chunks one after the other, on a thread of its own.

All threads share Python's lock, so what every chunk of one size needs is looked up once.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chunks import Layout
from .device import BEGIN, COMPUTED, COPIED_IN, COPIED_OUT, Gpu, Lane
from .plan import Plan
from .work import OVER_BATCH, Work, shape_of

Interval = tuple[float, float]
Loader = Callable[[Gpu, Plan], Any]


@dataclass
class Outcome:
    """What lanes leave behind: when copies and kernels ran, and sums over the batch by role."""

    copies: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.copies += other.copies
        self.kernels += other.kernels
        for role, values in other.sums.items():
            self.sums[role] = self.sums.get(role, 0.0) + values


@dataclass(frozen=True)
class _Move:
    """One array's way between the caller and a lane: the caller's address for image 0 and bytes
    from image to image, the offset in the lane's memory, and the bytes of a chunk."""

    address: int
    stride: int
    offset: int
    nbytes: int

    def fill(self, lane: Lane, first: int) -> None:
        """Copy the chunk that begins with image `first` into page-locked memory."""
        ctypes.memmove(lane.host + self.offset, self.address + first * self.stride, self.nbytes)

    def empty(self, lane: Lane, first: int) -> None:
        """Copy a chunk of results from page-locked memory to the caller's array."""
        ctypes.memmove(self.address + first * self.stride, lane.host + self.offset, self.nbytes)


@dataclass(frozen=True)
class _Size:
    """What every chunk of so many images takes."""

    inputs: tuple[_Move, ...]
    outputs: tuple[_Move, ...]
    loaded: tuple[Any, ...]
    locks: tuple[Any, ...]


class LaneRun:
    """The part of a staged call that one lane does."""

    def __init__(self, work: Work, layout: Layout, lane: Lane, load: Loader) -> None:
        self._work = work
        self._layout = layout
        self._lane = lane
        self._load = load
        self._pointers = {role: lane.device + at for role, at in layout.offsets.items()}
        self._summed = [role for role in work.outputs if role not in OVER_BATCH]

    def run(self, chunks: Iterable[tuple[int, int]], clock: Lane) -> Outcome:
        """Do these chunks, given as first image and number of images; times are by `clock`."""
        outcome, sizes = Outcome(), {}
        with self._lane.gpu.active():
            self._send_constants()
            for first, images in chunks:
                if images not in sizes:
                    sizes[images] = self._size(images)
                self._run_chunk(sizes[images], first)
                self._note_times(outcome, clock)
                for role in self._summed:
                    found = self._in_lane(role).astype(np.float64)
                    outcome.sums[role] = outcome.sums.get(role, 0.0) + found
        return outcome

    def _run_chunk(self, size: _Size, first: int) -> None:
        lane = self._lane
        for move in size.inputs:
            move.fill(lane, first)
        with contextlib.ExitStack() as stack:
            for lock in size.locks:
                stack.enter_context(lock)
            lane.mark(BEGIN)
            for move in size.inputs:
                lane.copy_in(move.offset, move.nbytes)
            lane.mark(COPIED_IN)
            for each in size.loaded:
                lane.launch(each, self._pointers)
            lane.mark(COMPUTED)
            for move in size.outputs:
                lane.copy_out(move.offset, move.nbytes)
            lane.mark(COPIED_OUT)
            lane.rest()
        for move in size.outputs:
            if move.stride:
                move.empty(lane, first)

    def _send_constants(self) -> None:
        """Bring to the GPU what all chunks share."""
        for role in self._work.inputs:
            if role not in OVER_BATCH:
                move = self._move(role, 1)
                move.fill(self._lane, 0)
                self._lane.copy_in(move.offset, move.nbytes)

    def _size(self, images: int) -> _Size:
        work, gpu = self._work, self._lane.gpu
        loaded = tuple(self._load(gpu, plan) for plan in work.plans(gpu, images))
        return _Size(
            inputs=tuple(self._move(r, images) for r in work.inputs if r in OVER_BATCH),
            outputs=tuple(self._move(role, images) for role in work.outputs),
            loaded=loaded,
            # Other lanes' launches would overwrite a module's constants.
            locks=tuple(each.lock for each in loaded if each.plan.constants),
        )

    def _move(self, role: str, images: int) -> _Move:
        work = self._work
        stride = work.nbytes(role, 1) if role in OVER_BATCH else 0
        offset = self._layout.offsets[role]
        return _Move(work.addresses[role], stride, offset, work.nbytes(role, images))

    def _note_times(self, outcome: Outcome, clock: Lane) -> None:
        begin, copied_in, computed, copied_out = self._lane.times(clock)
        outcome.copies += [(begin, copied_in), (computed, copied_out)]
        outcome.kernels.append((copied_in, computed))

    def _in_lane(self, role: str) -> np.ndarray:
        return array_at(self._work, role, self._lane.host + self._layout.offsets[role])


def array_at(work: Work, role: str, address: int) -> np.ndarray:
    """The memory at an address as the array of a role that is not cut along the batch."""
    memory = (ctypes.c_ubyte * work.nbytes(role, 1)).from_address(address)
    flat = np.ctypeslib.as_array(memory).view(work.problem.dtype)
    return flat.reshape(shape_of(work.problem, role))
