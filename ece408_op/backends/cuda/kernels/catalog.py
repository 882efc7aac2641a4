"""Catalog of CUDA kernels, and the default choice for a problem."""

from __future__ import annotations

from ....errors import InvalidSetting, UnsupportedProblem
from ....problem import ConvProblem
from ...kernel_file import device_of
from ..kernel_plan import Capability, Kernel
from . import (
    copied_images,
    declared,
    depthwise,
    general,
    half_strips,
    implicit_gemm_fused,
    implicit_gemm_prepacked,
    implicit_gemm_prepacked_backward_weight,
    implicit_gemm_simt_backward_weight,
    one_channel,
    pointwise_half,
    pointwise_simt,
    register_tiles,
    runtime_shapes,
    tensor_cores,
)

_FAMILIES = (
    *(runtime_shapes, register_tiles, tensor_cores, one_channel, copied_images, half_strips),
    *(implicit_gemm_prepacked, implicit_gemm_prepacked_backward_weight, implicit_gemm_fused),
    *(pointwise_half, pointwise_simt, implicit_gemm_simt_backward_weight, depthwise, general),
)


def _number(kernel: Kernel) -> float:
    """Return its rung on the ladder; general kernels have none."""
    number = kernel.name.split("_")[0]
    return int(number) if number.isdigit() else float("inf")


# The ladder in order, then the general kernels.
KERNELS = tuple(sorted((each for family in _FAMILIES for each in family.KERNELS), key=_number))
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
_BY_RANK = sorted(
    (kernel for kernel in KERNELS if kernel.rank is not None),
    key=lambda kernel: kernel.rank or 0,
)


def find(name: str) -> Kernel | None:
    """Return the kernel of this name, or `None`."""
    return _BY_NAME.get(name)


def get(name: str) -> Kernel:
    """Return the kernel of this name or in this file. Raises `InvalidSetting` for an unknown
    one."""
    if device_of(name) == "cuda":
        return declared.kernel(name)
    if name not in _BY_NAME:
        raise InvalidSetting(f"unknown CUDA kernel {name!r}; there are: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


# FLOPs for each byte of memory traffic below which float32's accuracy costs no time: it takes three
# products, and an H200 computes 165 FLOPs of single ones in the time of a byte, at best.
_FLOPS_PER_BYTE = 40


def _pays(kernel: Kernel, problem: ConvProblem, capability: Capability) -> bool:
    """Whether the kernel should be faster than those of a higher rank, and is as exact as float32
    or could be faster for not being so."""
    is_limited_by_memory = problem.flops <= _FLOPS_PER_BYTE * problem.bytes
    if kernel.precision in ("tf32", "float16") and is_limited_by_memory:
        return False
    return kernel.family.pays(problem, capability)


def default(
    problem: ConvProblem, direction: str, capability: Capability, precision: str = "float32"
) -> Kernel:
    """Return the kernel that is expected to be the fastest for the problem, without measurements.

    `direction` is "forward", "backward_data", "backward_weight" or "backward_bias"; `precision`,
    one of `problem.PRECISIONS`, is the minimum precision of its results.

    Raises `UnsupportedProblem` on a GPU that no kernel supports.
    """
    reason: str | None = f"there is no kernel for {direction}"
    for kernel in _BY_RANK:
        if kernel.direction == direction and kernel.permitted(precision, problem):
            reason = kernel.why_not(problem, capability)
            if reason is None and _pays(kernel, problem, capability):
                return kernel
    raise UnsupportedProblem(f"no CUDA kernel computes {direction} of {problem}: {reason}")
