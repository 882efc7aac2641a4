"""Short sums: sizes shared by host and kernels, and errors of each element."""

import dataclasses

import numpy as np
import pytest
from cases import every
from places import CUBINS

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import compiler
from ece408_op.bench import oracle
from ece408_op.bench.checker import random_cases
from ece408_op.bench.gpu_arrays import run
from ece408_op.errors import KernelCompileFailed
from ece408_op.problem import ConvProblem

NAMES = ("pointwise_simt", "pointwise_simt_backward_data", "implicit_gemm_simt_backward_weight")


PARTS = "b4,c3,h20,w21,m24,k3,p1,bias"


@pytest.mark.parametrize(
    ("name", "architecture", "text"),
    [
        *(("17_half_wgmma", "90a", ""), ("18_split_half", "90a", ""), (NAMES[0], "80", "")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *((NAMES[1], "80", ""), (NAMES[2], "80", ""), ("implicit_gemm_sm80", "80", PARTS)),
                *(("implicit_gemm_sm80", "120", PARTS), ("implicit_gemm_fused", "90a", PARTS)),
            )
        ),
    ],
)
def test_host_and_kernel_reckon_with_the_same_shared_memory(nvcc, name, architecture, text):
    """The kernel asserts the size in the plan."""
    kernel = catalog.get(name)
    (case,) = random_cases(kernel, 1, seed=19)
    problem = ConvProblem.parse(text) if text else case.problem
    plan = kernel.plan(problem, (9, 0), case.accumulate and not text)
    compiler.compile_plan(plan.kernel.source, plan.macros, architecture, CUBINS)
    wrong = {**dict(plan.macros), "SHARED_BYTES": dict(plan.macros)["SHARED_BYTES"] + 16}
    with pytest.raises(KernelCompileFailed, match="another size"):
        compiler.compile_plan(plan.kernel.source, tuple(wrong.items()), architecture, CUBINS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("implicit_gemm_fused_backward_data", "b4,c24,h20,w21,m3,k3,p1"),
        ("implicit_gemm_fused_backward_weight", "b30,c9,h4,w5,m111,k4x5"),
        ("implicit_gemm_fused_backward_weight", "b3,c9,h4,w5,m111,k3"),
    ],
)
def test_shallow_layouts_compile(nvcc, name, text):
    """Threads load at least eight contiguous values: channels of weights, and planes of a single
    pixel."""
    kernel, problem = catalog.get(name), ConvProblem.parse(text)
    shallow = [each for each in kernel.layouts(problem, (9, 0)) if each.depth == 16]
    assert shallow
    for layout in shallow[:2]:
        plan = kernel.plan(problem, (9, 0), False, layout)
        compiler.compile_plan(plan.kernel.source, plan.macros, "90a", CUBINS)


@pytest.mark.parametrize(
    "text",
    ["b1,c24,h7,w7,m48,k3,p1", pytest.param("b1,c96,h14,w14,m64,k1", marks=pytest.mark.slow)],
)
def test_layouts_of_the_gradient_for_w_compile(nvcc, text):
    kernel, problem = catalog.get(NAMES[2]), ConvProblem.parse(text)
    layouts = kernel.layouts(problem, (9, 0))
    assert len({each.shares for each in layouts}) > 1
    for layout in layouts[::8]:
        plan = kernel.plan(problem, (9, 0), False, layout)
        compiler.compile_plan(plan.kernel.source, plan.macros, "90", CUBINS)


def test_a_small_layer_is_for_many_blocks_and_a_large_one_for_large_tiles():
    kernel = catalog.get("pointwise_simt")
    large = ConvProblem.parse("b256,c64,h56,w56,m64,k1")
    (few, many) = (
        kernel.layouts(dataclasses.replace(large, batch=batch), (9, 0))[0] for batch in (1, 256)
    )
    assert few.rows * few.pixels < many.rows * many.pixels == 64
    (launch,) = kernel.plan(dataclasses.replace(large, batch=1), (9, 0), False).launches
    assert launch.grid[0] * launch.grid[1] > 64


