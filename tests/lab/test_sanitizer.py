"""compute-sanitizer's reports become findings with lines; a tool watches the lab's process."""

import sys
from pathlib import Path

import pytest
from kernel_files import COURSE_2020

from ece408_op import settings
from ece408_op.backends import kernel_file
from ece408_op.errors import ProfilerMissing
from ece408_op.lab import check as checking
from ece408_op.lab import sanitizer
from ece408_op.lab.sanitizer import Finding, Sanitized
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c1,h9,w9,m2,k3")
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at conv(float *, const float *)+0x150 in /some/where/mine.cu:12
=========     by thread (3,0,0) in block (1,2,0)
=========     Access at 0x7f0000000404 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 1024 bytes
=========
========= Invalid __global__ read of size 4 bytes
=========     at conv(float *, const float *)+0x150 in /some/where/mine.cu:12
=========     by thread (4,0,0) in block (1,2,0)
=========     Access at 0x7f0000000404 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 1024 bytes
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at conv+0x1c30 in mine.cu:18
=========     and Write access at conv+0x690 in mine.cu:14 [79116 hazards]
=========     and Write access at conv+0x880 in mine.cu:15 [44000 hazards]
=========
========= Warning: Race reported between Write access at conv+0x690 in mine.cu:14
=========     and Write access at conv+0x690 in mine.cu:14 [19072 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
# Runs its arguments as a command, and uses the log beside it as its own.
FAKE = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2
while [ "${1##*/}" != "{python}" ]; do shift; done
"$@"
cp "${0%/*}/log" "$log"
"""


def test_findings_have_lines():
    findings, ended = sanitizer.parse(MEMCHECK)
    assert ended
    text = "Invalid __global__ read of size 4 bytes, 1 bytes after an array of 1024 bytes"
    assert findings == (Finding(text, "mine.cu:12", "thread (3,0,0) in block (1,2,0)", 2),)
    findings, ended = sanitizer.parse(RACECHECK)
    assert ended
    assert findings == (
        Finding("race of a read and a write at mine.cu:14", "mine.cu:18", ""),
        Finding("race of a write and a write at mine.cu:14", "mine.cu:14", "", warning=True),
    )
    assert sanitizer.parse("========= COMPUTE-SANITIZER\n") == ((), False)


def test_warnings_are_no_mistakes():
    warning = Finding("race", "mine.cu:14", "", warning=True)
    assert Sanitized("racecheck", (warning,)).is_clean
    assert not Sanitized("racecheck", (warning, Finding("race", "mine.cu:18", ""))).is_clean
    assert not Sanitized("racecheck", (), "it ended without a summary").is_clean


@pytest.fixture
def file(tmp_path, written, monkeypatch):
    """Return a file, in place of a CUDA one, with a compute-sanitizer on PATH."""
    path = written("mine.cc", COURSE_2020)
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(FAKE.replace("{python}", Path(sys.executable).name))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    with settings.override(cache=tmp_path / "kept"):
        yield kernel_file.find(str(path))


@pytest.mark.slow
def test_a_tool_watches_each_run(file):
    (file.path.parent / "bin" / "log").write_text(MEMCHECK)
    steps = []
    found = sanitizer.sanitize(file, [PROBLEM], lambda: steps.append(1))
    assert [each.tool for each in found] == list(sanitizer.TOOLS)
    assert len(steps) == 4
    assert {each.findings[0].place for each in found} == {"mine.cu:12"}
    verdict = checking.check(file, [PROBLEM])
    assert verdict.is_right
    verdict.sanitized = found
    assert not verdict.is_right


def test_without_the_tool_or_for_the_cpu_it_is_refused(file, monkeypatch, tmp_path, run_ece408):
    result = run_ece408("lab", "check", "--sanitize", str(file.path))
    assert result.returncode == 16
    assert "--sanitize takes CUDA files" in result.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "_FOLDERS", str(tmp_path))
    with pytest.raises(ProfilerMissing, match="install the CUDA toolkit"):
        sanitizer.find()
