"""Limits of CUDA GPUs by compute capability (CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability")."""

from __future__ import annotations

from .kernel_plan import Capability

THREADS = 1024  # per block
REGISTERS = 65536  # per multiprocessor
CONSTANT_BYTES = 64 << 10
# Shared memory per block without opting in to more.
STATIC_SHARED_BYTES = 48 << 10
# Shared memory that CUDA reserves per block.
RESERVED_SHARED_BYTES = 1 << 10
# Shared memory per multiprocessor in KiB, where it exceeds the minimum.
_SHARED_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}
_LEAST_SHARED_KIB = 100
# The minimum over all GPUs that kernels with more than `STATIC_SHARED_BYTES` support.
LEAST_SHARED_BYTES = _LEAST_SHARED_KIB << 10


def shared_bytes(capability: Capability) -> int:
    """Return the shared memory per multiprocessor, from compute capability 8.0."""
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10


def sums_at_full_rate(capability: Capability) -> bool:
    """Return whether tensor cores run at full rate with half-precision inputs and float32 sums.

    GeForce and workstation GPUs run at half rate: three products for one are then no faster than
    float32 arithmetic.
    """
    return capability in _SHARED_KIB and capability != (8, 7)
