"""The catalog of CUDA kernels: its claims, and a kernel for every problem."""

import dataclasses
import itertools
import math
import re

import pytest
from cases import every

from ece408_op.backends.cuda import gpu_limits
from ece408_op.backends.cuda.kernel_plan import architecture
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench.checker import random_cases
from ece408_op.bench.shapes import SHAPES
from ece408_op.errors import InvalidSetting, UnsupportedProblem
from ece408_op.files.resources import kernels_dir
from ece408_op.network import update
from ece408_op.network.machines.gpu_steps import CODES
from ece408_op.problem import ConvProblem

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
PREPACKED = "implicit_gemm_prepacked"
# The most shared memory of a block.
SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
ARRAYS = {
    "forward": {"y", "x", "w", "bias"},
    "backward_data": {"dx", "w", "dy"},
    "backward_weight": {"dw", "x", "dy"},
    "backward_bias": {"dbias", "dy"},
}


@every(direction=ARRAYS, capability=CAPABILITIES)
def test_every_architecture_has_a_kernel_for_every_problem(capability, direction):
    problems = [case.problem for case in random_cases(catalog.get("general"), 100)]
    for problem in [*problems, *SHAPES.values()]:
        kernel = catalog.default(problem, direction, capability)
        assert kernel.direction == direction
        assert kernel.float32_accurate
        assert kernel.name != "1_naive"


