"""compute-sanitizer's output for planted faults, beside the emulator's answers."""

import json
import sys
from pathlib import Path

import pytest
from places import ROOT
from programs import run
from studies import faults
from studies.faults import Outcome, Program

WRONG = Program("sums", frozenset({("race between threads of a block", "races.cu:14")}))
RIGHT = Program("right_sums", frozenset())
READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at reads_one_more(float *, const float *, int)+0x90 in /path/bounds.cu:8
=========     by thread (127,0,0) in block (1,0,0)
=========     Access at 0x7f3a02000600 is out of bounds
0
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sums(float *)+0x150 in /path/races.cu:12
=========     and Read access at sums(float *)+0x170 in /path/races.cu:14 [256 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n0\n========= ERROR SUMMARY: 0 errors\n"


def test_reports_and_their_lines():
    found = faults.outcome(READ, 9)
    assert {place for _, place in found.reports} == {"bounds.cu:8"}
    assert not found.at_line(WRONG)
    assert faults.said(found, WRONG) == "found elsewhere"
    # Both accesses of a race are its lines.
    race = faults.outcome(RACE, 9)
    assert {place for _, place in race.reports} == {"races.cu:12", "races.cu:14"}
    assert faults.said(race, WRONG) == "found at its line"
    assert faults.said(race, RIGHT) == "reports"
    assert faults.outcome(CLEAN, 0) == Outcome()
    assert faults.outcome(CLEAN, 9).reports
    assert faults.outcome("", 1).failure
    told = {"memcheck": Outcome(), "racecheck": race, "synccheck": Outcome(failure="hangs")}
    assert faults.tools_said(told, WRONG) == "racecheck: found at its line; synccheck: hangs"
    assert faults.counted("It", [(WRONG, [Outcome(), race]), (RIGHT, [Outcome()])]) == (
        "It reports 1 of 1 faults, 1 at the line, and something in 0 of 1 right programs"
    )


def test_a_program_that_hangs_ends_with_its_tool(written, monkeypatch):
    monkeypatch.setattr(faults, "LIMIT", 1)
    tool = written(
        "compute-sanitizer", f"#!/bin/sh\ncat <<END\n{RACE}END\nsleep 60 &\nwait\n", 0o755
    )
    found = faults.sanitized(str(tool), "racecheck", Path("races"), "sums")
    assert found.failure == "hangs"
    assert found.at_line(WRONG)


@pytest.mark.slow
def test_the_emulator_alone(tmp_path):
    prefix = tmp_path / "faults"
    script = [sys.executable, str(ROOT / "scripts" / "prove_faults.py"), "--without-gpu"]
    result = run(*script, "--output", prefix)
    assert result.returncode == 0, result.stderr
    programs = json.loads((tmp_path / "faults.json").read_text())["programs"]
    assert {each["emulator"] for each in programs} == {"found at its line", "nothing"}
    assert str(tmp_path) not in (tmp_path / "faults.md").read_text()
