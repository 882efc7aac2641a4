"""Programs with one fault each: it is found at its line; correct programs have no findings."""

import functools
from pathlib import Path

import planted_faults as faults
import pytest

from ece408_op import settings
from ece408_op.backends.emulator import emulator_compiler
from ece408_op.backends.emulator.library import load

FILES = sorted((Path(__file__).parent / "faults").glob("*.cu"))
# The last error, for faults that CUDA itself detects.
ERRORS = {"illegal address": 700, "misaligned access": 716, "stopped": 710, "deadlock": 702}
ERRORS |= {"failed CUDA call": 1, "failed cudaFree()": 1}
# The last error of programs that differ from their kind's.
ERRORS |= {"uses_a_destroyed_stream": 400}


@functools.cache
def _load(path, kept):
    with settings.override(cache=kept):
        content = emulator_compiler.program(path)
        return load(content), content


@pytest.mark.parametrize("seed", [None, 1], ids=["in order", "random"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fault_is_found_at_its_line(path, seed, kept):
    library, content = _load(path, kept)
    wrong = []
    for program in faults.programs(path):
        error, found = faults.emulated(library, content, program.name, seed)
        expected = max((ERRORS.get(kind, 0) for kind in program.kinds), default=0)
        if error != ERRORS.get(program.name, expected):
            wrong.append(f"{program.name}: error {error}")
        if program.is_right == bool(program.marks):
            wrong.append(f"{program.name}: its comments name {len(program.marks)} faults")
        # In a race, the second of several accesses is found; consequences of a fault are found at
        # their line, too.
        missing = program.marks and not program.marks & found
        if missing or any(place not in program.lines for _, place in found):
            wrong.append(f"{program.name}: {sorted(found)} instead of {sorted(program.marks)}")
    assert not wrong, "\n".join(wrong)


def test_a_fault_is_found_whatever_ran_before(kept):
    """The emulator numbers operations up to 255."""
    path = next(path for path in FILES if path.stem == "streams")
    found = {
        (number, name): faults.emulated(*_load(path, kept), name, None)[1]
        for number in range(100)
        for name in ("copies_before_it_is_computed", "clears_on_the_default_stream")[
            : 1 + number % 2
        ]
    }
    assert [run for run, each in found.items() if not each] == []


def test_there_are_many_faults_of_each_kind():
    programs = [program for path in FILES for program in faults.programs(path)]
    assert len({program.name for program in programs}) == len(programs)
    assert sum(not program.is_right for program in programs) >= 64
    assert sum(program.is_right for program in programs) >= 12
    assert {kind for program in programs for kind in program.kinds} == set(faults.KINDS)
