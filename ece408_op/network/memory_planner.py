"""Device memory planner: arrays with disjoint lifetimes share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .values import ARENA, INPUT, LASTING, OUTPUT, SAVED, Buffer, Step, Steps, Value

# Arrays are aligned to this many bytes, as CUDA's allocations are.
_ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Places:
    """Offsets in bytes. A lane's memory holds inputs, outputs and intermediate arrays; its first
    `host_bytes` have a page-locked counterpart. Arrays that depend on weights alone are in separate
    memory of `lasting_bytes`, saved ones in memory of `saved_bytes`. `workspaces` maps a step's
    number to its workspace."""

    offsets: dict[int, int]
    workspaces: dict[int, int]
    host_bytes: int
    device_bytes: int
    lasting_bytes: int
    saved_bytes: int

    def of(self, buffer: Buffer) -> int:
        return self.offsets[id(buffer)]


@dataclass
class _Life:
    """The first and last step that use a block of memory, and its offset."""

    nbytes: int
    first: int
    last: int
    offset: int = 0


def places(steps: Steps, inputs: Iterable[Value]) -> Places:
    """Plan the memory of all arrays."""
    offsets: dict[int, int] = {}
    end = 0
    for value in (*inputs, *steps.outputs):
        if value.buffer.kind in (INPUT, OUTPUT) and id(value.buffer) not in offsets:
            offsets[id(value.buffer)] = end
            end = aligned(end + value.buffer.nbytes)
    computed = (step.arrays["y"].buffer for step in steps.for_weights)
    lasting = _in_order(computed, LASTING, offsets)
    passes = () if steps.forward is None else steps.for_images
    used = (value.buffer for step in passes for value in step.arrays.values())
    saved = _in_order(used, SAVED, offsets)
    early = len(steps.early.steps) if steps.early else 0
    lives, workspaces = _lives(steps.for_images, early)
    size = _pack([*lives.values(), *workspaces.values()])
    # Steps for weights run before there are images, so their workspace may overlap all arrays.
    size = max(size, *(step.plan.workspace_bytes for step in steps.for_weights), 0)
    offsets |= {key: end + life.offset for key, life in lives.items()}
    own = {number: end + life.offset for number, life in workspaces.items()}
    return Places(offsets, own, end, max(_ALIGNMENT, aligned(end + size)), lasting, saved)


def _in_order(buffers: Iterable[Buffer], kind: str, offsets: dict[int, int]) -> int:
    """Assign offsets to the buffers of a kind, which live at the same time; return the end."""
    end = 0
    for buffer in buffers:
        if buffer.kind == kind and id(buffer) not in offsets:
            offsets[id(buffer)] = end
            end = aligned(end + buffer.nbytes)
    return end


def _lives(steps: list[Step], early: int) -> tuple[dict[int, _Life], dict[int, _Life]]:
    """Return the lifetimes of arrays, by buffer, and of workspaces, by step. The first `early`
    steps count as one."""
    lives: dict[int, _Life] = {}
    workspaces = {}
    for place, step in enumerate(steps):
        number = max(0, place - early + 1)
        for value in step.arrays.values():
            if value.buffer.kind == ARENA:
                life = lives.setdefault(
                    id(value.buffer), _Life(value.buffer.nbytes, number, number)
                )
                life.last = number
        if step.plan.workspace_bytes:
            workspaces[place] = _Life(step.plan.workspace_bytes, number, number)
    return lives, workspaces


def _pack(lives: list[_Life]) -> int:
    """Assign offsets, largest first, each to the first gap that fits; return the end."""
    # What is placed, by the steps that use it.
    placed: defaultdict[int, list[_Life]] = defaultdict(list)
    for life in sorted(lives, key=lambda each: -each.nbytes):
        offset, steps = 0, range(life.first, life.last + 1)
        met = {id(other): other for step in steps for other in placed[step]}
        for other in sorted(met.values(), key=lambda each: each.offset):
            if offset + life.nbytes <= other.offset:
                break
            offset = max(offset, aligned(other.offset + other.nbytes))
        life.offset = offset
        for step in steps:
            placed[step].append(life)
    return max((life.offset + life.nbytes for life in lives), default=0)