OUTPUTS = {"forward": "y", "backward_data": "dx", "backward_weight": "dw"}
INPUTS = {"forward": ("x", "w"), "backward_data": ("w", "dy"), "backward_weight": ("x", "dy")}


def _computed(gpu, problem, direction, arrays):
    """Return the result, also in double precision, and the sums of the terms' magnitudes."""
    shapes = {"y": problem.y_shape, "dx": problem.x_shape, "dw": problem.w_shape}
    output = OUTPUTS[direction]
    taken = {role: arrays[role] for role in INPUTS[direction]}
    empty = np.full(shapes[output], np.nan, np.float32)
    kernel = catalog.default(problem, direction, gpu.capability)
    plan = kernel.plan(problem, gpu.capability, False)
    found = run(gpu, plan, {output: empty, **taken}, output)
    compute = getattr(oracle, direction)
    terms = compute(problem, *map(np.abs, taken.values()))
    return found, compute(problem, *taken.values()), terms


def _shapes(problem):
    return {"x": problem.x_shape, "w": problem.w_shape, "dy": problem.y_shape}


@pytest.mark.gpu
@every(
    case=[
        ("b2,c64,h28,w28,m96,k1", "forward"),
        ("b2,c96,h28,w28,m64,k1", "backward_data"),
        ("b2,c3,h64,w64,m32,k3,s2,p1", "forward"),
        ("b1,c64,h28,w28,m128,k1,s2", "forward"),
        ("b1,c64,h7,w7,m96,k3,p1", "backward_weight"),
        ("b1,c448,h8,w8,m384,k3,p1", "backward_weight"),
    ]
)
def test_each_element_is_as_exact_as_a_plain_sum_whatever_the_magnitudes(gpu, case):
    """Numbers from 1e-6 to 1e6: split numbers would lose small values beside large ones, and sums
    of only small values."""
    text, direction = case
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(7)
    arrays = {
        role: (rng.choice([-1, 1], shape) * 10 ** rng.uniform(-6, 6, shape)).astype(np.float32)
        for role, shape in _shapes(problem).items()
    }
    found, exact, terms = _computed(gpu, problem, direction, arrays)
    assert np.max(np.abs(found - exact) / np.where(terms > 0, terms, 1)) < 6e-7


@pytest.mark.gpu
@every(of_x=[1e-40, 1e-30, 1, 1e30, 1e38], of_w=[1e-38, 1e-10, 1, 1e10])
def test_three_parts_hold_every_exponent(gpu, of_x, of_w):
    problem = ConvProblem.parse("b2,c12,h14,w17,m11,k1,s2")
    rng = np.random.default_rng(17)
    arrays = {
        role: (rng.standard_normal(shape) * (of_x if role == "x" else of_w)).astype(np.float32)
        for role, shape in _shapes(problem).items()
    }
    found, exact, terms = _computed(gpu, problem, "forward", arrays)
    with np.errstate(over="ignore"):
        finite = np.isfinite(exact.astype(np.float32))
    assert np.array_equal(np.isfinite(found), finite)
    # Denormal results are as close as float32 allows.
    bound = 6e-7 * terms[finite] + 1e-38
    assert np.all(np.abs(found[finite] - exact[finite]) <= bound)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_reaches_its_windows_and_no_others(gpu, value):
    rng = np.random.default_rng(19)
    for text in ("b2,c12,h14,w17,m11,k1,s2", "b3,c12,h9,w17,m11,k1"):
        problem = ConvProblem.parse(text)
        arrays = {
            role: rng.standard_normal(shape).astype(np.float32)
            for role, shape in _shapes(problem).items()
        }
        arrays["x"][1, 9, 6, 4] = value
        found, exact, _ = _computed(gpu, problem, "forward", arrays)
        assert np.array_equal(np.isfinite(found), np.isfinite(exact)), text
