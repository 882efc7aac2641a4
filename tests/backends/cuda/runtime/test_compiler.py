"""NVRTC, nvcc, and the cache of their output, without a GPU."""

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import CUBINS
from programs import together

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import compiler, nvcc_compiler, nvrtc_compiler
from ece408_op.errors import KernelCompileFailed, NoUsableGpu
from ece408_op.files.resources import kernels_dir
from ece408_op.host.gpu import Nvrtc
from ece408_op.network import update
from ece408_op.network.machines.gpu_steps import CODES
from ece408_op.problem import ConvProblem
from ece408_op.profile import gpu_ceilings

# Each source with its macros and architectures.
SOURCES = {
    **{
        (each.source, each.macros): each.architectures
        for each in (*catalog.KERNELS, *CODES, update.CODE)
    },
    (gpu_ceilings.SOURCE, ()): gpu_ceilings.ARCHITECTURES,
}


@pytest.fixture
def folder(tmp_path, nvcc):
    return tmp_path / "kernels"


@pytest.fixture
def compiles(nvcc, noted):
    """Return the calls of the compiler of this package's sources."""
    used = nvcc_compiler if compiler.find_nvrtc() is None else nvrtc_compiler
    return noted(used, "compile_source")


@pytest.fixture(params=["NVRTC", pytest.param("nvcc", marks=pytest.mark.slow)])
def by_each(request, nvcc, monkeypatch):
    """Have this package's sources compiled by one of both."""
    if request.param == "nvcc":
        monkeypatch.setattr(compiler, "find_nvrtc", lambda: None)
    elif compiler.find_nvrtc() is None:
        pytest.skip("there is no NVRTC; pip install '.[test]' brings it")


def _check_compile(tasks):
    def compile_one(task):
        (source, macros), architecture = task
        try:
            compiler.compile_plan(source, macros, architecture, CUBINS)
        except KernelCompileFailed as error:
            return f"{source} {macros} for sm_{architecture}: {error}"
        return None

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failures = [failure for failure in pool.map(compile_one, tasks) if failure]
    assert not failures, "\n".join(failures)


def test_every_source_compiles_alone_for_the_oldest_architecture_it_claims(by_each):
    """The oldest architecture lacks most features; with some sets of macros."""
    first = {
        source: (macros, claimed[0]) for (source, macros), claimed in reversed(SOURCES.items())
    }
    _check_compile([((source, macros), oldest) for source, (macros, oldest) in first.items()])


@pytest.mark.slow
def test_every_source_compiles_alone_for_every_architecture_that_it_claims(by_each):
    _check_compile([(source, each) for source, claimed in SOURCES.items() for each in claimed])


def test_pointers_of_kernels_are_restrict():
    """nvcc has an option that says so for all. NVRTC's is without effect where a kernel stores by
    `__stcs`: ResNet-50 of 256 images then took an H200 32.8 ms, not 30.0."""
    kernels = r"__global__[^;{]*?\b(\w+)\(([^()]*)\)\s*\{"
    for source in sorted((kernels_dir() / "cuda").glob("*/*.cu*")):
        for name, parameters in re.findall(kernels, source.read_text()):
            plain = re.findall(r"\*(?!__restrict__ )\s*\w+", parameters)
            assert not plain, f"{source}: {name}"


def test_the_same_is_compiled_once(folder, compiles):
    first = compiler.compile_plan("ladder/1_naive.cu", (), "90", folder)
    assert compiler.compile_plan("ladder/1_naive.cu", (), "90", folder) == first
    assert len(compiles) == 1
    for defines, architecture in [((("BIAS", 1),), "90"), ((), "80")]:
        compiler.compile_plan("ladder/1_naive.cu", defines, architecture, folder)
    assert len(compiles) == 3


def _flip(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


SPOILED = {
    "emptied": (lambda path: path.write_bytes(b""), "is damaged"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "is damaged"),
    "altered": (_flip, "is damaged"),
    "others'": (lambda path: path.chmod(0o620), "can be written by other users"),
}


def test_what_is_kept_is_compiled_again_unless_it_is_sound(folder, compiles, capfd):
    sound = compiler.compile_plan("ladder/1_naive.cu", (), "90", folder)
    (kept,) = folder.glob("*.cubin")
    del compiles[:]
    for number, (how, (spoil, reason)) in enumerate(SPOILED.items(), 1):
        spoil(kept)
        for _ in range(2):
            assert compiler.compile_plan("ladder/1_naive.cu", (), "90", folder) == sound, how
        assert len(compiles) == number
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"ece408: compiling ladder/1_naive.cu again: {kept} {reason}"), how


OWN = {
    "own.cu": """#include "one.cuh"
#include "two.cuh"
#  include "folder/three.cuh"
extern "C" __global__ void f(int *y) { *y = 10000 + ONE + TWO + THREE + FOUR; }
""",
    "one.cuh": "#define ONE 1\n",
    "two.cuh": "#define TWO 10\n",
    "folder/three.cuh": '#define THREE 100\n#include "four.cuh"\n',
    "folder/four.cuh": "#define FOUR 1000\n",
}


