"""Running a CUDA kernel's plan on NumPy arrays between guard zones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from ..backends.cuda.kernel_plan import Plan
from ..backends.cuda.runtime import launcher
from ..backends.cuda.runtime.device import Gpu

_GUARD_BYTES = 512
_POISON = 0xFF  # NaN in every dtype


class StrayWrite(Exception):
    """A kernel wrote outside its output: to an input, or outside the arrays."""


def run(
    gpu: Gpu,
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    output: str,
    bare: bool = False,
    offset: int = 8,
) -> np.ndarray:
    """Run the plan and return the array `output`, whose given contents are its initial ones.

    Every array is on the GPU between guard zones, `offset` bytes after an aligned address, and the
    workspace holds NaN. With `bare` each is a separate allocation and the workspace is
    uninitialised, for tools that watch accesses.

    Raises `StrayWrite` when a guard zone or an input has changed, and the errors of compiling,
    loading and launching.
    """
    sizes = {name: array.nbytes for name, array in arrays.items()}
    if plan.workspace_bytes:
        sizes["workspace"] = plan.workspace_bytes
    memory = _separate(gpu, sizes) if bare else _guarded(gpu, sizes, offset)
    with gpu.active(), memory as pointers:
        for name, array in arrays.items():
            gpu.cuda.memcpy_htod(pointers[name], np.ascontiguousarray(array))
        loaded = launcher.load(gpu, plan)
        with loaded.lock, gpu.lane() as lane:
            lane.launch(loaded, pointers)
            lane.wait()
        return _read(gpu, pointers, arrays, output)


def _read(
    gpu: Gpu, pointers: Mapping[str, int], arrays: Mapping[str, np.ndarray], output: str
) -> np.ndarray:
    """Return the output; raise `StrayWrite` if anything else has changed."""
    for name, array in arrays.items():
        found = np.empty_like(array)
        gpu.cuda.memcpy_dtoh(found, pointers[name])
        if name == output:
            result = found
        elif found.tobytes() != array.tobytes():
            raise StrayWrite(f"the kernel wrote to its input {name}")
    return result


@contextlib.contextmanager
def _separate(gpu: Gpu, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    blocks = {name: gpu.cuda.mem_alloc(size) for name, size in sizes.items()}
    try:
        yield {name: int(block) for name, block in blocks.items()}
    finally:
        for block in blocks.values():
            block.free()


@contextlib.contextmanager
def _guarded(gpu: Gpu, sizes: Mapping[str, int], offset: int) -> Iterator[dict[str, int]]:
    """Return addresses in one poisoned block, each after a guard zone and `offset` bytes after an
    aligned one."""
    offsets, end = {}, _GUARD_BYTES
    for name, size in sizes.items():
        # The package allocates the workspace, aligned; users' arrays may be unaligned.
        offsets[name] = end if name == "workspace" else end + offset
        end += (size // _GUARD_BYTES + 3) * _GUARD_BYTES
    with gpu.lane(end) as lane:
        gpu.cuda.memset_d8(lane.device, _POISON, end)
        yield {name: lane.device + start for name, start in offsets.items()}
        everything = np.empty(end, np.uint8)
        gpu.cuda.memcpy_dtoh(everything, lane.device)
    for name, start in offsets.items():
        everything[start : start + sizes[name]] = _POISON
    stray = np.flatnonzero(everything != _POISON)
    if stray.size:
        distances = {name: int(stray[0]) - start for name, start in offsets.items()}
        raise StrayWrite(
            f"the kernel wrote outside its arrays, first {distances} bytes from their starts"
        )
