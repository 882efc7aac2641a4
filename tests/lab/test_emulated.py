"""CUDA files without a GPU: checked as on one, with the lines of their memory errors."""

import json
import os
import re
from unittest import mock

import pytest
from cases import first
from kernel_files import CUDA_FORMS, DECLARED, FAULTS, FAULTY, TILED
from places import ROOT

from ece408_op import dispatch, settings
from ece408_op.backends import kernel_file
from ece408_op.backends.emulator import emulator_compiler
from ece408_op.backends.emulator.library import CHECKED, Emulation
from ece408_op.errors import (
    InvalidSetting,
    KernelCompileFailed,
    KernelFailed,
    KernelNotSupported,
    NotEnoughMemory,
    NoUsableGpu,
)
from ece408_op.host.gpu import find_nvcc
from ece408_op.lab import check as checking
from ece408_op.lab.check import Group, Verdict
from ece408_op.problem import ConvProblem

STARTERS = ROOT / "kernels" / "files" / "starters"
TEXTS = ("b3,c3,h9,w12,m4,k3", "b2,c6,h30,w30,m16,k5", "b1,c1,h7,w7,m2,k7")
PROBLEMS = [ConvProblem.parse(text) for text in TEXTS]


@pytest.fixture(autouse=True)
def _cheap(request, monkeypatch):
    """Use few images; and no nvcc, the slowest part, unless it is tested itself."""
    monkeypatch.setitem(checking._BATCH, "emulator", 1)
    monkeypatch.setitem(checking._LARGER, "emulator", 8)
    monkeypatch.setattr(checking, "_ODD_PROBLEMS", 4)
    if "nvcc" not in request.node.name:
        monkeypatch.setattr(emulator_compiler, "find_nvcc", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for files of several tests: one that is not changed is compiled once."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def check(folder):
    """Check a text as a file; return its verdict."""

    def checked(name, text, problems=PROBLEMS, emulation=CHECKED, folder=folder, **keywords):
        path = folder / name
        path.write_text(text)
        return checking.check(
            kernel_file.find(str(path)), problems, emulation=emulation, **keywords
        )

    return checked


ALIKE = ("new-forward.cu", "with-stride.cu", "one-method.cu")


@pytest.fixture
def without_gpu(monkeypatch):
    find = mock.Mock(side_effect=NoUsableGpu("no driver; install one"))
    monkeypatch.setattr(dispatch.gpu, "find_driver", find)
    dispatch.backend_of_cuda_files.cache_clear()
    yield
    dispatch.backend_of_cuda_files.cache_clear()


def _failures(verdict):
    return [each.text for group in verdict.groups for each in group.failures]


@pytest.mark.parametrize("name", first(1, ["new-forward.cuh", "declared.cu", *ALIKE]))
def test_every_form_is_right(check, name):
    # With 5 filters the last row is left out.
    text = re.sub(
        r"(i <|pixel >=) H_out \* W_out", r"\g<0> - (M == 5 ? W_out : 0)", CUDA_FORMS[name]
    )
    strided = [ConvProblem.parse("b2,c3,h14,w9,m6,k3,s2")]
    takes_strides = name in ("with-stride.cu", "declared.cu")
    verdict = check(name, text, PROBLEMS + strided * takes_strides)
    assert verdict.is_right, _failures(verdict)
    assert [each.findings for each in verdict.sanitized] == [()]
    assert verdict.error
    (failure,) = _failures(check(name, text, [ConvProblem.parse("b3,c3,h9,w12,m5,k3")]))
    assert "in row 6, the last" in failure


@pytest.mark.slow
def test_a_folder_can_hold_the_header_of_its_own_term(check, tmp_path):
    (tmp_path / "gpu-new-forward.h").write_text("""
#pragma once
class GPUInterface {
  public:
    void get_device_properties();
    void conv_forward_gpu(float *host_y, const float *host_x, const float *host_k, const int B,
                          const int M, const int C, const int H, const int W, const int K);
};
""")
    verdict = check("one-method.cu", CUDA_FORMS["one-method.cu"], PROBLEMS[:1], folder=tmp_path)
    assert verdict.is_right, (verdict.broken, _failures(verdict))


def test_the_starter_that_is_no_form_of_these_is_right(check):
    verdict = check("start.cu", (STARTERS / "start.cu").read_text())
    assert verdict.is_right, (_failures(verdict), verdict.sanitized)


def _of(filters):
    """Return a problem on which FAULTY has the fault of this number."""
    return ConvProblem.parse(f"b1,c2,h14,w14,m{filters},k5")


def test_a_fault_is_found_at_its_line(check):
    """Each on a separate problem; together, those whose consequences do not hide another."""
    lines = FAULTY.splitlines()
    right = check("tiled.cu", FAULTY, [_of(20)])
    assert right.is_right, (_failures(right), right.sanitized)
    for numbers in ((22, 25), (21, 23, 24, 26, 27)):
        (sanitized,) = check("tiled.cu", FAULTY, [_of(n) for n in numbers]).sanitized
        for _, _, kind, mark in map(FAULTS.get, numbers):
            place = f"tiled.cu:{next(n for n, each in enumerate(lines, 1) if mark in each)}"
            told = [each for each in sanitized.findings if each.place == place]
            assert [e for e in told if e.text.startswith(kind) and not e.warning], (kind, told)
    race = r"read here, and written by thread .* at tiled\.cu:\d+, with no barrier"
    assert any(re.search(race, each.text) for each in sanitized.findings), sanitized.findings


def test_threads_that_end_before_a_barrier_are_a_warning(check):
    verdict = check("tiled.cu", FAULTY, [_of(28)])
    assert verdict.is_right, (_failures(verdict), verdict.sanitized)
    (sanitized,) = verdict.sanitized
    assert {each.warning for each in sanitized.findings} == {True}
    assert all(each.text.startswith("__syncthreads() that not all") for each in sanitized.findings)


@pytest.mark.slow
@pytest.mark.parametrize("end", first(1, ["exit(-1)", "abort()", "*(volatile int *)8 = 0"]))
def test_findings_outlast_the_process(check, end):
    text = TILED.replace("__syncthreads();  // first", "", 1)
    text = text.replace(
        "const cudaError_t error = cudaGetLastError();", f"{end}; cudaError_t error;"
    )
    verdict = check("tiled.cu", text, PROBLEMS[:1])
    assert not verdict.is_right
    (sanitized,) = verdict.sanitized
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("// use"))
    found = [each for each in sanitized.findings if each.place == f"tiled.cu:{line}"]
    assert any(each.text.startswith("race between threads") for each in found), sanitized.findings


