"""The compiled library: loading it, and the errors for its status codes."""

import mmap
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.random import mtrand

from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.errors import InvalidProblem, KernelsMissing, NotEnoughMemory, UnsupportedProblem
from ece408_op.files import resources
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b1,c1,h3,w3,m1,k3")


def test_what_is_not_the_library(tmp_path, monkeypatch):
    """None, no library, one of another version, and one of something else."""
    path, none = tmp_path / "libece408_cpu.so", tmp_path / "none.so"
    path.write_text("not a library")
    monkeypatch.setattr(native, "_ABI_VERSION", 999)
    for given, message in (
        (none, rf"^the compiled CPU kernels are not at {none}; .*pip install \."),
        (path, "does not load"),
        (native.LIBRARY, "this package needs 999"),
        (Path(mtrand.__file__), "ece408_abi_version"),
    ):
        with pytest.raises(KernelsMissing, match=message) as caught:
            native.load(given)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "text", "y", "threads", "error", "match"),
    [
        ("reference_forward", "", None, 1, InvalidProblem, "ece408_reference_forward_f32"),
        ("reference_forward", "", 1, 0, InvalidProblem, ""),
        ("forward", "b1,c1,h3,w3,m1,k3,p1", 1, 1, UnsupportedProblem, "forward_f32 by direct"),
        ("forward", "b1,c65536,h1,w5,m1073741824,k1x2", 1, 1, NotEnoughMemory, ""),
    ],
)
def test_a_status_is_an_error(function, text, y, threads, error, match):
    problem = ConvProblem.parse(text) if text else PROBLEM
    how = {"isa": "baseline", "kernel": "direct"} if function == "forward" else {}
    with pytest.raises(error, match=match):
        native.run(function, problem, 1, 1, None, y, accumulate=False, threads=threads, **how)


def test_the_library_exports_its_headers_and_nothing_else():
    headers = ("api/ece408.h", "network/program.h")
    header = "".join((resources.kernels_dir() / "cpu" / name).read_text() for name in headers)
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(native.LIBRARY)], capture_output=True, text=True
    )
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert names
    for name in names:
        assert name.startswith("ece408_")
        function, _, suffix = name.rpartition("_")
        typed = suffix in (*native.SUFFIXES.values(), native.STRICT)
        assert f"{name}(" in header or (typed and f"{function}_##suffix(" in header), name


_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def fresh():
    """Return 64 MiB of untouched memory in pages of 4 KiB, and a function that counts its huge
    pages."""
    if not _MODES.exists() or "[never]" in _MODES.read_text():
        pytest.skip("this system has no huge pages")
    memory = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.float32)

    def huge_bytes():
        found = re.findall(
            r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+) kB",
            Path("/proc/self/smaps").read_text(),
            re.M | re.S,
        )
        ranges = [(int(begin, 16), int(end, 16), int(size) << 10) for begin, end, size in found]
        ours = range(array.ctypes.data, array.ctypes.data + array.nbytes)
        return sum(size for begin, end, size in ranges if begin < ours.stop and end > ours.start)

    return array, huge_bytes


def test_fresh_memory_gets_huge_pages_where_that_is_asked_for(fresh):
    array, huge_bytes = fresh
    array[:1024] = np.arange(1024)
    before = huge_bytes()
    native.ask_for_huge_pages(array.ctypes.data + 5, array.nbytes - 5)
    array[1024:] = 1
    assert huge_bytes() >= before + (32 << 20)
    assert (array[:1024] == np.arange(1024)).all()


def test_a_large_output_is_written_to_huge_pages(fresh, rng):
    array, huge_bytes = fresh
    problem = ConvProblem.parse("b16,c2,h258,w258,m16,k3")
    x, w = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in (problem.x_shape, problem.w_shape)
    )
    y = array[: 16 * 16 * 256 * 256].reshape(problem.y_shape)
    addresses = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
    CpuBackend().forward(problem, *addresses, accumulate=False)
    assert huge_bytes() >= 32 << 20
