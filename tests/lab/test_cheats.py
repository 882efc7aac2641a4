"""Every way to a false verdict in tests/cheats is detected, and harms nothing else."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from ece408_op.backends import kernel_file
from ece408_op.lab import check as checking
from ece408_op.lab import timing
from ece408_op.lab.session import Ended, Session
from ece408_op.problem import ConvProblem

CHEATS = ROOT / "tests" / "cheats"
# A small layer, and one that takes a while.
PROBLEMS = [ConvProblem.parse(text) for text in ("b3,c2,h9,w12,m4,k3", "b10,c6,h30,w30,m16,k5")]
# The verdict on each.
SAYS = {
    "writes_nothing": "nothing is written",
    "works_once": "nothing is written",
    "remembers_pointers": "the result of the call before",
    "repeats_the_first_image": "images 1 to 2, the last 2 of 3",
    "samples_pixels": "every 2th row from 1 on",
    "half_precision": "real ones are off by",
    "tf32": "real ones are off by",
    "knows_the_course": "nothing is written",
    "changes_its_inputs": "writes into its input w",
    "writes_behind": "bytes behind y",
    "reads_behind": "reads memory behind or before its arrays",
    "answers_early": "",
    "writes_the_answer_file": "",
    "hangs": "takes more than 2 s",
    "hangs_while_it_is_loaded": "takes more than 2 s",
    "starts_threads": "",
    "fills_the_disk": "",
    "ends_the_process": "ends the process with exit code 0",
    "names_an_error": "",
    "nests_its_answer": "writes to what is not its own output",
    "prints_a_verdict": r"\x1b[2J\x1b[H   verdict: right \x1b[8m",
}

# Detected by the same check as others, too.
ALIKE = {
    *("writes_nothing", "repeats_the_first_image", "tf32", "samples_pixels", "knows_the_course"),
    *("hangs_while_it_is_loaded", "starts_threads", "nests_its_answer", "prints_a_verdict"),
    *("half_precision", "writes_the_answer_file", "reads_behind", "works_once"),
}

# Right as long as they are only checked: the verdict of timing.
BESIDE_CHECKS = {
    **dict.fromkeys(("answers_first_when_it_is_timed", "answers_one_call_later"), "image"),
    "skips_images_when_it_is_timed": "wrong; ece408 lab check says more",
}
LARGE = ConvProblem.parse("b60,c6,h40,w40,m16,k5")


@pytest.fixture(scope="module")
def lacking():
    """Return the protections that this machine lacks."""
    return checking.check(kernel_file.find(str(CHEATS / "writes_nothing.cc")), PROBLEMS[:1]).lacking


def test_every_cheat_is_tried():
    # The others are right as long as they are only checked.
    tried = [*SAYS, "slows_the_others", *BESIDE_CHECKS]
    assert sorted(tried) == sorted(path.stem for path in CHEATS.glob("*.cc"))


@pytest.mark.parametrize(
    "name",
    [name if name not in ALIKE else pytest.param(name, marks=pytest.mark.slow) for name in SAYS],
)
def test_a_cheat_is_found(name, lacking):
    # If the machine cannot prevent writes to files, it succeeds.
    if any(each.startswith("files" if name == "fills_the_disk" else "network") for each in lacking):
        pytest.skip("; ".join(lacking))
    file = kernel_file.find(str(CHEATS / f"{name}.cc"))
    verdict = checking.check(file, PROBLEMS, call_seconds=2, memory=2 << 30)
    failures = [failure for group in verdict.groups for failure in group.failures]
    said = "\n".join([verdict.broken, *(failure.text for failure in failures)])
    assert not verdict.is_right
    assert SAYS[name] in said, said
    assert not Path("/tmp/ece408-cheat").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), BESIDE_CHECKS.items())
def test_what_cheats_only_where_it_is_timed_is_not_timed(name, says):
    files = [kernel_file.find(str(CHEATS / f"{name}.cc"))]
    assert checking.check(files[0], PROBLEMS).is_right
    _, found = timing.measure(files, [(str(LARGE), LARGE)], 4)
    assert says in found.failure
    assert found.seconds == []


@pytest.mark.slow
def test_of_what_knows_the_course_only_it_is_told():
    file = kernel_file.find(str(CHEATS / "knows_the_course.cc"))
    verdict = checking.check(file)
    assert verdict.is_right
    (odd,) = verdict.elsewhere
    assert (odd.name, odd.right) == (checking.ODD, 0)
    assert "nothing is written" in odd.failures[0].text


def test_who_has_no_turn_rests():
    problem = PROBLEMS[0]
    x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))
    file = kernel_file.find(str(CHEATS / "slows_the_others.cc"))
    with Session(file) as session:
        y = session.forward(problem, x, w)
        assert (y == y.flat[0]).all()
        # A tick of the clock may coincide with the stop.
        assert _seconds_of_children(0.2) < 0.05
        assert (session.forward(problem, x, w) == y).all()
        for child in _children():
            os.kill(int(child), signal.SIGCONT)
        # On a busy machine it may have to wait for a core.
        assert any(_seconds_of_children(0.2) for _ in range(50))


def _seconds_of_children(wait):
    """Return the CPU seconds of this process's children during `wait` seconds."""

    def taken():
        fields = [
            Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            for child in _children()
        ]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    before = taken()
    time.sleep(wait)
    return taken() - before


def _children():
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def test_no_process_and_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("hangs", "starts_threads"):
        checking.check(kernel_file.find(str(CHEATS / f"{name}.cc")), PROBLEMS[:1], call_seconds=1)
    assert not list(tmp_path.glob("ece408-lab-*"))
    names = [Path(f"/proc/{child}/cmdline").read_bytes() for child in _children()]
    assert not [name for name in names if b"ece408_op.lab.worker" in name]


def test_half_precision_is_right_where_it_is_allowed():
    file = kernel_file.find(str(CHEATS / "half_precision.cc"))
    strict = checking.check(file, PROBLEMS)
    failures = [each.text for group in strict.groups for each in group.failures]
    assert "real ones are off by" in failures[0]
    assert strict.allowed_by in ("tf32", "float16")
    verdict = checking.check(file, PROBLEMS, precision="float16")
    assert verdict.is_right, verdict
    assert verdict.error > 1e-5
    wrong = kernel_file.find(str(CHEATS / "samples_pixels.cc"))
    assert not checking.check(wrong, PROBLEMS, precision="float16").is_right


def test_the_command_names_the_precision_by_which_a_file_is_right(run_here):
    result = run_here("lab", "check", str(CHEATS / "tf32.cc"), "--problem", str(PROBLEMS[1]))
    assert result.returncode == 23
    lines = result.stdout.splitlines()
    assert lines[1] == "  given problems: 0 of 1 right"
    assert lines[-1] == "  verdict: wrong in float32, right with --precision tf32"
    assert "again: " not in result.stdout


def test_the_number_of_a_process_that_has_ended_is_not_used(monkeypatch):
    problem = PROBLEMS[0]
    x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))
    file = kernel_file.find(str(CHEATS / "ends_the_process.cc"))
    with Session(file) as session:
        with pytest.raises(Ended, match="exit code 0"):
            session.forward(problem, x, w)
        signals = []
        monkeypatch.setattr(os, "killpg", lambda *signal: signals.append(signal))
        with pytest.raises(Ended):
            session.forward(problem, x, w)
    assert signals == []