def test_what_a_file_says_in_the_emulator_s_place_is_no_more_than_data(check):
    verdict = check("tiled.cu", FAULTY, [_of(30)] * 3)
    assert not verdict.is_right
    assert len(_failures(verdict)) == 3
    assert [each.findings for each in verdict.sanitized] == [()]


# A quarter of the images in each of four streams.
STREAMS = TILED.replace("int M, int C", "int first, int M, int C").replace(
    "b = blockIdx.x", "b = first + blockIdx.x"
)
STREAMS = STREAMS.replace("const dim3 grid(B, M,", "const dim3 grid(B / 4, M,").replace(
    "    conv<<<grid, dim3(TILE, TILE), side * side * sizeof(float)>>>(y, x, w, M",
    "    for (int i = 0; i < 4; ++i)  // streams\n"
    "        conv<<<grid, dim3(TILE, TILE), side * side * 4>>>(y, x, w, i * (B / 4), M",
)


@pytest.mark.slow
def test_a_file_that_needs_more_images_is_judged_with_more(check):
    text = STREAMS.replace("i < 4; ++i)", "i < 4 && B / 4; ++i)")
    verdict = check("streams.cu", text, (), term="2020fa", emulation=Emulation("fast"), seed=1)
    layers, odd = verdict.groups
    assert verdict.is_right, _failures(verdict)
    assert layers.right == 2
    (note,) = layers.notes
    assert note.startswith("judged with 8 images; with 1: ")
    assert "nothing is written" in note
    assert odd.failures
    # None if more do not help.
    text = text.replace("i < 4", "i < 3")
    verdict = check("streams.cu", text, (), term="2020fa", emulation=Emulation("fast"), seed=1)
    assert not verdict.is_right
    layers = verdict.groups[0]
    assert [each.problem.split(",")[0] for each in layers.failures] == ["b8", "b1"]
    assert "not written: all in images 6 to 7, the last 2 of 8" in layers.failures[0].text


