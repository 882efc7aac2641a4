"""Kernels in C++ files: both forms of the course run unchanged, and errors take one line."""

import numpy as np
import pytest
from cases import first
from harness import forward, inputs
from kernel_files import COURSE_2019, COURSE_2020, FORMS

import ece408_op
from ece408_op import dispatch, errors, settings
from ece408_op.backends import kernel_file
from ece408_op.backends.cpu import compiled_file
from ece408_op.backends.cpu.cpu_file_backend import FileBackend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.errors import (
    InvalidSetting,
    KernelCompileFailed,
    KernelFailed,
    KernelsMissing,
    UnsupportedProblem,
)
from ece408_op.problem import ConvProblem


def _backend(path):
    return FileBackend(kernel_file.find(path))


@pytest.fixture
def write(written, kept):
    """Write a kernel file; return its path."""

    def file(name, text=None):
        return str(written(name, FORMS[name] if text is None else text))

    with settings.override(cache=kept):
        yield file


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_exact(write, rng, name):
    backend = _backend(write(name))
    shapes = ["b3,c1,h9,w12,m4,k5", "b2,c3,h14,w9,m5,k7", "b1,c2,h4,w4,m1,k1"]
    if name == "with-stride.cc":
        shapes += ["b2,c3,h14,w9,m5,k3,s2", "b2,c1,h9,w9,m2,k3,s3x3"]
    for text in shapes:
        problem = ConvProblem.parse(text)
        x, w, _ = inputs(problem, rng)
        expected = forward(ReferenceBackend(), problem, x, w)
        assert np.array_equal(forward(backend, problem, x, w), expected), text
        onto = rng.integers(-9, 9, problem.y_shape).astype("float32")
        assert np.array_equal(forward(backend, problem, x, w, onto=onto), expected + onto), text


@pytest.mark.parametrize("name", ["new-forward.h", "cpu-new-forward.cc"])
def test_the_operator_computes_with_it(mx, write, name):
    x = mx.nd.array(np.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8) % 7)
    w = mx.nd.array(np.arange(4 * 3 * 3 * 3).reshape(4, 3, 3, 3) % 5)
    given = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
    expected = mx.nd.Convolution(x, w, **given)
    path = write(name)
    with ece408_op.op_times() as log:
        for setting in ({"cuda_kernel": path}, {}):
            with settings.override(kernel=None if setting else path):
                found = ece408_op.Convolution(x, w, **given, **setting)
                found.wait_to_read()
            assert np.array_equal(found.asnumpy(), expected.asnumpy())
    assert [(entry.backend, entry.kernel) for entry in log] == [("cpu", name)] * 2
    # The CPU backend computes the gradients that it lacks.
    x.attach_grad()
    for precision in ("float32", "strict"):
        with ece408_op.op_times() as log, mx.autograd.record():
            own = {"cuda_kernel": path, "gradient_precision": precision}
            ece408_op.Convolution(x, w, **given, **own).backward()
            assert float(x.grad.sum().asscalar()) == float(w.sum().asscalar()) * 2 * 36
        assert [(entry.direction, entry.precision) for entry in log] == [
            *(("forward", "float32"), ("backward_data", precision))
        ]


def test_the_variable_is_noticed_between_calls(mx, write, monkeypatch):
    x, w = mx.nd.ones((1, 1, 5, 5)), mx.nd.ones((1, 1, 3, 3))

    def kernel():
        with ece408_op.op_times() as log:
            ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=1, no_bias=True).wait_to_read()
        return log[0].kernel

    before = kernel()
    monkeypatch.setenv("ECE408_KERNEL", write("cpu-new-forward.cc"))
    assert kernel() == "cpu-new-forward.cc"
    monkeypatch.delenv("ECE408_KERNEL")
    assert kernel() == before != "cpu-new-forward.cc"


def test_a_changed_file_and_a_damaged_copy_are_compiled_again(write, kept, rng, capfd):
    problem = ConvProblem.parse("b1,c1,h5,w5,m1,k2")
    x, w, _ = inputs(problem, rng)
    expected = forward(ReferenceBackend(), problem, x, w)
    text = COURSE_2020 + "// changes\n"
    path = write("changes.cc", text)
    assert np.array_equal(forward(_backend(path), problem, x, w), expected)
    write("changes.cc", text.replace("float sum = 0", "float sum = 100"))
    assert np.array_equal(forward(_backend(path), problem, x, w), expected + 100)
    for library in (kept / "cpu-kernels").glob("changes-*.so"):
        library.write_bytes(library.read_bytes()[:-1])
    compiled_file.load.cache_clear()
    compiled_file.library.cache_clear()
    write("changes.cc", text)
    assert np.array_equal(forward(_backend(path), problem, x, w), expected)
    assert "compiling changes.cc again" in capfd.readouterr().err


def test_a_compiler_is_known_whatever_the_terminal(monkeypatch):
    """g++ wraps its help at the terminal's width."""
    versions = compiled_file.compiler_versions.__wrapped__
    before = versions(compiled_file.compiler())
    monkeypatch.setenv("COLUMNS", "131")
    assert versions(compiled_file.compiler()) == before


