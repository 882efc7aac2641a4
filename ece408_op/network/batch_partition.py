"""Partition of a batch into chunks for several GPUs."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .. import settings
from ..backends.cuda.load_balancer import LoadBalancer, ranges
from ..errors import InvalidProblem, UnsupportedProblem
from .inputs import Call
from .resident import Part, Resident

# Number of partitions kept, by input sizes and settings.
_MOST_KNOWN = 64


@dataclass(frozen=True)
class Partition:
    """The partition of one call. If several GPUs compute it, each has a program for `planned`
    images and computes some of the chunks of `size` images; one GPU computes all `whole` images."""

    whole: int
    planned: int
    size: int
    balancer: LoadBalancer

    def parts(self, assigned: Sequence[int]) -> list[Part]:
        """Return each GPU's part, given its number of chunks."""
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
    """Return the part that holds all images, for a single GPU."""
    return Part(range(images), images, settings.threads())


class Partitions:
    """The partitions of a network's calls; the first call of its kind determines each."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Partition] = {}
        self._lock = threading.Lock()

    def of(self, call: Call, residents: Sequence[Resident]) -> Partition:
        """Return the partition for calls like this one. Raises what building a program raises."""
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
    """Return the images per chunk for `images` images, or 0 if the batch cannot be split."""
    if any(array.shape[:1] != (call.inputs.images,) for array in call.outputs):
        return 0
    with resident.machine.lock, resident.machine.active():
        try:
            steps = resident.ready(call, images, images).program.steps
        except (UnsupportedProblem, InvalidProblem):
            return 0
    return steps.images if steps.divisible else 0