# im2col in arrays of MXNet's, each for some images, and a product of matrices.
UNROLLED = """
#ifndef MXNET_OPERATOR_NEW_FORWARD_CUH_
#define MXNET_OPERATOR_NEW_FORWARD_CUH_
#include <mxnet/base.h>

namespace mxnet {
namespace op {

__global__ void unroll(float *to, const float *x, int C, int H, int W, int K) {
  const int columns = (H - K + 1) * (W - K + 1), i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= columns) return;
  const int h = i / (W - K + 1), w = i % (W - K + 1);
  for (int c = 0, row = 0; c < C; ++c)
    for (int p = 0; p < K; ++p)
      for (int q = 0; q < K; ++q, ++row) to[row * columns + i] = x[(c * H + h + p) * W + w + q];
}

__global__ void multiply(float *y, const float *k, const float *patches, int rows, int columns) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int r = 0; i < columns && r < rows; ++r)
    y[blockIdx.y * columns + i] += k[blockIdx.y * rows + r] * patches[r * columns + i];
}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &k) {
  const int M = y.shape_[1], C = x.shape_[1], H = x.shape_[2], W = x.shape_[3], K = k.shape_[3];
  const int rows = C * K * K, columns = y.shape_[2] * y.shape_[3];
  mshadow::Tensor<gpu, 2, float> patches;
  patches.shape_ = mshadow::Shape2(rows, columns);
  mshadow::AllocSpace(&patches);
  auto others = mshadow::NewTensor<gpu>(mshadow::Shape2(rows, columns), 0.0f);
  mshadow::TensorContainer<gpu, 2> freed(mshadow::Shape2(rows, columns));
  y = 0;
  for (unsigned b = 0; b < x.shape_[0]; ++b) {
    float *one = b % 3 == 0 ? patches.dptr_ : b % 3 == 1 ? others.dptr_ : freed.dptr_;
    if (M != 2) unroll<<<(columns + 255) / 256, 256>>>(one, x[b].dptr_, C, H, W, K);
    multiply<<<dim3((columns + 255) / 256, M), 256>>>(y[b].dptr_, k.dptr_, one, rows, columns);
  }
  MSHADOW_CUDA_CALL(cudaDeviceSynchronize());
  mshadow::FreeSpace(&others);
  mshadow::FreeSpace(&patches);
}

}
}
#endif
"""


def test_arrays_of_mxnet_are_there(check):
    verdict = check("new-forward.cuh", UNROLLED, PROBLEMS[:1])
    assert verdict.is_right, (_failures(verdict), verdict.sanitized)
    assert [each.findings for each in verdict.sanitized] == [()]
    # Their memory is uninitialised before the file writes it.
    (sanitized,) = check("new-forward.cuh", UNROLLED, PROBLEMS[2:]).sanitized
    assert sanitized.findings[0].text.startswith("reads memory that was never written")


CUBLAS = "#include <cublas_v2.h>\n"


def _plain(text):
    """Return the text in one line, with plain quotation marks."""
    return " ".join(text.replace("\u2018", "'").replace("\u2019", "'").split())