# The kernel that is chosen: below a compute capability, precisions and a direction, the kernels by
# name, without the direction, and the shapes and problems that they compute.
CHOICES = """
9.0 float32 forward
  16_copy_engine fa19_1 b10000,c1,h64,w64,m6,k5
  19_more_registers k7_1
  18_split_half fa19_2 k7_2 b64,c128,h56,w56,m64,k1 b64,c3,h224,w224,m64,k7,s2x2,p3x3
    b10000,c12,h33,w33,m24,k5
  implicit_gemm_prepacked b64,c64,h56,w56,m64,k3,p1x1 b32,c512,h7,w7,m512,k3,p1x1
    b32,c128,h56,w56,m128,k3,s2x2,p1x1
  implicit_gemm_fused b1,c256,h56,w56,m128,k1 b32,c3,h224,w224,m32,k3,s2,p1
    b32,c64,h56,w56,m128,k1,s2 b1,c266,h2,w79,m146,k11,p15x0,d3
  pointwise_simt b32,c64,h56,w56,m256,k1
  depthwise b32,c32,h112,w112,m32,k3,p1x1,g32 b1,c144,h56,w56,m144,k3,s2x2,p1x1,g144,bias
    b256,c960,h7,w7,m960,k3,p1x1,g960 b2,c6,h30,w31,m6,k7x5,s3x1,p3x2,d2x2,g6
  grouped b32,c128,h56,w56,m128,k3,p1x1,g32 b1,c6,h30,w31,m12,k7x5,s3x1,p3x2,d2x2,g6
    b2,c64,h14,w14,m64,k3,s2x2,p1x1,g8,bias b32,c64,h96,w96,m1,k9,p4
9.0 tf32,float16 forward
  18_split_half b64,c128,h56,w56,m64,k1
  17_half_wgmma b64,c3,h224,w224,m64,k7,s2x2,p3x3 b10000,c12,h33,w33,m24,k5
  implicit_gemm_prepacked_half b32,c128,h28,w28,m128,k3,p1x1
9.0 float32 backward_data
  implicit_gemm_prepacked b64,c64,h56,w56,m64,k3,p1x1 b32,c512,h7,w7,m512,k3,p1x1
    b32,c128,h56,w56,m128,k3,s2x2,p1x1
    b32,c3,h224,w224,m64,k7,s2x2,p3x3 b32,c8,h224,w224,m64,k3,p1x1
  implicit_gemm_fused b1,c256,h56,w56,m128,k1 b32,c128,h56,w56,m128,k1 b32,c512,h28,w28,m1,k3,p1
  pointwise_simt b32,c256,h56,w56,m64,k1
  depthwise b32,c32,h112,w112,m32,k3,p1x1,g32 b1,c144,h56,w56,m144,k3,s2x2,p1x1,g144,bias
    b256,c960,h7,w7,m960,k3,p1x1,g960 b2,c6,h30,w31,m6,k7x5,s3x1,p3x2,d2x2,g6
  grouped b32,c128,h56,w56,m128,k3,p1x1,g32 b1,c6,h30,w31,m12,k7x5,s3x1,p3x2,d2x2,g6
    b2,c64,h14,w14,m64,k3,s2x2,p1x1,g8,bias b32,c3,h224,w224,m64,k3,p1x1
    b1,c3,h224,w224,m64,k3,p1x1 b1,c1,h96,w96,m64,k9,p4 b10000,c1,h64,w64,m6,k5
9.0 float32 backward_weight
  implicit_gemm_prepacked b64,c64,h56,w56,m64,k3,p1x1 b32,c512,h7,w7,m512,k3,p1x1
    b32,c128,h56,w56,m128,k3,s2x2,p1x1 b1,c128,h28,w28,m128,k3,p1 b1,c512,h14,w14,m512,k3,p1
    b32,c512,h7,w7,m512,k3,p1
  implicit_gemm_fused b1,c256,h56,w56,m128,k1 b32,c128,h56,w56,m128,k1 b4,c2048,h7,w7,m512,k1
    b1,c448,h8,w8,m384,k3,p1
  implicit_gemm_simt b1,c256,h14,w14,m1024,k1 b1,c256,h14,w14,m256,k3,p1 b1,c160,h7,w7,m960,k1
    b32,c960,h1,w1,m240,k1 b1,c512,h7,w7,m512,k3,p1
  depthwise b32,c32,h112,w112,m32,k3,p1x1,g32 b1,c144,h56,w56,m144,k3,s2x2,p1x1,g144,bias
    b256,c960,h7,w7,m960,k3,p1x1,g960 b2,c6,h30,w31,m6,k7x5,s3x1,p3x2,d2x2,g6
9.0 tf32,float16 backward_data
  implicit_gemm_prepacked_half b32,c128,h28,w28,m128,k3,p1x1
9.0 tf32,float16 backward_weight
  implicit_gemm_prepacked_half b32,c128,h28,w28,m128,k3,p1x1
7.5 float32 forward
  13_column_pairs fa19_1
  6_register_tiles fa19_2
7.5 float32 backward_data
  general b64,c64,h56,w56,m64,k3,p1x1 b32,c512,h7,w7,m512,k3,p1x1
    b32,c128,h56,w56,m128,k3,s2x2,p1x1
8.0 float32 forward
  11_3xtf32 fa19_2 k7_2 b256,c32,h32,w32,m64,k3 b16,c3,h224,w224,m64,k3
  implicit_gemm_sm80 b64,c64,h56,w56,m64,k3 b32,c64,h28,w28,m64,k3,p1
  general b32,c288,h56,w56,m288,k3,p1,g32
8.0 float32 backward_data
  implicit_gemm_sm80 b32,c64,h28,w28,m64,k3,p1
8.0 float32 backward_weight
  implicit_gemm_sm80 b32,c64,h28,w28,m64,k3,p1
8.6 float32 forward
  15_winograd k7_1
  6_register_tiles b64,c64,h56,w56,m64,k3
10.0 float32 forward
  15_winograd k7_1
  implicit_gemm_sm80 b32,c64,h28,w28,m64,k3,p1
10.0 float32 backward_data
  implicit_gemm_sm80 b32,c64,h28,w28,m64,k3,p1
10.0 float32 backward_weight
  implicit_gemm_sm80 b32,c64,h28,w28,m64,k3,p1
"""


