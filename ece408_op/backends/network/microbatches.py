"""The first steps of a chunk on a few images at a time, while the others are still on their way.

A GPU that has nothing else to do would wait until all images of a batch have come over the bus. So
the first steps begin with the images that are there. How many steps, and on how many images at a
time, is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .values import ARENA, OUTPUT, Early, Step, Steps

# A piece's images take about so much.
MICROBATCH_BYTES = 4 << 20
# What a GPU computes while a byte comes over the bus, about: 40 TFLOP/s beside 50 GB/s.
_FLOPS_PER_BYTE = 800


def early(steps: Steps, image_bytes: int, few: Callable[[int], Steps]) -> Early | None:
    """What to do of these steps while images arrive, of which each takes `image_bytes`; `few` gives
    the steps for fewer images, by the same kernels. `None` if there is nothing to do early.

    They are the steps up to where a GPU has computed for as long as the copies take, or where an
    image has become smaller than what is copied of it.
    """
    microbatches = min(steps.images, -(-steps.images * image_bytes // MICROBATCH_BYTES))
    if not steps.divisible or microbatches < 2:
        return None
    images = -(-steps.images // microbatches)
    found: list[Step] = []
    touched: set[int] = set()
    flops = 0
    for step, part in zip(steps.for_images, few(images).for_images):
        if 4 * step.arrays["y"].per_image < image_bytes or not _repeatable(step, touched):
            break
        if not _alike(step, part, steps.images, images):
            break
        found.append(replace(part, arrays=step.arrays))
        touched |= {id(value.buffer) for value in step.arrays.values()}
        flops += part.problem.flops if part.problem else 0
        if flops >= _FLOPS_PER_BYTE * images * image_bytes:
            break
    return Early(images, found) if found else None


def _repeatable(step: Step, touched: set[int]) -> bool:
    """Whether the step leaves what it reads as it is, and adds to nothing: then it can be done
    twice to the images that two microbatches have in common."""
    buffers = [id(value.buffer) for value in step.arrays.values()]
    y = step.arrays["y"].buffer
    fresh = buffers.count(id(y)) == 1 and id(y) not in touched
    return fresh and y.kind in (ARENA, OUTPUT)


def _alike(step: Step, part: Step, all_images: int, images: int) -> bool:
    """Whether the second step does to fewer images what the first one does to all."""
    one, other = step.plan, part.plan
    same_code = (one.kernel, one.defines) == (other.kernel, other.defines)
    if not same_code or other.constants or other.workspace_bytes > one.workspace_bytes:
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
