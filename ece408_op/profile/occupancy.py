"""Occupancy: warps of a kernel on a multiprocessor as a fraction of the maximum.

The rules are those of "Multiprocessor Level" in NVIDIA's occupancy calculator: warps get registers
in units of 256 from one of four equal parts of the register file, blocks get shared memory in units
of 128 bytes, minus the system's reserve.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.cuda.kernel_plan import divide_up
from ..errors import NoUsableGpu

_WARP = 32
_REGISTER_UNIT = 256
_REGISTER_FILES = 4
_SHARED_UNIT = 128


@dataclass(frozen=True)
class Limits:
    """Limits of one multiprocessor: resident threads and blocks, 32-bit registers, and bytes of
    shared memory, of which the system takes `reserved` per block."""

    threads: int
    blocks: int
    registers: int
    shared: int
    reserved: int


# For the GPUs that kernels are compiled for: "Technical Specifications per Compute Capability" in
# the CUDA programming guide.
KNOWN = {
    "sm_75": Limits(1024, 16, 1 << 16, 64 << 10, 0),
    "sm_80": Limits(2048, 32, 1 << 16, 164 << 10, 1 << 10),
    "sm_86": Limits(1536, 16, 1 << 16, 100 << 10, 1 << 10),
    "sm_89": Limits(1536, 24, 1 << 16, 100 << 10, 1 << 10),
    "sm_90": Limits(2048, 32, 1 << 16, 228 << 10, 1 << 10),
    "sm_100": Limits(2048, 32, 1 << 16, 228 << 10, 1 << 10),
    "sm_120": Limits(1536, 24, 1 << 16, 100 << 10, 1 << 10),
}
# Attributes of cuDeviceGetAttribute, in the order of `Limits`.
_ATTRIBUTES = (39, 106, 82, 81, 111)


@functools.cache
def limits(device: int) -> Limits:
    """Return the limits of GPU number `device`. Raises `NoUsableGpu` if the driver lacks them."""
    cuda = ctypes.CDLL("libcuda.so.1")
    values = []
    for field, attribute in zip(dataclasses.fields(Limits), _ATTRIBUTES):
        value = ctypes.c_int()
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if status:
            raise NoUsableGpu(
                f"GPU {device} does not tell its {field.name} (cuDeviceGetAttribute gives "
                f"{status}); is its driver older than CUDA 11?"
            )
        values.append(value.value)
    return Limits(*values)


def occupancy(kernel: Mapping[str, Any], gpu: Limits) -> float:
    """Return the occupancy (0 to 1) of a kernel, given as the details of an activity."""
    threads = kernel["block"][0] * kernel["block"][1] * kernel["block"][2]
    warps = divide_up(threads, _WARP)
    of_warp = _rounded_up(kernel["registers"] * _WARP, _REGISTER_UNIT)
    fitting_warps = gpu.registers // _REGISTER_FILES // max(1, of_warp) * _REGISTER_FILES
    shared = kernel["static_shared"] + kernel["dynamic_shared"] + gpu.reserved
    blocks = min(
        gpu.blocks,
        gpu.threads // (warps * _WARP),
        fitting_warps // warps,
        gpu.shared // max(1, _rounded_up(shared, _SHARED_UNIT)),
    )
    return blocks * warps * _WARP / gpu.threads


def _rounded_up(count: int, unit: int) -> int:
    return divide_up(count, unit) * unit
