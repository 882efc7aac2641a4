"""Which CUDA kernels there are, for which problems, and which is the one to use."""

from __future__ import annotations

from ....errors import InvalidSetting, UnsupportedProblem
from ....problem import ConvProblem
from ..plan import Capability, ConstantCopy, Kernel, Launch, Plan
from . import (
    copied_images,
    general,
    half_strips,
    one_channel,
    register_tiles,
    runtime_shapes,
    tensor_cores,
)

__all__ = ["KERNELS", "Capability", "ConstantCopy", "Kernel", "Launch", "Plan", "default", "get"]

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
_TF32_ARCHITECTURES = ARCHITECTURES[1:]
_COPY_ENGINE_ARCHITECTURES = ("90", "100", "120")

KERNELS = (
    Kernel(
        name="1_naive",
        source="1_naive.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="a thread for each output element, everything from global memory",
        rejection=runtime_shapes.not_plain,
        planner=runtime_shapes.naive,
    ),
    Kernel(
        name="2_constant_weights",
        source="2_constant_weights.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="weights in constant memory",
        rejection=runtime_shapes.too_many_weights,
        planner=runtime_shapes.constant_weights,
    ),
    Kernel(
        name="3_shared_tiles",
        source="3_shared_tiles.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="tiles of the image and their halo in shared memory",
        rejection=runtime_shapes.too_large_tiles,
        planner=runtime_shapes.shared_tiles,
    ),
    Kernel(
        name="4_im2col",
        source="4_im2col.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="explicit im2col, then a tiled matrix product",
        rejection=runtime_shapes.too_large_columns,
        planner=runtime_shapes.im2col,
    ),
    Kernel(
        name="5_implicit_gemm",
        source="5_implicit_gemm.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="the same matrix product, its columns gathered from the image on the fly",
        rejection=runtime_shapes.not_plain,
        planner=runtime_shapes.implicit_gemm,
    ),
    Kernel(
        name="6_register_tiles",
        source="6_register_tiles.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="rows by filters in each thread's registers, shapes known at compile time",
        rejection=register_tiles.too_large_kernel,
        planner=register_tiles.register_tiles,
    ),
    Kernel(
        name="7_channel_tree",
        source="7_channel_tree.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="channels split within a block and reduced by a tree",
        rejection=register_tiles.one_input_channel,
        planner=register_tiles.channel_tree,
    ),
    Kernel(
        name="8_channel_atomics",
        source="8_channel_atomics.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="channels split between blocks and reduced by atomic additions",
        rejection=register_tiles.one_input_channel,
        planner=register_tiles.channel_atomics,
    ),
    Kernel(
        name="9_half",
        source="9_half.cu",
        direction="forward",
        float32_accurate=False,
        precision="float16",
        architectures=ARCHITECTURES,
        summary="6 in half precision, two filters an instruction",
        rejection=register_tiles.too_large_kernel,
        planner=register_tiles.half,
    ),
    Kernel(
        name="10_tf32",
        source="10_tf32.cu",
        direction="forward",
        float32_accurate=False,
        precision="tf32",
        architectures=_TF32_ARCHITECTURES,
        summary="tensor cores in TF32, images in shared memory",
        rejection=tensor_cores.not_for_tensor_cores,
        planner=tensor_cores.tensor_cores,
    ),
    Kernel(
        name="11_3xtf32",
        source="11_3xtf32.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=_TF32_ARCHITECTURES,
        summary="tensor cores at float32 accuracy: three TF32 products for one",
        rejection=tensor_cores.not_for_tensor_cores,
        planner=tensor_cores.tensor_cores,
    ),
    Kernel(
        name="12_one_channel",
        source="12_one_channel.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="one input channel: its pixels stay in registers for all filters",
        rejection=one_channel.several_input_channels,
        planner=one_channel.one_channel,
    ),
    Kernel(
        name="13_column_pairs",
        source="13_column_pairs.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="one input channel, columns loaded and stored in pairs",
        rejection=one_channel.odd_width,
        planner=one_channel.column_pairs,
    ),
    Kernel(
        name="14_wgmma",
        source="14_wgmma.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=("90a",),
        summary="11 with Hopper's asynchronous tensor cores",
        rejection=tensor_cores.not_for_wgmma,
        planner=tensor_cores.wgmma,
    ),
    Kernel(
        name="15_fewer_products",
        source="15_fewer_products.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="one input channel, seven multiplications in place of ten (Winograd)",
        rejection=one_channel.no_fewer_products,
        planner=one_channel.fewer_products,
        choices=one_channel.fewer_products_choices,
    ),
    Kernel(
        name="16_copy_engine",
        source="16_copy_engine.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=_COPY_ENGINE_ARCHITECTURES,
        summary="15 with images and outputs moved by Hopper's copy engine",
        rejection=copied_images.not_for_copies,
        planner=copied_images.copy_engine,
        choices=copied_images.copy_engine_choices,
    ),
    Kernel(
        name="17_half_wgmma",
        source="17_half_wgmma.cu",
        direction="forward",
        float32_accurate=False,
        precision="tf32",
        architectures=("90a",),
        summary="half precision, as exact as TF32; a tap is a shift in shared memory",
        rejection=half_strips.not_for_half,
        planner=half_strips.half,
        choices=half_strips.half_choices,
    ),
    Kernel(
        name="18_split_half",
        source="18_split_half.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=("90a",),
        summary="17 at float32 accuracy: every factor in two halves",
        rejection=half_strips.not_for_split,
        planner=half_strips.split,
        choices=half_strips.split_choices,
    ),
    Kernel(
        name="19_more_registers",
        source="19_more_registers.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=("90a",),
        summary="16 with registers handed over to the warps that compute",
        rejection=copied_images.not_for_more_registers,
        planner=copied_images.more_registers,
        choices=copied_images.more_registers_choices,
    ),
    Kernel(
        name="general",
        source="general.cu",
        direction="forward",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="every convolution and type: an implicit matrix product for each group",
        rejection=general.everything,
        planner=general.forward,
    ),
    Kernel(
        name="general_backward_data",
        source="general_backward_data.cu",
        direction="backward_data",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="the gradient for x of every convolution and type",
        rejection=general.everything,
        planner=general.backward_data,
    ),
    Kernel(
        name="general_backward_weight",
        source="general_backward_weight.cu",
        direction="backward_weight",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="the gradient for w of every convolution and type",
        rejection=general.everything,
        planner=general.backward_weight,
    ),
    Kernel(
        name="general_backward_bias",
        source="general_backward_bias.cu",
        direction="backward_bias",
        float32_accurate=True,
        precision="float32",
        architectures=ARCHITECTURES,
        summary="the gradient for the bias of every convolution and type",
        rejection=general.everything,
        planner=general.backward_bias,
    ),
)
# Of the kernels that do not reject a problem and are exact enough, the first one here is the one
# to use.
_PREFERENCE = (
    "16_copy_engine",
    "19_more_registers",
    "15_fewer_products",
    "13_column_pairs",
    "12_one_channel",
    "17_half_wgmma",
    "18_split_half",
    "10_tf32",
    "14_wgmma",
    "11_3xtf32",
    "6_register_tiles",
    "general",
    "general_backward_data",
    "general_backward_weight",
    "general_backward_bias",
)
# Unless this says that a later one is faster.
_PREFERRED = {
    "16_copy_engine": copied_images.prefers_copies,
    "19_more_registers": copied_images.prefers_copies,
    "15_fewer_products": one_channel.prefers_fewer_products,
    "17_half_wgmma": half_strips.prefers_half,
    "18_split_half": half_strips.prefers_split,
    "10_tf32": tensor_cores.prefers_tf32,
    "14_wgmma": tensor_cores.prefers_wgmma,
    "11_3xtf32": tensor_cores.prefers_3xtf32,
}
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def find(name: str) -> Kernel | None:
    """The kernel of this name, if there is one."""
    return _BY_NAME.get(name)


def get(name: str) -> Kernel:
    """The kernel of this name. Raises `InvalidSetting` when there is none."""
    if name not in _BY_NAME:
        raise InvalidSetting(f"unknown CUDA kernel {name!r}; there are: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def _always(problem: ConvProblem, capability: Capability) -> bool:
    return True


def default(
    problem: ConvProblem, direction: str, capability: Capability, precision: str = "float32"
) -> Kernel:
    """The kernel that is best as far as one can tell without measuring, for the problem and
    "forward", "backward_data", "backward_weight" or "backward_bias", on a GPU of this compute
    capability. `precision`, one of `problem.PRECISIONS`, permits less exact ones to be it.

    Raises `UnsupportedProblem` on a GPU that no kernel has code for.
    """
    reason: str | None = f"there is no kernel for {direction}"
    for kernel in map(get, _PREFERENCE):
        if kernel.direction == direction and kernel.permitted(precision):
            reason = kernel.rejects(problem, capability)
            if reason is None and _PREFERRED.get(kernel.name, _always)(problem, capability):
                return kernel
    raise UnsupportedProblem(f"no CUDA kernel computes {direction} of {problem}: {reason}")
