"""Division of a call on host arrays into chunks, and the memory layout of a chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ....errors import NotEnoughMemory
from ..kernel_plan import Target
from ..work import OVER_BATCH, Work

# Arrays are aligned to this many bytes, as CUDA's allocations are.
_ALIGNMENT = 256
# A copy of this size hides its start-up cost.
_LARGEST_CHUNK_BYTES = 32 << 20
_SMALLEST_CHUNK_BYTES = 1 << 20
# With fewer lanes one direction of the bus, or the GPU, would be idle.
_LANES_TO_OVERLAP = 4


@dataclass(frozen=True)
class Layout:
    """The layout of a chunk of `images` in a lane's memory: offsets by role, in bytes.

    Page-locked memory has the same layout without the workspace, which comes last.
    """

    images: int
    offsets: Mapping[str, int]
    host_bytes: int
    device_bytes: int

    @classmethod
    def of(cls, work: Work, images: int, gpu: Target) -> Layout:
        offsets, end = {}, 0
        for role in work.addresses:
            offsets[role] = end
            end = _aligned(end + work.nbytes(role, images))
        workspace = max(plan.workspace_bytes for plan in work.plans(gpu, images))
        return cls(images, {**offsets, "workspace": end}, end, _aligned(end + workspace))


@dataclass(frozen=True)
class Division:
    """A call divided into chunks of `layout.images`, of which the last may be smaller, and the
    number of lanes."""

    lanes: int
    layout: Layout

    @property
    def device_bytes(self) -> int:
        """Bytes on the GPU for all lanes."""
        return self.lanes * self.layout.device_bytes

    def chunks(self, images: range) -> list[tuple[int, int]]:
        """Return the first image and the number of images of each chunk of `images`."""
        size = self.layout.images
        return [(at, min(size, images.stop - at)) for at in images[::size]]


def divide(
    work: Work, gpu: Target, budget: int, most_lanes: int, most_images: int | None = None
) -> Division:
    """Return the chunks for a GPU with a budget of `budget` bytes: large, but enough of them to
    overlap, and with at most `most_images` images each.

    Raises `NotEnoughMemory` when not even one image fits.
    """
    batch = work.problem.batch
    images = min(_wanted_images(work, most_lanes), most_images or batch)
    while True:
        layout = Layout.of(work, images, gpu)
        wanted = min(most_lanes, -(-batch // images))
        lanes = min(wanted, budget // layout.device_bytes)
        small = layout.host_bytes <= _SMALLEST_CHUNK_BYTES
        enough = min(wanted, _LANES_TO_OVERLAP) if small else wanted
        if lanes >= enough or (images == 1 and lanes >= 1):
            return Division(lanes, layout)
        if images == 1:
            raise NotEnoughMemory(
                f"one image of {work.problem} takes {layout.device_bytes} bytes on the GPU, and "
                f"{budget} may be used; allow more (ECE408_GPU_MEMORY) or free memory of the GPU"
            )
        images = -(-images // 2)


def _wanted_images(work: Work, most_lanes: int) -> int:
    """Return the images per chunk without a memory limit; chunks have about equal sizes."""
    batch = work.problem.batch
    one = sum(work.nbytes(role, 1) for role in work.addresses if role in OVER_BATCH)
    target = min(max(one * batch // (2 * most_lanes), _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
    parts = math.ceil(batch / max(1, target // one))
    return math.ceil(batch / parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