def test_the_default_kernel():
    found, expected = {}, {}
    for line in CHOICES.strip().splitlines():
        if not line.startswith(" "):
            capability, precisions, direction = line.split()
            suffix = "" if direction == "forward" else f"_{direction}"
            capability = tuple(map(int, capability.split(".")))
            continue
        words = line.split()
        if not line.startswith("    "):
            kernel = words.pop(0) + suffix
        for text, precision in itertools.product(words, precisions.split(",")):
            problem = SHAPES.get(text) or ConvProblem.parse(text)
            key = capability, precision, direction, text
            expected[key] = kernel
            found[key] = catalog.default(problem, direction, capability, precision).name
    assert found == expected


def test_one_half_takes_less_memory_than_two():
    problem = ConvProblem.parse("b32,c128,h28,w28,m128,k3,p1x1")
    halves, half = (catalog.get(f"{PREPACKED}{each}") for each in ("", "_half"))
    assert half.precision == "tf32"
    whole = halves.plan(problem, (9, 0), False).workspace_bytes
    assert half.plan(problem, (9, 0), False).workspace_bytes < 0.6 * whole


def test_numbers_of_half_precision_need_no_second_half():
    problem = ConvProblem.parse("b32,c128,h28,w28,m128,k3,p1x1,float16")
    for direction in ("forward", "backward_data", "backward_weight"):
        kernel = catalog.default(problem, direction, (9, 0))
        assert kernel.name.startswith("implicit_gemm_prepacked")
        assert kernel.float32_accurate
        defines = dict(kernel.plan(problem, (9, 0), False).defines)
        assert (defines["ELEMENT"], defines["PARTS"]) == ("__half", 1)
        permitted = catalog.default(problem, direction, (9, 0), "float16")
        assert permitted == kernel
    refused = catalog.get(f"{PREPACKED}_half").why_not(problem, (9, 0)) or ""
    assert f"{PREPACKED} computes float16" in refused


@every(capability=CAPABILITIES, direction=ARRAYS)
def test_strict_is_general_with_sums_in_double(capability, direction):
    for case in random_cases(catalog.get("general"), 20):
        kernel = catalog.default(case.problem, direction, capability, "strict")
        expected = {"forward": "general_strict", "backward_bias": "general_backward_bias"}
        assert kernel.name == expected.get(direction, f"general_strict_{direction}")
        assert kernel.precision == "strict"


FEW_TERMS = [
    ("b32,c64,h56,w56,m256,k1", "forward", "pointwise_simt"),
    ("b32,c256,h56,w56,m64,k1", "backward_data", "pointwise_simt_backward_data"),
    ("b32,c3,h224,w224,m32,k3,s2,p1", "forward", "implicit_gemm_fused"),
    ("b32,c64,h56,w56,m128,k1,s2", "forward", "implicit_gemm_fused"),
    ("b1,c448,h8,w8,m384,k3,p1", "backward_weight", "implicit_gemm_fused_backward_weight"),
    ("b1,c512,h7,w7,m512,k3,p1", "backward_weight", "implicit_gemm_simt_backward_weight"),
]


@every(case=FEW_TERMS)
def test_sums_of_few_terms_are_not_of_numbers_in_halves(case):
    """Split numbers keep 23 bits of 24: better than a plain sum with many roundings, worse than one
    with few."""
    text, direction, expected = case
    problem = ConvProblem.parse(text)
    kernel = catalog.get(expected)
    if expected.startswith("implicit_gemm_fused"):
        for layout in kernel.layouts(problem, (9, 0)):
            defines = dict(kernel.plan(problem, (9, 0), False, layout).defines)
            assert defines["PARTS"] == 3
            assert defines["DEPTH"] <= 32
    gradients = (f"{PREPACKED}_backward_data", f"{PREPACKED}_backward_weight")
    for name in ("18_split_half", PREPACKED, *gradients):
        other = catalog.get(name)
        if other.direction == direction:
            assert not other.permitted("float32", problem)
            assert other.permitted("tf32", problem)
            assert other.permitted("float32", dataclasses.replace(problem, dtype="float16"))