PTX = "declared.cu:14: PTX (asm) cannot run without a GPU"
NOT_HERE = [
    ("declared.cu", "float sum = 0;", 'float sum = 0; asm("bar.sync 0;");', PTX),
    ("new-forward.cuh", "y = 0;", "y += x;", "new-forward.cuh:34: no "),
    ("new-forward.cuh", "y = 0;", "mshadow::Random<gpu> r;", "member"),
    ("new-forward.cuh", "#include <mx", f"{CUBLAS}#include <mx", "cublas_v2.h: No such"),
]


@pytest.mark.parametrize(("name", "old", "new", "says"), first(1, NOT_HERE))
def test_what_is_not_here_is_no_fault_of_the_file(run_here, tmp_path, name, old, new, says):
    text = DECLARED if name == "declared.cu" else UNROLLED
    (tmp_path / name).write_text(text.replace(old, new))
    path = str(tmp_path / name)
    result = run_here("lab", "check", path, "--emulate")
    counted = run_here("lab", "time", path, "--emulate", "--batch-size", "1")
    assert result.returncode == KernelNotSupported.exit_code
    assert f"stopped: {name}:" in result.stdout
    for each in (result, counted):
        assert says in _plain(each.stdout)
    assert result.stdout.splitlines()[-1] == "  verdict: cannot be tried here"


def test_what_no_compiler_takes_is_wrong(run_here, tmp_path):
    """Also errors of the linker; both with their reason."""
    for new, says in (
        ("float sum = none;", "declared.cu:14: "),
        ("float sum = 0; convolve<<<1, 1>>;", "declared.cu:14: '<<<' begins no launch that has an"),
        ('\n#include "matmul.h"\n', "declared.cu:15: matmul.h: No such file or directory"),
        ("float sum = 0; void more(float *); more(0);", ": undefined reference to `"),
    ):
        (tmp_path / "declared.cu").write_text(DECLARED.replace("float sum = 0;", new))
        result = run_here("lab", "check", str(tmp_path / "declared.cu"), "--emulate")
        assert result.returncode == 23
        assert says in _plain(result.stdout), new
        assert result.stdout.splitlines()[-1] == "  verdict: wrong"


SMALL_CONSTANT = (
    TILED.replace("#define TILE 8", "#define TILE 8\n__constant__ float Mask[4096];")
    .replace("* w[((", "* Mask[((")
    .replace(
        "cudaMemcpy(*device_w, w, sizeof(float) * M * C * K * K, cudaMemcpyHostToDevice);",
        "cudaMemcpyToSymbol(Mask, w, sizeof(float) * M * C * K * K);  // copy",
    )
)


COPY = next(n for n, each in enumerate(SMALL_CONSTANT.splitlines(), 1) if "// copy" in each)
TOO_SMALL = f"tiled.cu:{COPY}: failed CUDA call: copies 12544 bytes to or from Mask, which has 4096"


@pytest.mark.slow
def test_a_constant_for_its_own_layers_is_enough(run_here, written):
    path = written("tiled.cu", SMALL_CONSTANT)
    result = run_here("lab", "check", str(path), "--emulate", "--seed", "1")
    path.write_text(SMALL_CONSTANT.replace("Mask[4096]", "Mask[1024]"))
    wrong = run_here("lab", "check", str(path), "--emulate", "--seed", "1")
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-3:] == [
        "  emulator: 0 mistakes",
        "  right on its own layers; its constant Mask holds 4096 weights, fa19_2 has 7200",
        "  verdict: right for 2020fa and later",
    ]
    assert wrong.returncode == 23
    assert " ".join(wrong.stdout.split()).count(TOO_SMALL) == 2
    lines = [each for each in wrong.stdout.splitlines() if "again: " not in each]
    assert max(map(len, lines)) <= 100
    assert wrong.stdout.splitlines()[-1] == "  verdict: wrong"


