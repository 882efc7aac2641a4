"""scripts/bench_programs.py, with programs that are played."""

from __future__ import annotations

import sys

import pytest
from studies import programs

from ece408_op.errors import InvalidSetting


def _say(text, code=0):
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"]


def test_programs_take_turns_and_the_last_one_is_the_measure():
    turns = []
    played = {"m2.1": _say("Correctness: 0.5 Model: x"), "PyTorch": _say("accuracy 0.5, PyTorch 9")}
    found = programs.measure(played, 3, lambda: turns.append(1))
    assert len(turns) == 2 * (1 + 3)
    assert [(each.name, each.accuracy, len(each.seconds)) for each in found] == [
        ("m2.1", 0.5, 3),
        ("PyTorch", 0.5, 3),
    ]
    assert found[-1].about == "accuracy 0.5, PyTorch 9"
    head, _, ours, theirs = programs.table(found).splitlines()
    assert head.endswith("times PyTorch's speed |")
    assert ours.startswith("| m2.1 | 0.5 | ")
    assert theirs.endswith(" 1.00 |")
    assert all(len(each["seconds"]) == 3 for each in programs.records(found))


def test_a_program_that_fails_is_named():
    with pytest.raises(InvalidSetting, match=r"^m1\.1 failed: nothing printed$"):
        programs.measure({"m1.1": _say("", 3)}, 1, lambda: None)
    with pytest.raises(InvalidSetting, match=r"^m1\.1 printed no accuracy: 'hello'$"):
        programs.measure({"m1.1": _say("hello")}, 1, lambda: None)


@pytest.mark.slow
def test_the_milestones_run_as_they_are(fashion_mnist):
    from ece408_op.course.models import TERMS

    commands = programs.commands(TERMS["2019sp"], None)
    assert list(commands) == ["m1.1", "m2.1"]
    on_gpu = programs.commands(TERMS["2019sp"], None, on_gpu=True)
    assert list(on_gpu) == ["m1.1", "m2.1", "m3.1", "m4.1", "final"]
    small = {"m2.1": [*commands["m2.1"], "50"]}
    (found,) = programs.measure(small, 1, lambda: None)
    assert 0.8 < found.accuracy < 1