@every(
    case=[
        ("b8,c128,h56,w56,m256,k1", "forward"),
        ("b8,c512,h28,w28,m128,k1", "backward_data"),
        ("b1,c256,h14,w14,m256,k3,p1", "backward_weight"),
    ]
)
def test_tensor_cores_add_up_little_of_a_short_sum(case):
    """Tensor cores truncate sums, an error that only a plain sum with many roundings exceeds."""
    text, direction = case
    problem = ConvProblem.parse(text)
    suffix = "" if direction == "forward" else f"_{direction}"
    for name in ("implicit_gemm_prepacked", "implicit_gemm_fused", "implicit_gemm_sm80"):
        kernel = catalog.get(name + suffix)
        for layout in kernel.layouts(problem, (9, 0)):
            fields = dict(layout.tunables)
            assert fields.get("depth", fields.get("chunk")) <= 32, (name, layout)
        longer = dataclasses.replace(problem, batch=256, channels=4096, filters=4096)
        fields = [dict(each.tunables) for each in kernel.layouts(longer, (9, 0))]
        assert max(each.get("depth", each.get("chunk")) for each in fields) > 32, name


def test_tensor_cores_that_are_not_hoppers_have_a_product_of_their_own():
    problem = ConvProblem.parse("b32,c64,h28,w28,m128,k3,p1")
    for direction in ("forward", "backward_data", "backward_weight"):
        name = "implicit_gemm_sm80" if direction == "forward" else f"implicit_gemm_sm80_{direction}"
        kernel = catalog.get(name)
        # On this GPU it is no faster than float32 arithmetic: `tune` measures.
        assert catalog.default(problem, direction, (8, 6)) != kernel
        for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
            for layout in kernel.layouts(problem, capability):
                launch = kernel.plan(problem, capability, False, layout).launches[0]
                assert launch.shared_bytes * layout.blocks <= gpu_limits.shared_bytes(capability)
                assert layout.cluster == 1
        assert kernel.why_not(problem, (7, 5)).startswith("it has no code for compute capability")


def test_clusters_have_whole_grids_and_share_a_tile():
    """A GPU's size is not a multiple of a cluster, so such blocks cannot be persistent."""
    problem = ConvProblem.parse("b1,c512,h28,w28,m128,k1")
    kernel = catalog.get("implicit_gemm_fused")
    for layout in kernel.layouts(problem, (9, 0)):
        launch = kernel.plan(problem, (9, 0), False, layout).launches[0]
        assert launch.grid[0] % layout.cluster == 0
        assert launch.blocks_per_processor == (layout.blocks if layout.cluster == 1 else 0)
    assert len({layout.cluster for layout in kernel.layouts(problem, (9, 0))}) > 1


def test_many_rows_are_not_split():
    """Partial sums are added by a grid with a row of blocks for each filter."""
    for text in ("b1,c8192,h1,w1,m69000,k1", "b1,c2048,h1,w1,m1000,k1"):
        plan = catalog.get("implicit_gemm_prepacked").plan(ConvProblem.parse(text), (9, 0), False)
        assert all(launch.grid[1] <= 65535 for launch in plan.launches), text
    assert plan.launches[-1].function == "add_up"


def test_a_gpu_without_code_has_no_kernel():
    problem = SHAPES["fa19_1"]
    with pytest.raises(UnsupportedProblem, match=r"no code for compute capability 7\.0"):
        catalog.default(problem, "forward", (7, 0))
    assert "sm_80" in (catalog.get("11_3xtf32").why_not(SHAPES["fa19_2"], (7, 5)) or "")


def test_an_unknown_kernel_is_an_error_with_the_names():
    with pytest.raises(InvalidSetting, match="unknown CUDA kernel 'fast'; there are: 1_naive, "):
        catalog.get("fast")


@pytest.mark.parametrize("kernel", catalog.KERNELS, ids=lambda kernel: kernel.name)
def test_plans_stay_within_the_limits_of_cuda(kernel):
    small = random_cases(kernel, 15)
    # Arrays of MXNet end at 2^31 - 1 elements.
    most = [
        (1 << 31) // max(map(math.prod, (c.problem.x_shape[1:], c.problem.y_shape[1:])))
        for c in small
    ]
    large = [dataclasses.replace(c.problem, batch=n - 1) for c, n in zip(small, most)]
    for problem in [case.problem for case in small] + large:
        for capability in CAPABILITIES:
            if kernel.why_not(problem, capability) is None:
                _check_plan(kernel.plan(problem, capability, True), capability)