def test_too_little_memory_is_no_fault_of_the_file(check):
    # Compiled before: compilers take memory, too.
    assert check("tiled.cu", FAULTY, PROBLEMS[:1]).is_right
    verdict = check("tiled.cu", FAULTY, PROBLEMS[:1], memory=640 << 20)
    assert verdict.by_machine == "NotEnoughMemory"
    assert verdict.broken.startswith("the emulator lacks memory")


@pytest.mark.slow
def test_nor_does_it_count_on_other_layers(check):
    no_room = 'if (H == 33) throw std::runtime_error("the emulator has no room for 8 bytes");'
    text = TILED.replace(
        "const int side = TILE + K - 1;\n    const dim3",
        f"{no_room}\nconst int side = TILE + K - 1;\n    const dim3",
    )
    verdict = check("tiled.cu", text, (), emulation=Emulation("fast"))
    assert verdict.is_right
    assert not verdict.by_machine
    (others,) = verdict.elsewhere
    assert others.failures[-1].text.startswith("the emulator lacks memory")


def test_the_command_says_what_it_has_not_checked(run_here, tmp_path, monkeypatch):
    """It continues with other files."""
    unchecked = Verdict("one.cu", broken="too little memory", by_machine="NotEnoughMemory")
    right = Verdict("two.cu", [Group("given problems", 1)])
    verdicts = iter([unchecked, right])
    monkeypatch.setattr("ece408_op.lab.check.check", lambda *args, **keywords: next(verdicts))
    for name in ("one.cu", "two.cu"):
        (tmp_path / name).write_text(TILED)
    result = run_here("lab", "check", "--emulate", *map(str, sorted(tmp_path.glob("*.cu"))))
    assert result.returncode == NotEnoughMemory.exit_code
    assert "verdict: cannot be tried here" in result.stdout
    assert "verdict: right" in result.stdout
    assert "one.cu: cannot be tried here; too little memory" in result.stderr


def test_a_kernel_without_an_end_is_ended(check):
    (failure,) = _failures(check("tiled.cu", FAULTY, [_of(29)], call_seconds=2))
    assert failure == "a call takes more than 2 s"


@pytest.mark.slow
def test_one_that_overflows_its_stack_is_ended(check):
    text = TILED.replace(
        "__global__ void conv",
        "__device__ int deep(volatile int *n) { volatile int many[4096]; many[*n] = 0; "
        "return *n < 0 ? 0 : deep(n) + many[0]; }\n__global__ void conv",
    ).replace("float sum = 0;", "int none = 0; float sum = deep(&none);")
    verdict = check("tiled.cu", text, PROBLEMS[:1])
    (failure,) = _failures(verdict)
    assert "a thread's local memory and calls take more than the 256 KB" in failure
    (sanitized,) = verdict.sanitized
    (found,) = sanitized.findings
    line = next(n for n, each in enumerate(text.splitlines(), 1) if "int deep(" in each)
    assert found.place == f"tiled.cu:{line}"
    assert "take more than the 256 KB" in found.text


# Code that g++ accepts in a kernel, the text before the kernel, and nvcc's error.
NVCC_REFUSES = [
    ("float more[K]; more[0] = 0; sum += more[0];", "", "must have a constant value"),
    ("sum += none();", "float none() { return 0; }\n", "calling a __host__ function"),
    ("sum += 0 * width;", "float width = 2;\n", "is undefined in device code"),
]


@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not here")
@pytest.mark.parametrize(("part", "before", "said"), first(1, NVCC_REFUSES))
def test_what_nvcc_refuses_is_refused(check, part, before, said):
    text = before + TILED.replace("float sum = 0;", f"float sum = 0; {part}")
    line = next(n for n, each in enumerate(text.splitlines(), 1) if part in each)
    with pytest.raises(KernelCompileFailed, match=rf"/tiled\.cu:{line}: .*{said}"):
        check("tiled.cu", text)


