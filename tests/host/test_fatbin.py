import struct
import subprocess

import pytest

from ece408_op.backends.cpu import native
from ece408_op.host.fatbin import architectures, runs_on
from ece408_op.host.gpu import find_nvcc

KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n"
PTX, CODE = 1, 2
EXACT, FAMILY = 0x100000, 0x200000


def entry(kind, number, flags=0, payload=bytes(24)):
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"\0")
    return (header + struct.pack("<I8xI", number, flags)).ljust(64, b"\0") + payload


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(**sections):
    """Return a 64-bit ELF file with only these sections; a dot before a name is `_dot_`."""
    sections = {name.replace("_dot_", "."): content for name, content in sections.items()}
    names = b"\0" + b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    body, headers = b"", []
    for name, content in [*sections.items(), (".shstrtab", names)]:
        at = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<I20xQQ24x", at, 64 + len(body), len(content)))
        body += content
    table = struct.pack("<Q", 64 + len(body))
    start = (b"\x7fELF\x02\x01".ljust(0x28, b"\0") + table).ljust(0x3A, b"\0")
    counts = struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return start + counts + body + b"".join(headers)


@pytest.fixture
def library(tmp_path):
    def write(content):
        path = tmp_path / "lib.so"
        path.write_bytes(content)
        return path

    return write


# By architectures, the sections that have them. Each container and entry is read once, in order;
# code for one GPU or family has nvcc's suffix; relocatable code counts, and other sections do not;
# a header without sizes ends the search.
SECTIONS = {
    ("sm_75", "sm_86", "sm_100", "compute_86"): {
        "_dot_text": b"code",
        "_dot_nv_fatbin": container(entry(CODE, 100), entry(CODE, 86)) + bytes(8)
        + container(entry(PTX, 86), entry(CODE, 86), entry(CODE, 75)),
    },
    ("sm_90", "sm_90a", "sm_100f"): {
        "_dot_nv_fatbin": container(
            entry(CODE, 90, EXACT), entry(CODE, 100, FAMILY), entry(CODE, 90)
        ),
    },
    ("sm_80",): {
        "__nv_relfatbin": container(entry(CODE, 80)),
        "_dot_data": container(entry(CODE, 70)),
        "_dot_nvFatBinSegment": container(entry(CODE, 60)),
    },
    (): {
        "_dot_text": b"code",
        "_dot_nv_fatbin": struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0)
        + container(struct.pack("<HHIQ", CODE, 0x101, 0, 0) + bytes(48)),
    },
}  # fmt: skip


@pytest.mark.parametrize("found", SECTIONS)
def test_architectures_of_a_library(library, found):
    path = library(elf(**SECTIONS[found]))
    assert architectures(path) == architectures(str(path)) == list(found)


def test_what_has_no_architectures(library, tmp_path):
    assert architectures(library(elf(_dot_text=b"code"))) == []
    assert architectures(native.LIBRARY) == []
    for content in (b"", b"\x7fELF\x01\x01 32 bits", b"#!/bin/sh\n" * 20):
        with pytest.raises(ValueError, match=r"ELF|empty"):
            architectures(library(content))
    whole = elf(_dot_nv_fatbin=container(entry(CODE, 80)))
    with pytest.raises(ValueError, match=r"lib\.so is a damaged ELF file"):
        architectures(library(whole[:-70]))
    with pytest.raises(FileNotFoundError):
        architectures(tmp_path / "none.so")


@pytest.mark.slow
def test_what_nvcc_makes(tmp_path):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "k.cu").write_text(KERNEL)
    wanted = ["arch=compute_75,code=sm_75", "arch=compute_90,code=[sm_90,compute_90]"]
    command = [str(nvcc), "-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
    for each in [*wanted, "arch=compute_90a,code=sm_90a"]:
        command += ["-gencode", each]
    result = subprocess.run([*command, "-o", "k.so", "k.cu"], cwd=tmp_path, capture_output=True)
    if result.returncode != 0:
        pytest.skip(f"this nvcc does not make such a library: {result.stderr.decode()[:200]}")
    assert architectures(tmp_path / "k.so") == ["sm_75", "sm_90", "sm_90a", "compute_90"]


# Code, and GPUs that run it; and GPUs that do not.
RUNS = ("sm_80 8.0", "sm_80 8.6", "compute_70 9.0", "sm_90a 9.0", "sm_100f 10.3")
DOES_NOT = (
    *("sm_86 8.0", "sm_86 9.0", "compute_90 8.9", "sm_120a 12.1", "compute_90a 10.0"),
    *("sm_103f 10.0", "compute_100f 12.0"),
)


def test_where_code_runs():
    for each in (*RUNS, *DOES_NOT):
        architecture, capability = each.split()
        found = runs_on(architecture, tuple(map(int, capability.split("."))))
        assert found is (each in RUNS), each


def test_an_architecture_must_be_one():
    with pytest.raises(ValueError, match="'gfx90a' is not an architecture such as sm_80"):
        runs_on("gfx90a", (9, 0))
