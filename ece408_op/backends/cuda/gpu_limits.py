"""What CUDA GPUs have, by compute capability (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""

from __future__ import annotations

from .kernel_plan import Capability

THREADS = 1024  # of a block
REGISTERS = 65536  # of a processor
CONSTANT_BYTES = 64 << 10
# Shared memory that a block can declare, or have without asking for more.
STATIC_SHARED_BYTES = 48 << 10
# Shared memory that each block takes for itself.
RESERVED_SHARED_BYTES = 1 << 10
# Shared memory of a processor in KiB, where it is more than the least.
_SHARED_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228}
_LEAST_SHARED_KIB = 100
# The least of all GPUs that kernels with more than `STATIC_SHARED_BYTES` have code for.
LEAST_SHARED_BYTES = _LEAST_SHARED_KIB << 10


def shared_bytes(capability: Capability) -> int:
    """Shared memory of a processor, from compute capability 8.0."""
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10


def sums_at_full_rate(capability: Capability) -> bool:
    """Whether tensor cores multiply half precision as fast with sums in float32 as in half.

    Those of GeForce and workstation GPUs have half that rate: three products for one are then no
    faster than float32 arithmetic.
    """
    return capability in _SHARED_KIB and capability != (8, 7)
