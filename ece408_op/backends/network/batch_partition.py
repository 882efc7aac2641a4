"""How a call's images are shared out over several GPUs, in chunks."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ... import settings
from ...errors import InvalidProblem, UnsupportedProblem
from ..cuda.load_balancer import LoadBalancer, ranges
from .inputs import Call
from .resident import Part, Resident

# Calls of different sizes, or with other settings, whose shares are remembered.
_MOST_KNOWN = 64


@dataclass(frozen=True)
class Partition:
    """A call that one GPU computes, or all that there are: then each has a program for `planned`
    images, and gets a number of chunks of `size` images."""

    whole: int
    planned: int
    size: int
    balancer: LoadBalancer

    def parts(self, assigned: Sequence[int]) -> list[Part]:
        """The part of each GPU, which gets so many chunks."""
        if len(assigned) == 1:
            return [whole(self.whole)]
        threads = max(1, settings.threads() // len(assigned))
        return [
            Part(
                range(p.start * self.size, min(p.stop * self.size, self.whole)),
                self.planned,
                threads,
            )
            for p in ranges(assigned)
        ]


def whole(images: int) -> Part:
    """All images of a call, for one GPU."""
    return Part(range(images), images, settings.threads())


class Partitions:
    """How calls of a network are cut; each is decided by the first call that is like it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Partition] = {}
        self._lock = threading.Lock()

    def of(self, call: Call, residents: Sequence[Resident]) -> Partition:
        """Raises what making a program raises."""
        keys = [each.machine.key for each in residents]
        key = (call.inputs, settings.precision(), settings.gpu_memory(), *keys)
        with self._lock:
            if key not in self._known:
                if len(self._known) == _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = _partition(call, residents)
            return self._known[key]


def _partition(call: Call, residents: Sequence[Resident]) -> Partition:
    images = call.inputs.images
    most = min(len(residents), images)
    planned = -(-images // max(1, most))
    size = _chunk(residents[0], call, planned) if most > 1 else 0
    if size == 0:
        return Partition(images, images, images, LoadBalancer({1: 1}))
    chunks = -(-images // size)
    return Partition(images, planned, size, LoadBalancer({1: 1, min(most, chunks): chunks}))


def _chunk(resident: Resident, call: Call, images: int) -> int:
    """The images of a chunk of so many; 0 if they cannot be computed without the others."""
    if any(array.shape[:1] != (call.inputs.images,) for array in call.outputs):
        return 0
    with resident.machine.lock, resident.machine.active():
        try:
            steps = resident.ready(call, images, images).program.steps
        except (UnsupportedProblem, InvalidProblem):
            return 0
    return steps.images if steps.divisible else 0
