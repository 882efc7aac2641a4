"""Kernels in CUDA files: every form compiles and is planned here, and is exact on a GPU."""

import dataclasses

import numpy as np
import pytest
from fake_gpu import FakeGpu
from harness import forward, inputs
from kernel_files import COURSE_2020, CUDA_2019, CUDA_2020, CUDA_FORMS, DECLARED
from places import CUBINS

import ece408_op
from ece408_op import dispatch, settings
from ece408_op.backends import kernel_file
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda import cuda_file_backend
from ece408_op.backends.cuda.kernel_plan import ARCHITECTURES, ConstantCopy, Launch
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import compiler, nvcc_compiler
from ece408_op.dispatch import Layer
from ece408_op.errors import (
    InvalidSetting,
    KernelCompileFailed,
    KernelFailed,
    KernelNotSupported,
    UnsupportedProblem,
)
from ece408_op.lab import explanation
from ece408_op.problem import ConvProblem

SHAPES = ["b3,c1,h9,w12,m4,k5", "b2,c3,h14,w9,m5,k7", "b1,c2,h4,w4,m1,k1"]
STRIDED = ["b2,c3,h14,w9,m5,k3,s2", "b2,c1,h9,w9,m2,k3,s3x3"]


@pytest.fixture
def write(request, tmp_path):
    """Write a kernel file; return its path: for nvcc always the same, so that it compiles once."""
    folder = CUBINS / "files" if "nvcc" in request.fixturenames else tmp_path
    folder.mkdir(parents=True, exist_ok=True)

    def file(name, text=None):
        path = folder / name
        path.write_text(CUDA_FORMS[name] if text is None else text)
        return str(path)

    return file


def _plan(path, text="b5,c3,h14,w9,m4,k3,s2", accumulate=False):
    return catalog.get(path).plan(ConvProblem.parse(text), (9, 0), accumulate)


def test_a_declared_launch_is_planned(write):
    plan = _plan(write("declared.cu"))
    assert plan.launches == (
        Launch("convolve", (5, 4, 1), (64, 1, 1), ("y", "x", "w", 4, 3, 14, 9, 3, 2)),
    )
    text = """
#include "shape.cuh"
#include "output.cuh"
// ece408: workspace 4 * B * M
// ece408: constant taps = w
// ece408: launch first<<<ceil_div(B * OH * OW, 256), min(H, 32), 4 * (K + 1)>>>(workspace, x);
// ece408: launch second<<<dim3(1, 2, max(M, 3)), dim3(8, 8)>>>(
//    y, workspace, bias, C / 2, (B + 1) % 4)
"""
    plan = _plan(write("many.cu", text), "b5,c3,h14,w9,m4,k3,bias", accumulate=True)
    assert plan.launches == (
        Launch("first", (2, 1, 1), (14, 1, 1), ("workspace", "x"), 16),
        Launch("second", (1, 2, 4), (8, 8, 1), ("y", "workspace", "bias", 1, 2)),
    )
    assert plan.constants == (ConstantCopy("taps", "w", 4 * 4 * 3 * 9),)
    assert plan.workspace_bytes == 80
    assert {"CHANNELS": 3, "KERNEL_W": 3, "BIAS": 1, "ACCUMULATE": 1}.items() <= dict(
        plan.defines
    ).items()


def test_a_changed_text_is_another_module(write):
    plan = _plan(write("declared.cu"))
    assert _plan(write("declared.cu")) == plan
    assert _plan(write("declared.cu", DECLARED + "// changes")).defines != plan.defines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("launch convolve(y, x, w)", r"should be launch NAME<<<grid, block>>>"),
        ("launch convolve<<<B>>>(y, x, w)", "should have a grid, a block"),
        ("launch convolve<<<B, 1, 2, 3>>>(y, x, w)", "should have a grid, a block"),
        ("launch convolve<<<B, N>>>(y, x, w)", "has 'N'; there are B, M, C"),
        ("launch convolve<<<B, M / (K - K)>>>(y)", "division|modulo"),
        ("launch convolve<<<B, M M>>>(y)", "does not parse"),
        ("launch convolve<<<B, __import__('os')>>>(y)", "has .__import__"),
        ("launch convolve<<<dim3(1, 2, 3, 4), 1>>>(y)", "dim3 of one to three"),
        ("start convolve", "is no launch"),
    ],
)
def test_a_declaration_that_means_nothing_is_named_with_its_line(write, line, reason):
    text = "\n// ece408: launch convolve<<<1, 1>>>(y)\n\n// ece408: " + line
    with pytest.raises(InvalidSetting, match=rf"bad\.cu:4: '// ece408: .*{reason}"):
        catalog.get(write("bad.cu", text))


