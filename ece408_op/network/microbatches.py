"""Microbatches: the first steps of a chunk run on a few images while the others are being copied.

Otherwise a GPU with nothing else to do waits until all images of a batch have been copied. This
module chooses the steps that run early and the microbatch size.
"""

from __future__ import annotations

from collections.abc import Callable

from .host_arrays import ITEM_BYTES
from .values import ARENA, OUTPUT, Early, Step, Steps

# Approximate bytes of a microbatch's images.
MICROBATCH_BYTES = 4 << 20
# FLOPs that a GPU computes while one byte is copied: about 40 TFLOP/s over 50 GB/s.
_FLOPS_PER_BYTE = 800


def early(steps: Steps, image_bytes: int, few: Callable[[int], Steps]) -> Early | None:
    """Return the steps to run while images arrive, or `None` if there are none. An image has
    `image_bytes`; `few` returns the steps for fewer images, by the same kernels.

    Steps are early until their computing time reaches the time of the copies, or until results are
    smaller than the copied images.
    """
    microbatches = min(steps.images, -(-steps.images * image_bytes // MICROBATCH_BYTES))
    if not steps.divisible or microbatches < 2:
        return None
    images = -(-steps.images // microbatches)
    found: list[Step] = []
    touched: set[int] = set()
    flops = 0
    for step, part in zip(steps.for_images, few(images).for_images):
        y = step.arrays["y"]
        if ITEM_BYTES[y.dtype] * y.per_image < image_bytes or not _repeatable(step, touched):
            break
        if not _alike(step, part, steps.images, images):
            break
        found.append(part._replace(arrays=step.arrays))
        touched |= {id(value.buffer) for value in step.arrays.values()}
        flops += part.problem.flops if part.problem else 0
        if flops >= _FLOPS_PER_BYTE * images * image_bytes:
            break
    return Early(images, found) if found else None


def _repeatable(step: Step, touched: set[int]) -> bool:
    """Return whether the step overwrites none of its inputs and accumulates nothing, so that it may
    run twice on images that two microbatches have in common."""
    buffers = [id(value.buffer) for value in step.arrays.values()]
    y = step.arrays["y"].buffer
    fresh = buffers.count(id(y)) == 1 and id(y) not in touched
    return fresh and y.kind in (ARENA, OUTPUT)


def _alike(step: Step, part: Step, all_images: int, images: int) -> bool:
    """Return whether `part` computes for fewer images what `step` computes for all."""
    one, other = step.plan, part.plan
    if not one.has_code_of(other) or other.workspace_bytes > one.workspace_bytes:
        return False
    if step.arrays.keys() != part.arrays.keys():
        return False
    for name, value in step.arrays.items():
        few = part.arrays[name]
        expected = value.shape if value.constant else (images, *value.shape[1:])
        if few.constant != value.constant or few.shape != expected:
            return False
        if not value.constant and value.shape[0] != all_images:
            return False
        if (few.offset, few.image, few.dtype) != (value.offset, value.image, value.dtype):
            return False
    return True