@pytest.fixture
def own(folder, tmp_path):
    """Compile a new source that includes several headers."""
    (tmp_path / "folder").mkdir()
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    return lambda: compiler.compile_plan(str(tmp_path / "own.cu"), (), "90", folder)


def test_a_changed_source_or_header_is_compiled_again(own, tmp_path):
    made = [own()]
    for changed, text in OWN.items():
        (tmp_path / changed).write_text(text.replace("1", "2"))
        made.append(own())
        assert made[-1] not in made[:-1], changed


def test_another_compiler_compiles_again(own, noted, monkeypatch):
    calls = noted(nvcc_compiler, "compile_source")
    own()
    monkeypatch.setattr(nvcc_compiler, "nvcc_version", lambda nvcc: "another")
    own()
    assert len(calls) == 2


def test_threads_that_ask_at_once_share_one_compile(folder, compiles):
    asked = [("ladder/1_naive.cu", (), "75", folder)] * 4
    assert len(set(together(lambda given: compiler.compile_plan(*given), asked))) == 1
    assert len(compiles) == 1
    assert not [path for path in folder.iterdir() if path.name.startswith(".") and path.is_file()]


def test_a_source_that_does_not_compile_is_named_with_its_line(folder, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void f(float *y) {\n    *y = nowhere;\n}\n')
    with pytest.raises(KernelCompileFailed) as caught:
        compiler.compile_plan(str(source), (("BIAS", 1),), "90", folder)
    text = str(caught.value)
    assert text.startswith(f'{source}:2: identifier "nowhere" is undefined')
    assert "nvcc -cubin" in text
    assert "-DBIAS=1" in text
    assert "\n" not in text
    assert not list(folder.glob("*.cubin"))


def test_our_source_that_does_not_compile_is_named_with_its_line(folder, by_each, monkeypatch):
    ours = folder / "cuda" / "ladder" / "broken.cu"
    ours.parent.mkdir(parents=True)
    ours.write_text('#include <stdint.h>\n__device__ uint32_t f() { return "no number"; }\n')
    monkeypatch.setattr(compiler, "kernels_dir", lambda: folder)
    with pytest.raises(KernelCompileFailed) as caught:
        compiler.compile_plan("ladder/broken.cu", (("BIAS", 1),), "90", folder)
    text = str(caught.value)
    assert text.startswith(f"{ours}:2: return value type does not match the function type")
    assert "-DBIAS=1" in text
    assert "\n" not in text


def test_an_nvrtc_that_does_not_load_is_said(tmp_path, monkeypatch):
    damaged = tmp_path / "libnvrtc.so.13"
    damaged.write_bytes(b"damaged")
    monkeypatch.setattr(compiler, "find_nvrtc", lambda: Nvrtc(damaged, tmp_path))
    with pytest.raises(NoUsableGpu, match=r"libnvrtc.so.13 cannot be loaded .* reinstall CUDA"):
        compiler.compile_plan("ladder/1_naive.cu", (), "90", tmp_path)


def test_without_nvcc_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "find_nvrtc", lambda: None)
    monkeypatch.setattr(nvcc_compiler, "find_nvcc", lambda: None)
    with pytest.raises(NoUsableGpu, match="nvcc, which compiles the CUDA kernels, is not on PATH"):
        compiler.compile_plan("ladder/1_naive.cu", (), "90", tmp_path)


def test_an_nvcc_that_does_not_run_is_said(tmp_path):
    broken = tmp_path / "nvcc"
    for text, reason in itertools.zip_longest(("", "#!/bin/sh\nexit 3\n"), ("run", "with 3")):
        broken.write_text(text)
        broken.chmod(0o755 if text else 0o644)
        with pytest.raises(NoUsableGpu, match=reason):
            nvcc_compiler.nvcc_version.__wrapped__(broken)


LAYERS = ("b1,c1,h72,w72,m12,k7", "b1,c1,h48,w48,m6,k5", "b1,c1,h12,w12,m4,k3")


@pytest.mark.parametrize(
    "layer", [*LAYERS[2:], *(pytest.param(each, marks=pytest.mark.slow) for each in LAYERS[:2])]
)
def test_blocks_begin_with_the_registers_that_they_hand_over(folder, layer):
    """A block that requests more registers than it began with would wait forever."""
    kernel, problem = catalog.get("19_more_registers"), ConvProblem.parse(layer)
    for layout in kernel.layouts(problem, (9, 0))[:2]:
        plan = kernel.plan(problem, (9, 0), False, layout)
        binary = compiler.compile_plan(plan.kernel.source, plan.macros, "90a", folder)
        warps, later = plan.launches[0].block[0] // 32, dict(plan.macros)["REGISTERS"]
        # In .nv.info: attribute 0x2f with a value of 8 bytes, a function and its registers per
        # thread.
        (found,) = re.findall(rb"\x04\x2f\x08\0....(....)", binary, re.S)
        at_first = int.from_bytes(found, "little")
        assert at_first < later <= 248
        assert at_first * warps >= later * (warps - 4) + 24 * 4
