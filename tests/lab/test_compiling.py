"""For a kernel file, the compiler reads only the file's own sources, and has limits."""

import subprocess
import sys

import pytest
from cases import first
from kernel_files import COURSE_2020

from ece408_op.backends import kernel_file
from ece408_op.backends.emulator.library import Emulation
from ece408_op.errors import KernelCompileFailed
from ece408_op.lab import check as checking
from ece408_op.lab import compile_sandbox
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c1,h9,w9,m2,k3")
SECRET = "// what only the teacher knows\n"
CUDA = """
{}
// ece408: launch convolve<<<B, 64>>>(y, x, w)
extern "C" __global__ void convolve(float *y, const float *x, const float *w) {{}}
"""


@pytest.fixture
def check(tmp_path):
    """Check a text as a file of this name in a folder; return its verdict."""
    folder = tmp_path / "class"
    folder.mkdir()
    (tmp_path / "secret.h").write_text(SECRET)
    (folder / "link.h").symlink_to(tmp_path / "secret.h")
    (folder / "others.cc").write_text(COURSE_2020 + SECRET)
    (folder / "grades.csv").write_text(SECRET)

    def checked(text, name="mine.cc", **keywords):
        path = folder / name
        path.write_text(text)
        return checking.check(kernel_file.find(str(path)), [PROBLEM], **keywords)

    return checked


OTHERS = ("/etc/passwd", "link.h", "../secret.h", "others.cc", "grades.csv", "/proc/self/environ")


@pytest.mark.parametrize("path", first(3, OTHERS))
def test_what_is_not_its_own_is_not_compiled(check, path):
    with pytest.raises(KernelCompileFailed, match="Permission denied"):
        check(f'#include "{path}"\n{COURSE_2020}')


@pytest.mark.parametrize("path", first(1, OTHERS[:2]))
def test_nor_is_it_for_the_emulator(check, path):
    text = CUDA.format(f'#include "{path}"')
    with pytest.raises(KernelCompileFailed, match="Permission denied"):
        check(text, "mine.cu", emulation=Emulation())


def test_an_assembler_reads_no_more(check):
    with pytest.raises(KernelCompileFailed, match=r"file not found|Permission denied"):
        check(COURSE_2020 + 'asm(".incbin \\"/etc/passwd\\"");')


def test_headers_of_its_own_are_compiled(check, tmp_path):
    folder = tmp_path / "class" / "parts"
    folder.mkdir()
    (folder / "one.h").write_text('#include "two.hpp"\n')
    (folder / "two.hpp").write_text("#pragma once\n")
    assert check('#include "parts/one.h"\n' + COURSE_2020).is_right


def test_compiling_has_limits(check, tmp_path, written):
    # A library of 2 GiB.
    with pytest.raises(KernelCompileFailed, match=r"mine\.cc: "):
        check("char large[1L << 31] = {1};\n" + COURSE_2020)
    source = written("mine.cc", "")
    command = compile_sandbox.guard(tmp_path)(["/bin/sh", "-c", "ulimit -t; ulimit -v"], source)
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert said.split() == ["150", str(4 << 20)]


def test_what_is_printed_is_cut(check):
    with pytest.raises(KernelCompileFailed) as caught:
        check(COURSE_2020 + f"#error {'long ' * 1000}\n")
    assert "long long" in str(caught.value)
    assert len(str(caught.value)) < 2100


def test_nothing_is_imported_from_the_folder_at_hand(check, tmp_path, monkeypatch):
    folder = tmp_path / "class"
    for name in ("numpy", "ctypes", "ece408_op", "json"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    assert check(COURSE_2020).is_right
    assert not {"numpy", "ctypes", "ece408_op", "json"} & {each.name for each in tmp_path.iterdir()}


def test_a_compiler_starts_programs_and_writes_in_its_folders_only(tmp_path, written):
    source = written("mine.cc", "")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guarded = compile_sandbox.guard(scratch)
    tries = "cat {0} > $TMPDIR/copy; echo made; echo x > {1}/x; cat {1}/y; kill -0 $PPID"
    (tmp_path / "y").write_text(SECRET)
    command = guarded(["/bin/sh", "-c", tries.format(source, tmp_path)], source)
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "made\n"
    assert result.returncode != 0
    assert not (tmp_path / "x").exists()
    assert (scratch / "copy").exists()
    assert sys.executable == command[0]


def test_it_starts_without_numpy(run_python):
    """Several such processes start for each file."""
    result = run_python("import sys, ece408_op.lab.compile_sandbox; print('numpy' in sys.modules)")
    assert result.stdout == "False\n", result.stderr