def _check_plan(plan, capability):
    known = ARRAYS[plan.kernel.direction] | {"workspace"}
    for launch in plan.launches:
        assert 0 < launch.grid[0] < 1 << 31
        assert all(0 < size <= 65535 for size in launch.grid[1:])
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        assert 0 < threads <= 1024
        assert launch.shared_bytes <= SHARED_KIB.get(capability, 99) << 10
        names = {argument for argument in launch.arguments if isinstance(argument, str)}
        assert names <= known
        assert all(abs(a) < 1 << 31 for a in launch.arguments if isinstance(a, int))
        assert plan.workspace_bytes or "workspace" not in names
    assert {copy.array for copy in plan.constants} <= known


@every(kernel=catalog.KERNELS)
def test_one_compile_serves_every_batch(kernel):
    """Products split by size have at most four variants: for one image, few, dozens and more."""
    (case,) = random_cases(kernel, 1)
    classes = [(1, 2, 3), (4, 7, 15), (16, 50, 63), (64, 100, 1000)]
    defines = [
        {
            kernel.plan(dataclasses.replace(case.problem, batch=batch), (9, 0), False).defines
            for batch in batches
        }
        for batches in classes
    ]
    assert all(len(each) == 1 for each in defines)
    cut_up = kernel.name.startswith(("implicit_gemm", "grouped"))
    assert cut_up or len(set.union(*defines)) == 1


