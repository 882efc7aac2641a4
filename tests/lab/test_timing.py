"""Calls are timed one by one in turns, and incorrect ones do not count."""

import json

import pytest
from kernel_files import COURSE_2020, DECLARED
from places import ROOT

from ece408_op.backends import kernel_file
from ece408_op.lab import timing
from ece408_op.problem import ConvProblem

CHEATS = ROOT / "tests" / "cheats"
LAYERS = [(text, ConvProblem.parse(text)) for text in ("b3,c2,h9,w12,m4,k3", "b4,c1,h20,w20,m3,k5")]


@pytest.mark.slow
def test_every_contender_is_timed_on_every_layer(written):
    path = written("mine.cc", COURSE_2020)
    steps = []
    files = [kernel_file.find(str(path))]
    found = timing.measure(files, LAYERS, 3, lambda: steps.append(1))
    assert [(each.name, each.layer) for each in found] == [
        (name, layer) for layer, _ in LAYERS for name in (timing.OURS, "mine.cc")
    ]
    for each in found:
        assert each.failure == ""
        assert len(each.seconds) == 3
        assert 0 < min(each.seconds) <= each.median < 10
        assert each.spread >= 0
    assert len(steps) == 16


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("works_once", "parts of the output are not written"),
        ("remembers_pointers", "is wrong"),
        pytest.param("half_precision", "is wrong", marks=pytest.mark.slow),
        ("ends_the_process", "ends the process with exit code 0"),
    ],
)
def test_what_cheats_is_not_timed(name, says):
    files = [kernel_file.find(str(CHEATS / f"{name}.cc"))]
    found = timing.measure(files, LAYERS[:1], 4)
    ours, theirs = found
    assert (len(ours.seconds), ours.failure) == (4, "")
    assert says in theirs.failure
    assert len(theirs.seconds) < 4


def test_the_command(run_here, tmp_path):
    path, wrong = tmp_path / "mine.cc", tmp_path / "wrong.cc"
    path.write_text(COURSE_2020)
    wrong.write_text(COURSE_2020.replace("= sum;", "= sum + 1;"))
    output = tmp_path / "times.json"
    arguments = ("--layer", "fa17_1", "--batch-size", "3", "--batch-size", "5", "--repeat", "2")
    result = run_here("lab", "time", str(path), *arguments, "--json", str(output))
    assert result.returncode == 0, result.stderr
    for batch in (3, 5):
        assert f"fa17_1, {batch} images (b{batch},c1,h28,w28,m50,k5x5), floor" in result.stdout
    assert result.stdout.count("  mine.cc\n") == result.stdout.count("  ece408_op\n") == 2
    assert [len(each["seconds"]) for each in json.loads(output.read_text())] == [2] * 4
    result = run_here("lab", "time", str(path), str(wrong), *arguments[:4], "--repeat", "2")
    assert result.returncode == 23
    assert "wrong.cc: image" in result.stdout
    assert "  mine.cc\n" in result.stdout
    assert "wrong.cc: not timed; the reason is above" in result.stderr


def test_bad_input_is_one_line(refused, tmp_path):
    cuda, path = tmp_path / "mine.cu", tmp_path / "mine.cc"
    cuda.write_text(DECLARED)
    path.write_text(COURSE_2020)
    for arguments, code, text in (
        ((str(cuda), str(path)), 16, "kernels for the CPU and for CUDA do not race"),
        (("1_basic",), 16, "unknown CUDA kernel '1_basic'"),
        ((str(path), "--repeat", "0"), 16, "numbers from 1 on"),
        ((str(path), "--batch-size", "0"), 16, "numbers from 1 on"),
        ((str(path), "--layer", "fa99"), 14, "'fa99' is neither a shape's name"),
    ):
        refused(code, text, "lab", "time", *arguments)
