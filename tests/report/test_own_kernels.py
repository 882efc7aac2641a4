"""A report's section on versions of a user's kernel."""

import dataclasses
import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from kernel_files import COURSE_2020, DECLARED
from played import played_ladder

from ece408_op.errors import InvalidSetting
from ece408_op.report import make, own_kernels

FIRST = "// The loops of the textbook.\n\n" + COURSE_2020
SECOND = FIRST.replace("// The loops of the textbook.", "// Sums in double.").replace(
    "float sum", "double sum"
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "versions"
    folder.mkdir()
    for name, text in {"2_doubles.cc": SECOND, "1_loops.cc": FIRST, "notes.txt": "x"}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def report(player, options, tmp_path, folder):
    """Make a report of the versions; return its Markdown."""
    layers = played_ladder("cpu").layers

    def timed():
        (path,) = (word[7:] for word in player.commands[-1] if word.startswith("--json="))
        seconds = {"ece408_op": 0.003, "1_loops.cc": 0.06, "2_doubles.cc": 0.03}
        rows = [
            {
                "name": name,
                "problem": problem,
                "seconds": []
                if (name, layer) == ("2_doubles.cc", "conv2")
                else [seconds[name]] * 3,
                "failure": "image 7 is wrong" if (name, layer) == ("2_doubles.cc", "conv2") else "",
            }
            for layer, problem in layers.items()
            for name in seconds
        ]
        Path(path).write_text(json.dumps(rows))
        return CompletedProcess([], 23, "", "ece408: error: 2_doubles.cc: not timed\n")

    player.instead[" lab time "] = timed

    def made():
        asked = dataclasses.replace(options, versions=own_kernels.find(folder))
        return make.make(asked, tmp_path), (tmp_path / "report.md").read_text()

    return made


def test_each_version_has_its_times_change_and_profile(report, player, folder):
    made, text = report()
    section = text[text.index("### Kernels of your own") :]
    three = "60.0 (60.0 to 60.0)"
    assert f"| 1_loops.cc | {three} |  | {three} |  |" in section
    assert "| 2_doubles.cc | 30.0 (30.0 to 30.0) | 2.00x over 1_loops.cc |  |  |" in section
    assert "| ece408_op, what this package chooses | 3.000 (3.000 to 3.000) |  | 3.000" in section
    assert "Sums in double. It failed: image 7 is wrong." in section
    assert "--- 1_loops.cc\n+++ 2_doubles.cc\n" in section
    assert "-// The loops of the textbook.\n+// Sums in double.\n" in section
    assert section.count("What changed:") == 1
    assert section.count("the entries above make up 90% of the time") >= 2
    assert "ladder_own.svg" in section
    assert "roofline_own.svg" in section
    assert "| conv1 | 2_doubles.cc |" in section
    assert made.failures == ("kernels of your own: 2_doubles.cc: not timed",)
    commands = [" ".join(command) for command in player.commands]
    for name in ("1_loops.cc", "2_doubles.cc"):
        (profiled,) = (each for each in commands if each.endswith(f"--kernel={folder / name}"))
        assert " profile " in profiled
        assert " m2.1 " in profiled


def test_the_report_is_made_again_without_the_files(report, folder, tmp_path):
    _, before = report()
    for path in folder.iterdir():
        path.unlink()
    make.write(tmp_path)
    assert (tmp_path / "report.md").read_text() == before


def test_files_that_are_no_versions_are_refused(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidSetting, match=r"no kernel file in .*empty"):
        own_kernels.find(empty)
    (folder / "3.cu").write_text(DECLARED)
    with pytest.raises(InvalidSetting, match="kernels for the CPU and for CUDA"):
        own_kernels.find(folder)
    (folder / "3.cu").unlink()
    (folder / "4.cc").write_text("int x;")
    with pytest.raises(InvalidSetting, match="neither conv_forward_cpu"):
        own_kernels.find(folder)


def test_times_that_cannot_be_read_are_said(folder):
    with pytest.raises(InvalidSetting, match="measure again"):
        own_kernels.ladder(own_kernels.find(folder), "[1]", played_ladder("cpu"))