@every(
    case=[
        ("1_naive", "b1,c1,h9,w9,m1,k3,s2x2", r"stride \(1, 1\) only, not \(2, 2\)"),
        ("1_naive", "b1,c1,h9,w9,m1,k3,float64", "float32 only, not float64"),
        ("2_constant_weights", "b1,c64,h9,w9,m64,k3", "147456 bytes, and constant memory has"),
        ("3_shared_tiles", "b1,c1,h200,w200,m1,k100", "more than 48 KiB"),
        ("6_register_tiles", "b1,c1,h20,w20,m1,k11", "at most 100 pixels, not 11x11"),
        ("7_channel_tree", "b1,c1,h20,w20,m1,k3", "and there is one"),
        ("11_3xtf32", "b1,c512,h20,w20,m8,k3", "bytes of shared memory, more than"),
        (PREPACKED, "b1,c4,h4,w2000,m8,k1x1000", "1024 taps, 128 in a line, not 1x1000"),
        (PREPACKED, "b1,c64,h600,w800,m64,k3,p1", "takes 1604 pixels beyond it, more than fit"),
        (f"{PREPACKED}_backward_weight", "b1,c4,h9,w9,m8,k3,float64", "float16 only, not float64"),
        (f"{PREPACKED}_half", "b1,c4,h9,w9,m8,k3,float16", f"{PREPACKED} computes float16 ones"),
        ("12_one_channel", "b1,c2,h20,w20,m1,k3", "one input channel only, not 2"),
        ("12_one_channel", "b1,c1,h20,w20,m2000,k3", "more than 48 KiB"),
        ("13_column_pairs", "b1,c1,h20,w21,m2,k3", "even widths only, not 21 and 19"),
        ("15_winograd", "b1,c2,h20,w20,m2,k3", "one input channel only, not 2"),
        ("15_winograd", "b1,c1,h20,w20,m2,k3x4", "odd widths from 3 only, not 4"),
        ("15_winograd", "b1,c1,h20,w20,m2,k3x1", "odd widths from 3 only, not 1"),
        ("15_winograd", "b1,c1,h20,w20,m2,k11x9", "registers for a kernel of 11x9"),
        ("15_winograd", "b1,c1,h20,w20,m2000,k3", "more than 48 KiB"),
        ("16_copy_engine", "b1,c1,h20,w21,m2,k3", "in vectors of 16 bytes, not of 20x21 and 18x19"),
        ("16_copy_engine", "b1,c1,h200,w200,m2,k3", "more threads, registers or shared memory"),
        ("16_copy_engine", "b1,c1,h72,w72,m12,k7", "more threads, registers or shared memory"),
        ("depthwise", "b1,c4,h20,w20,m8,k3,g4", "one filter only, not 4 channels and 8 filters"),
        ("depthwise", "b1,c4,h20,w20,m4,k3,g2", "groups of one channel"),
        ("grouped", "b1,c4,h20,w20,m18,k3,g2", "up to 8 filters only, not 4 channels and 18"),
        ("grouped_backward_weight", "b1,c18,h20,w20,m4,k3,g2", "up to 8 channels and filters only"),
        ("depthwise", "b1,c2,h20,w20,m2,k3,g2,float16", "float32 only, not float16"),
        ("depthwise", "b1,c2,h20,w20,m2,k16,g2", "at most 15x15 over 64 rows, not 16x16 over"),
        ("depthwise_backward_weight", "b1,c2,h20,w9000,m2,k3,g2", "do not fit into 48 KiB"),
        ("depthwise_backward_data", "b1,c2,h20,w20,m2,k3,s5x1,g2", r"at most 4, not \(5, 1\)"),
        ("17_half_wgmma", "b1,c4,h9,w9,m4,k3,g2", "groups 1 only, not 2"),
        ("17_half_wgmma", "b1,c4,h9,w9,m4,k3,float64", "float32 only, not float64"),
        ("18_split_half", "b1,c256,h9,w9,m4,k3", "at most 128 steps, not 144"),
        ("18_split_half", "b1,c64,h9,w3000,m4,k3", "bytes of shared memory, more than 232448"),
        ("pointwise_simt", "b1,c64,h9,w9,m8,k1,s2", "it computes 1x1 kernels without strides"),
        ("pointwise_simt", "b1,c64,h9,w9,m8,k1,p1", "it computes 1x1 kernels without strides"),
        ("pointwise_simt", "b1,c64,h9,w9,m8,k3", "it computes 1x1 kernels without strides"),
        ("pointwise_simt", "b1,c64,h9,w9,m8,k1,g2", "it computes groups 1 only, not 2"),
        ("pointwise_simt", "b1,c64,h9,w9,m8,k1,float16", "it computes float32 only, not float16"),
        ("pointwise_half", "b1,c64,h9,w9,m8,k1,s2", "it computes 1x1 kernels without strides"),
        ("pointwise_simt", "b1,c6000,h9,w9,m8,k1", "weights for 6000 channels do not fit"),
        ("implicit_gemm_simt_backward_weight", "b1,c64,h9,w9,m8,k1,g2", "groups 1 only, not 2"),
        ("implicit_gemm_simt_backward_weight", "b1,c4,h9,w9,m8,k3,float16", "float32 only, not"),
        ("19_more_registers", "b1,c1,h20,w21,m2,k3", "in vectors of 16 bytes"),
        ("19_more_registers", "b1,c1,h200,w200,m2,k3", "more threads, registers or shared memory"),
    ]
)
def test_what_a_kernel_does_not_claim_it_rejects_with_the_reason(case):
    kernel, problem, reason = case
    found = catalog.get(kernel).why_not(ConvProblem.parse(problem), (9, 0))
    assert found is not None
    assert re.search(reason, found), found


def test_the_newest_code_that_a_gpu_runs_is_chosen():
    names = ("75", "80", "86", "90a", "100")
    chosen = {c: architecture(names, c) for c in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]}
    assert list(chosen.values()) == ["75", "80", "86", "90a", "100", None]


def test_every_source_belongs_to_the_catalog():
    folder = kernels_dir() / "cuda"
    sources = {str(path.relative_to(folder)) for path in folder.rglob("*.cu")}
    used = {each.source for each in (*catalog.KERNELS, *CODES, update.CODE)}
    assert sources - used == {str(path.relative_to(folder)) for path in folder.glob("measuring/*")}
    assert used <= sources
