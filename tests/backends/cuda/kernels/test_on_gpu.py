"""CUDA kernels on a GPU, by the checker of scripts/check_cuda.py; and incorrect kernels."""

import dataclasses

import numpy as np
import pytest
from studies import cuda_proof

from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import checker, cuda_timer, gpu_arrays, oracle
from ece408_op.bench.checker import Case
from ece408_op.bench.compiling import compile_all
from ece408_op.bench.shapes import SHAPES
from ece408_op.files.resources import kernels_dir
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.gpu
# A fault, by the part of 1_naive.cu that another text replaces.
WRONG = {
    "c < channels": "c < (channels > 1 ? channels - 1 : 1)",
    "+ p) * kernel_w + q]": "+ kernel_h - 1 - p) * kernel_w + kernel_w - 1 - q]",
    "* height + i + p) * width + j": "* width + i + p) * height + j",
    "float sum = 0": "float sum = y[index]",
    "sum += x": "sum = __half2float(__float2half(sum)) + x",
    "index >= (unsigned)": "index > (unsigned)",
    "float sum = 0;": "if (j == out_w - 1) return;\n    float sum = 0;",
}


def _wrong(folder, part):
    naive = catalog.get("1_naive")
    text = (kernels_dir() / "cuda" / naive.source).read_text()
    assert part in text
    path = folder / "wrong.cu"
    path.write_text("#include <cuda_fp16.h>\n" + text.replace(part, WRONG[part]))
    return dataclasses.replace(naive, source=str(path))


@pytest.mark.parametrize("kernel", catalog.KERNELS, ids=lambda kernel: kernel.name)
def test_right_on_the_courses_shapes_and_random_ones(gpu, kernel):
    proof = cuda_proof.prove(gpu, kernel, random=24)
    assert not proof.failures, "\n".join(proof.failures)
    assert proof.random == 24
    assert proof.course == len(cuda_proof.course_cases(kernel))


TUNED = [
    kernel
    for kernel in catalog.KERNELS
    if any(len(kernel.layouts(SHAPES[shape], (9, 0))) > 1 for shape in ("fa19_1", "fa19_2"))
]


@pytest.mark.parametrize("kernel", TUNED, ids=lambda kernel: kernel.name)
def test_all_tiles_compute_the_same(gpu, kernel):
    cases = [*checker.course_cases(kernel), *checker.random_cases(kernel, 4, seed=3)]
    tried = [
        dataclasses.replace(case, layout=layout, seed=seed)
        for case in cases
        for seed, layout in enumerate(kernel.layouts(case.problem, gpu.capability))
    ]
    plans = (c.kernel.plan(c.problem, gpu.capability, c.accumulate, c.layout) for c in tried)
    compile_all(gpu, plans)
    failures = [(c.problem, c.layout, checker.exact_failure(gpu, c)) for c in tried]
    assert tried
    assert not [failure for failure in failures if failure[2] is not None]


@pytest.mark.parametrize("part", WRONG)
def test_wrong_kernels_are_rejected(gpu, tmp_path, part):
    wrong = _wrong(tmp_path, part)
    # No bias: an incorrect kernel may ignore it, but should fail for its own fault.
    problem = ConvProblem.parse("b3,c2,h9,w14,m5,k3x4")
    failure = checker.exact_failure(gpu, Case(wrong, problem))
    error = checker.relative_error(gpu, Case(wrong, problem)) if failure is None else None
    assert failure is not None or not error <= checker.largest_error(wrong, problem)


def test_the_benchmark_checks_what_it_times(gpu, tmp_path):
    naive, wrong = catalog.get("1_naive"), _wrong(tmp_path, "float sum = 0;")
    with cuda_timer.bench(gpu, ConvProblem.parse("b20,c2,h9,w14,m5,k3x4")) as bench:
        right, refused = bench.time(naive, 5), bench.time(wrong, 5)
    assert right.failure is None
    assert len(right.samples_ms) == 5
    assert 0 < right.error < 1e-6
    assert "elements are not finite" in str(refused.failure)


def test_a_batch_that_needs_several_chunks_of_columns(gpu):
    """im2col's workspace is bounded, so that it computes a batch in chunks."""
    kernel, problem = catalog.get("4_im2col"), ConvProblem.parse("b700,c1,h70,w70,m2,k5")
    assert len(kernel.plan(problem, gpu.capability, False).launches) == 4
    assert checker.exact_failure(gpu, Case(kernel, problem)) is None


PRODUCTS = [
    pytest.param(kernel, text, id=f"{text}-{kernel.name}")
    for text in (
        "b3,c3,h21,w18,m5,k5,s2x2,p2x2",  # remainders and a row's taps are channels
        "b2,c40,h13,w15,m70,k3,s2x2,p1x1",
        "b2,c12,h9,w10,m12,k3,p1x1,g3",  # zeros between groups
        "b4,c70,h7,w7,m9,k1",
    )
    for kernel in catalog.KERNELS
    if "gemm" in kernel.name.split("_")
    and "simt" not in kernel.name.split("_")
    and kernel.precision == "float32"
    and kernel.why_not(ConvProblem.parse(text), (9, 0)) is None
]


@pytest.mark.parametrize(("kernel", "text"), PRODUCTS)
def test_products_are_infinite_and_nan_where_the_textbooks_are(gpu, kernel, text):
    problem = ConvProblem.parse(text)
    rng = np.random.default_rng(1)
    output, *inputs = checker.ARRAYS[kernel.direction][:3]
    arrays = {
        role: rng.standard_normal(work.shape_of(problem, role)).astype("f") for role in inputs
    }
    for array in arrays.values():
        flat = array.reshape(-1)
        places = rng.choice(flat.size, 6, replace=False)
        flat[places] = [np.nan, np.inf, -np.inf, 1e38, 1e-38, 1e-42]
    expected = getattr(oracle, kernel.direction)(
        problem, *arrays.values(), *([None] if kernel.direction == "forward" else [])
    )
    start = {output: np.full(work.shape_of(problem, output), np.nan, "f")}
    plan = kernel.plan(problem, gpu.capability, False)
    found = gpu_arrays.run(gpu, plan, {**arrays, **start}, output)
    with np.errstate(all="ignore"):
        expected = expected.astype("f")
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-4, atol=1e-4)
