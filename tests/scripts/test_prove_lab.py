"""The lab's verdicts beside an independent check's, for correct and incorrect files."""

import json
import sys

import programs
import pytest
from kernel_files import COURSE_2020
from places import ROOT
from studies import lab_proof


def test_what_is_right_by_other_means():
    exact, close = {"wrong": 0, "error": 0.0}, {"wrong": 0, "error": 4e-7}
    assert lab_proof.is_right([exact, close], 2)
    assert not lab_proof.is_right([exact], 2)
    for other in ({"wrong": 3, "error": 0.0}, {"wrong": 0, "error": 3e-4}, {"failure": "ended"}):
        assert not lab_proof.is_right([exact, other], 2)
    assert not lab_proof.is_right([exact, {"wrong": 0, "error": None}], 2)


@pytest.mark.slow
def test_files_are_compared_and_ranked_twice(tmp_path):
    folder = tmp_path / "files"
    for name, text in {
        "a.cc": COURSE_2020,
        "b.cc": COURSE_2020.replace("= sum;", "= sum + 1;"),
        "c.cc": "void conv_forward_cpu( {",
    }.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    prefix = tmp_path / "lab"
    script = [sys.executable, str(ROOT / "scripts" / "prove_lab.py"), str(folder)]
    arguments = ["--batch-size", "5", "--repeat", "1", "--jobs", "1", "--output", str(prefix)]
    result = programs.run(*script, *arguments)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "lab.json").read_text())["files"]
    assert [row["number"] for row in rows] == ["1", "2", "3"]
    assert {row["agree"] for row in rows} == {"yes"}
    assert rows[0]["lab check"] == "right"
    assert float(rows[0]["sum, ms"]) > 0
    assert rows[1]["by other means"] == "whole numbers are wrong"
    assert "elements are wrong" in rows[1]["lab check"]
    assert rows[2]["by other means"] == "fails"
    assert str(tmp_path) not in (tmp_path / "lab.md").read_text()
