"""Programs with one fault each: it is found, at its line, and right ones have none."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import pytest

from ece408_op import settings
from ece408_op.backends.emulator import compiler, findings
from ece408_op.backends.emulator.library import load

FOLDER = Path(__file__).parent / "faults"
FILES = sorted(FOLDER.glob("*.cu"))
PROGRAM = re.compile(r"^PROGRAM\((\w+)\)", re.M)
# What the last error is: of faults that CUDA itself notices.
ERRORS = {
    **dict.fromkeys(("takes_a_null_pointer", "takes_the_host_s_array"), 700),
    "is_not_aligned": 716,
    "asserts": 710,
    **dict.fromkeys(("shuffles_in_a_branch", "gives_two_masks"), 702),
}


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """What is compiled here is compiled once."""
    return tmp_path_factory.mktemp("kept")


@functools.cache
def _load(path, kept):
    with settings.override(cache=kept):
        content = compiler.program(path)
        return load(content), content


def _marked(path, name):
    """The places that a program's comments name, each with what is wrong there."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {
        (line.rpartition(f"// {name}: ")[2], f"{path.name}:{number}")
        for number, line in lines
        if f"// {name}: " in line
    }


@pytest.mark.parametrize("seed", [None, 1], ids=["in order", "random"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fault_is_found_at_its_line(path, seed, kept):
    library, content = _load(path, kept)
    wrong = []
    for name in PROGRAM.findall(path.read_text()):
        findings.take()
        library.ece408_emulator_set(2, 1, int(seed is not None), ctypes.c_uint64(seed or 0))
        library.cudaDeviceReset()
        error = library.run(name.encode())
        found = findings.located(findings.take(), content)
        if error != ERRORS.get(name, 0):
            wrong.append(f"{name}: error {error}")
        expected = _marked(path, name)
        places = {(each.kind, each.place) for each in found}
        if name.startswith("right_") == bool(expected):
            wrong.append(f"{name}: its comments name {len(expected)} faults")
        # Of several places that take part in a race the one that comes second is found; what a
        # fault leads to is found at its line, too.
        missing = expected and not expected & places
        lines = {place for _, place in expected}
        if missing or any(place not in lines for _, place in places):
            wrong.append(f"{name}: {sorted(places)} instead of {sorted(expected)}")
    assert not wrong, "\n".join(wrong)