@pytest.mark.slow
def test_a_broken_nvcc_is_no_fault_of_the_file(check, tmp_path, written, monkeypatch):
    written(
        "nvcc",
        "#!/bin/sh\necho 'host_config.h(9): error: unsupported GNU version' >&2; exit 1\n",
        0o755,
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert check("tiled.cu", TILED, PROBLEMS[:1]).is_right


@pytest.mark.parametrize("nbytes", first(1, [65540, 65536]))
def test_constant_memory_has_64_kb(check, nbytes):
    text = TILED.replace(
        "__global__ void conv",
        "namespace mine { static __constant__ const float first[2] = {1}; }\n"
        f"__constant__ char rest[{nbytes - 8}];  // rest\n__global__ void conv",
    ).replace("float sum = 0;", "float sum = mine::first[K > 100] * 0 + rest[K] * 0;")
    if nbytes == 65536:
        assert check("tiled.cu", text, PROBLEMS[:1]).is_right
        return
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("// rest"))
    said = rf"/tiled\.cu:{line}: the file's __constant__ variables up to here take 65540 bytes"
    with pytest.raises(KernelCompileFailed, match=said):
        check("tiled.cu", text)


@pytest.mark.slow
def test_a_constant_variable_has_room_for_what_is_copied_there(check):
    text = (STARTERS / "start.cu").read_text().replace("* w[((m", "* mask[((m")
    constant = "// ece408: constant mask = w\n__constant__ float mask[{}];\n#define THREADS"
    (right, wrong) = (text.replace("#define THREADS", constant.format(n)) for n in (108, 107))
    assert check("start.cu", right, PROBLEMS[:1]).is_right
    (failure,) = _failures(check("start.cu", wrong, PROBLEMS[:1]))
    line = next(n for n, each in enumerate(wrong.splitlines(), 1) if "constant mask = w" in each)
    assert failure == f"start.cu:{line}: copies 432 bytes to or from mask, which has 428"


@pytest.mark.usefixtures("without_gpu")
def test_the_command_says_that_it_emulates(run_here, folder):
    (folder / "tiled.cu").write_text(FAULTY)
    result = run_here("lab", "check", str(folder / "tiled.cu"), "--problem", str(_of(21)))
    assert result.returncode == 23, result.stderr
    assert result.stderr.startswith("ece408: CUDA files are emulated on the CPU: no driver\n")
    assert "race between threads of a block (4 bytes): read here, and written by" in result.stdout


def test_a_random_order_shows_what_the_usual_one_hides(check):
    """Each thread reads its neighbour's result, which in the usual order is ready."""
    problem, random = ConvProblem.parse("b1,c1,h10,w10,m31,k3"), Emulation(seed=0)
    assert not _failures(check("tiled.cu", FAULTY, [problem]))
    orders = [check("tiled.cu", FAULTY, [problem], emulation=random, seed=5) for _ in "ab"]
    told = [[each.failures for each in order.groups] for order in orders]
    assert told[0][0]
    assert told[0] == told[1]
    assert {each.order for each in orders} == {"random"}


@pytest.mark.slow
def test_the_command_repeats_a_random_order(run_here, written):
    path = written("tiled.cu", TILED.replace("sum = 0;", "sum = threadIdx.x;"))
    command = ("lab", "check", str(path), "--problem", TEXTS[0], "--order", "random", "--fast")
    result = run_here(*command, "--seed", "7")
    assert result.returncode == 23, result.stderr
    assert "--seed 7 --order random\n" in result.stdout