def test_what_a_declared_launch_does_not_mention_is_refused(write):
    kernel = catalog.get(write("plain.cu", DECLARED.replace("K, S)", "K, 1)", 1)))
    for text, reason in (
        ("b1,c1,h9,w9,m1,k3,p1", "no PH and PW"),
        ("b1,c1,h9,w9,m1,k3,d2", "no DH and DW"),
        ("b1,c2,h9,w9,m2,k3,g2", "no G,"),
        ("b1,c1,h9,w9,m1,k3,s2", "no S, nor SH and SW"),
        ("b1,c1,h9,w9,m1,k3x1", "no KH and KW"),
        ("b1,c1,h9,w9,m1,k3,bias", "not mention bias"),
        ("b1,c1,h9,w9,m1,k3,float64", "float32 only, not float64"),
        ("b1,c1,h9,w9,m65536,k3", r"grid of convolve would be \(1, 65536, 1\)"),
    ):
        assert reason.replace("\\", "") in kernel.why_not(ConvProblem.parse(text), (9, 0)), text
    large = catalog.get(write("large.cu", DECLARED.replace("THREADS 64", "THREADS 1025")))
    assert "block of convolve" in large.why_not(ConvProblem.parse(SHAPES[0]), (9, 0))
    with pytest.raises(UnsupportedProblem, match="overwrites y and cannot add to it"):
        _plan(write("declared.cu"), accumulate=True)


def test_a_file_is_for_its_backend(write):
    for name in CUDA_FORMS:
        path = write(name)
        with settings.override(kernel=path):
            dispatch.check_settings()
        with (
            settings.override(kernel=path, backend="cpu"),
            pytest.raises(InvalidSetting, match="is for backend cuda, not for backend cpu"),
        ):
            dispatch.check_settings()
    with pytest.raises(InvalidSetting, match=r"empty\.cu has no GPUInterface::conv_forward_gpu"):
        dispatch.check_names(cuda_kernel=write("empty.cu", COURSE_2020))
    with pytest.raises(InvalidSetting, match="launches its kernel itself"):
        catalog.get(write("new-forward.cuh"))


def test_what_a_course_s_file_does_not_compute_is_refused(write):
    for name in ("new-forward.cuh", "new-forward.cu", "with-stride.cu"):
        file = kernel_file.find(write(name))
        backends = [
            cuda_file_backend.StagedFileBackend(file),
            cuda_file_backend.ZeroCopyFileBackend(0, file),
        ]
        for backend in backends[: 1 if file.form == "course_2020" else 2]:
            for text, reason in (
                ("b1,c1,h9,w9,m1,k3,p1", "no padding, dilation or groups"),
                ("b1,c1,h9,w9,m1,k3x1", "square kernels only"),
                ("b1,c1,h9,w9,m1,k3,s2x1", "stride 1 only"),
            ):
                problem = ConvProblem.parse(text)
                if name == "with-stride.cu" and "s2" in text:
                    reason = "the same stride both ways only"
                assert reason in backend.supports(problem, "forward"), (name, text)
                assert backend.supports(problem, "backward_data") is None
            assert backend.supports(ConvProblem.parse(SHAPES[0]), "forward") is None
    on_gpu = cuda_file_backend.ZeroCopyFileBackend(0, file)
    assert "takes arrays on the host" in on_gpu.supports(ConvProblem.parse(SHAPES[0]), "forward")


@pytest.mark.parametrize(
    ("names", "architectures"),
    [
        (("declared.cu", "new-forward.cuh"), ARCHITECTURES[:1]),
        pytest.param(
            *(CUDA_FORMS, ARCHITECTURES[:: len(ARCHITECTURES) - 1]), marks=pytest.mark.slow
        ),
    ],
)
def test_forms_compile_for_the_oldest_and_the_newest_architecture(
    write, nvcc, names, architectures
):
    path = write("declared.cu")
    for architecture in architectures:
        assert compiler.compile_plan(path, _plan(path).defines, architecture, CUBINS)
    for name in set(names) - {"declared.cu"}:
        file = kernel_file.find(write(name))
        # One library for both: only the kernels' code differs by architecture.
        command = cuda_file_backend.library_command(file, architectures[0])
        command += map(nvcc_compiler.gencode, architectures[1:])
        content = kernel_file.compiled(file, command, (), CUBINS, AssertionError())
        assert kernel_file.load(file, content).ece408_file_forward


def test_which_methods_a_file_defines(write, nvcc):
    """Definitions in included files count, comments do not."""
    write(
        "epilog.cuh", CUDA_2020.replace("void GPUInterface::conv_forward_gpu_pr", "static void pr")
    )
    prolog = "// GPUInterface::conv_forward_gpu_prolog(), GPUInterface::conv_forward_gpu()"
    texts = {
        "one-method.cu": (f"{prolog}\n{CUDA_FORMS['one-method.cu']}", False),
        "includes.cu": (f'{prolog}\n#include "epilog.cuh"\n', True),
    }
    with settings.override(cache=CUBINS):
        for name, (text, copies) in texts.items():
            file = kernel_file.find(write(name, text))
            assert cuda_file_backend.has_prolog(file, (9, 0)) == copies, name
        problem = ConvProblem.parse(SHAPES[0])
        with pytest.raises(KernelFailed, match="conv_forward_gpu_prolog is not defined, or not"):
            cuda_file_backend.call_method(file, FakeGpu(), problem, "prolog", 0, 0, 0)