def test_what_a_file_does_not_compute_is_refused(write, mx):
    backend = _backend(write("cpu-new-forward.cc"))
    for text, reason in (
        ("b1,c1,h9,w9,m1,k3,p1", "no padding, dilation or groups"),
        ("b1,c1,h9,w9,m1,k3,d2", "no padding, dilation or groups"),
        ("b1,c2,h9,w9,m2,k3,g2", "no padding, dilation or groups"),
        ("b1,c1,h9,w9,m1,k3,s2", "stride 1 only"),
        ("b1,c1,h9,w9,m1,k3x1", "square kernels only"),
        ("b1,c1,h9,w9,m1,k3,bias", "no bias"),
        ("b1,c1,h9,w9,m1,k3,float64", "float32 only, not float64"),
    ):
        problem = ConvProblem.parse(text)
        assert reason in backend.supports(problem, "forward"), text
        assert backend.supports(problem, "backward_data") is None
    strided = _backend(write("with-stride.cc"))
    assert strided.supports(ConvProblem.parse("b1,c1,h9,w9,m1,k3,s2"), "forward") is None
    x, w, bias = mx.nd.ones((1, 1, 5, 5)), mx.nd.ones((1, 1, 3, 3)), mx.nd.ones(1)
    with (
        settings.override(kernel=write("cpu-new-forward.cc")),
        pytest.raises(UnsupportedProblem, match=r"cpu-new-forward\.cc computes no bias"),
        errors.surfaced(),
    ):
        ece408_op.Convolution(x, w, bias, kernel=(3, 3), num_filter=1).wait_to_read()


def test_what_is_wrong_with_a_file_is_one_line(write, monkeypatch):
    problem = ConvProblem.parse("b1,c1,h5,w5,m1,k2")
    broken = write("broken.cc", COURSE_2020.replace("float sum = 0;", "float sum = 0"))
    with pytest.raises(
        KernelCompileFailed, match=r"broken\.cc:19: expected .*exit code 1"
    ) as error:
        _backend(broken).prepare(problem, "forward")
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidSetting, match=r"nowhere\.cc cannot be read \(No such file"):
        _backend("nowhere.cc")
    with pytest.raises(InvalidSetting, match=r"empty\.cc has neither conv_forward_cpu"):
        _backend(write("empty.cc", ""))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsMissing, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        _backend(write("other.cc", COURSE_2020 + "\n")).prepare(problem, "forward")


@pytest.mark.parametrize("linked", first(1, ["", "-static-libstdc++"]))
def test_what_its_code_throws_is_said(mx, write, rng, written, monkeypatch, linked):
    if linked:
        compiler = written(
            "compiler", f'#!/bin/sh\nexec {compiled_file.compiler()} {linked} "$@"\n', 0o755
        )
        monkeypatch.setenv("CXX", str(compiler))
    path = write(
        "new-forward.h", COURSE_2019.replace('<< "rows"', '<< "rows"; CHECK_EQ(0, 1) << "not done"')
    )
    problem = ConvProblem.parse("b1,c1,h5,w5,m1,k2")
    x, w, _ = inputs(problem, rng)
    with pytest.raises(
        KernelFailed, match=r"new-forward\.h:17: Check failed: 0 == 1 \(0 vs\. 1\) not done"
    ):
        forward(_backend(path), problem, x, w)
    x, w = mx.nd.ones((1, 1, 5, 5)), mx.nd.ones((1, 1, 3, 3))
    with (
        settings.override(kernel=path),
        pytest.raises(KernelFailed, match="not done"),
        errors.surfaced(),
    ):
        ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=1, no_bias=True).wait_to_read()


def test_other_backends_refuse_a_file(write):
    path = write("cpu-new-forward.cc")
    for backend in ("cuda", "reference"):
        with (
            settings.override(kernel=path, backend=backend),
            pytest.raises(InvalidSetting, match=f"is for backend cpu, not for backend {backend}"),
        ):
            dispatch.check_settings()


def test_threads_are_those_of_the_settings(write, rng):
    text = COURSE_2020.replace("float sum = 0", "float sum = omp_get_max_threads()")
    text = "#include <omp.h>\n" + text
    problem = ConvProblem.parse("b1,c1,h3,w3,m1,k3")
    x, w, _ = inputs(problem, rng)
    expected = forward(ReferenceBackend(), problem, x, w)
    backend = _backend(write("threads.cc", text))
    for threads in (1, 3):
        with settings.override(threads=threads):
            assert np.array_equal(forward(backend, problem, x, w), expected + threads)


def test_m2_1_with_a_file(write, run_here):
    ours = run_here("m2.1", "5").stdout.splitlines()[-1]
    result = run_here("m2.1", "5", "--kernel", write("cpu-new-forward.cc"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ours
    wrong = write("wrong.cc", COURSE_2020.replace("float sum = 0", "float sum = 1e4 * m"))
    result = run_here("m2.1", "5", "--kernel", wrong)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("Correctness: ")
    assert result.stdout.splitlines()[-1] != ours
    missing = run_here("m2.1", "5", "--kernel", "nowhere.cc")
    assert (missing.returncode, missing.stdout) == (16, "")
    assert missing.stderr.count("\n") == 1