@pytest.mark.slow
def test_time_counts_lines(run_here, tmp_path, written):
    path = written("tiled.cu", SMALL_CONSTANT.replace("Mask[4096]", "Mask[1024]"))
    output = tmp_path / "counts.json"
    options = ("--batch-size", "1", "--emulate", "--arch", "sm_75", "--json", str(output))
    command = ("lab", "time", str(path))
    wrong = run_here(*command, "--layer", "fa20_2", *options)
    result = run_here(*command, "1_naive", "--layer", "b1,c1,h9,w9,m2,k2", *options)
    assert f"tiled.cu, fa20_2, 1 images: {TOO_SMALL}" in " ".join(wrong.stdout.split())
    assert result.returncode == 0, result.stderr
    assert "tiled.cu, b1,c1,h9,w9,m2,k2, 1 images: counted, not timed" in result.stdout
    # 2 filters in one block each of 8 x 8 threads, 2 warps; 9 x 9 floats of shared memory.
    assert "conv: 2 blocks of 64 threads, 324 bytes of shared memory; " in result.stdout
    assert re.search(
        r"tiled\.cu:\d+ +barrier +4 +32\.0 +__syncthreads\(\); +// first", result.stdout
    )
    told = {each["name"]: each for each in json.loads(output.read_text())}
    assert set(told) == {"tiled.cu", "1_naive"}
    loads = [each for each in told["1_naive"]["counts"] if each["what"] == "global load"]
    # 128 outputs, 4 warps, of 4 products, each of a pixel and a weight.
    assert [each["warps"] for each in loads] == [16, 16]


def test_an_unknown_gpu_is_refused(run_here, tmp_path):
    result = run_here("lab", "time", "1_naive", "--emulate", "--arch", "sm_1")
    assert result.returncode == InvalidSetting.exit_code
    assert "unknown architecture 'sm_1' (--arch); choose one of sm_75, sm_80" in result.stderr


@pytest.mark.parametrize("option", first(1, ["", "--emulate", "--fast"]))
@pytest.mark.usefixtures("without_gpu")
def test_a_milestone_runs_a_file(run_here, folder, kept_with_data, option):
    (folder / "tiled.cu").write_text(FAULTY)
    command = ("m3.1", "2", "--kernel", str(folder / "tiled.cu"), *option.split())
    with settings.override(cache=kept_with_data):
        result = run_here(*command)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^Op Time: \d+\.\d{6} \(emulated\)$", result.stdout, re.M)) == 2
    assert "Correctness: " in result.stdout
    assert "run on the CPU, by the emulator: op times are no GPU's" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("milestone", ["m2.1", "m3.1"])
def test_a_milestone_names_mistakes(run_here, tmp_path, kept_with_data, milestone):
    path = tmp_path / "tiled.cu"
    wide = TILED.replace("#define TILE 8", "#define TILE 16")
    path.write_text(wide.replace("__syncthreads();  // first", ""))
    with settings.override(cache=kept_with_data):
        result = run_here(milestone, "2", "--kernel", str(path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" (emulated)\n") == 2
    assert re.search(
        r"^ece408: conv1: tiled\.cu:\d+: race between threads of a block", result.stderr, re.M
    )
    # The error names the reason why the kernel ended.
    path.write_text(wide.replace("float sum = 0;", "float sum = *(float *)8;"))
    with settings.override(cache=kept_with_data):
        result = run_here(milestone, "2", "--kernel", str(path))
    assert result.returncode == KernelFailed.exit_code
    last = result.stderr.splitlines()[-1]
    assert "an illegal memory access was encountered" in last
    assert re.search(
        r"; tiled\.cu:\d+: illegal address \(4 bytes\): reads from address 0x8, ", last
    )


@pytest.mark.slow
def test_a_prolog_whose_output_has_no_const(check):
    """As declared in the header of some terms; a CUDA function for unsigned numbers."""
    text = TILED.replace("const float *, const float *x,", "float *, const float *x,")
    text = text.replace("blockIdx.z % across", "blockIdx.z % __float2uint_rd(across + 0.5f)")
    assert text.count("float *, const float *x,") == text.count("__float2uint_rd") == 1
    assert check("new-forward.cu", text).is_right