def test_what_the_compiler_gives_each_function(write, nvcc):
    problem = ConvProblem.parse("b10,c12,h33,w33,m24,k5")
    for name in ("declared.cu", "new-forward.cu"):
        file = kernel_file.find(write(name))
        found = explanation.resources(file, problem, FakeGpu())
        assert len(found) == 1
        (resources,) = found.values()
        assert 8 <= resources.registers <= 255
        assert resources.spilled_bytes == 0


def test_nvcc_s_error_has_the_file_s_own_line(write, nvcc):
    text = CUDA_2020.replace("float sum = 0;", "float sum = nothing;")
    line = text[: text.index("nothing")].count("\n") + 1
    file = kernel_file.find(write("broken.cu", text))
    with pytest.raises(KernelCompileFailed, match=rf"broken\.cu:{line}: .*\"nothing\" is undef"):
        kernel_file.compiled(
            file, cuda_file_backend.library_command(file, "90"), (), CUBINS, AssertionError()
        )


def test_what_nvcc_misses_of_mxnet_is_not_the_file_s_fault(write, nvcc):
    more = "\nstatic void more(mshadow::Tensor<mshadow::gpu, 4> y) { y += y; }\n"
    file = kernel_file.find(write("more.cuh", CUDA_2019 + more))
    command = cuda_file_backend.library_command(file, "90")
    with pytest.raises(KernelNotSupported, match=r'no operator "\+=" matches .*mshadow::Tensor'):
        kernel_file.compiled(file, command, (), CUBINS, AssertionError())


# --- on a GPU


def _backend(path):
    layer = Layer("conv", cuda_kernel=path)
    return dispatch.select(ConvProblem.parse(SHAPES[0]), layer, "forward")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_FORMS)
def test_every_form_is_exact(write, rng, kept, name):
    with settings.override(cache=kept):
        backend = _backend(write(name))
        for text in SHAPES + STRIDED * (name in ("with-stride.cu", "declared.cu")):
            problem = ConvProblem.parse(text)
            x, w, _ = inputs(problem, rng)
            expected = forward(ReferenceBackend(), problem, x, w)
            assert np.array_equal(forward(backend, problem, x, w), expected), text
            if name != "declared.cu":
                onto = rng.integers(-9, 9, problem.y_shape).astype("float32")
                found = forward(backend, problem, x, w, onto=onto)
                assert np.array_equal(found, expected + onto), text
        large = dataclasses.replace(problem, batch=1000)
        x, w, _ = inputs(large, rng)
        assert np.array_equal(
            forward(backend, large, x, w), forward(ReferenceBackend(), large, x, w)
        )


@pytest.mark.gpu
def test_the_operator_computes_with_it(mx, write, kept):
    x = mx.nd.array(np.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8) % 7)
    w = mx.nd.array(np.arange(4 * 3 * 3 * 3).reshape(4, 3, 3, 3) % 5)
    given = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
    expected = mx.nd.Convolution(x, w, **given).asnumpy()
    with ece408_op.op_times() as log, settings.override(cache=kept):
        for name in CUDA_FORMS:
            found = ece408_op.Convolution(x, w, **given, cuda_kernel=write(name))
            assert np.array_equal(found.asnumpy(), expected), name
    assert [(each.backend, each.kernel) for each in log] == [("cuda", name) for name in CUDA_FORMS]
    assert all(each.gpu.kernel_seconds > 0 for each in log)


@pytest.mark.gpu
def test_what_its_code_throws_is_said(write, rng, kept):
    path = write("new-forward.cuh", CUDA_2019.replace('<< "rows"', '<< "rows"; CHECK_EQ(0, 1)'))
    problem = ConvProblem.parse(SHAPES[0])
    x, w, _ = inputs(problem, rng)
    with settings.override(cache=kept), pytest.raises(KernelFailed, match="Check failed: 0 == 1"):
        forward(_backend(path), problem, x, w)
    many = write("many.cu", CUDA_2020.replace("THREADS 256", "THREADS 2048"))
    with (
        settings.override(cache=kept),
        pytest.raises(KernelFailed, match="conv_forward_gpu: invalid"),
    ):
        forward(_backend(many), problem, x, w)


@pytest.mark.gpu
def test_m3_1_with_a_file(write, run_ece408, fashion_mnist):
    ours = run_ece408("m3.1", "100").stdout.splitlines()[-1]
    for name in CUDA_FORMS:
        result = run_ece408("m3.1", "100", "--kernel", write(name))
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == ours, name
