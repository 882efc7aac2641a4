"""Colour on terminals: commands run under a pseudo-terminal."""

import os
import pty
import subprocess
import sys

import programs
import pytest


def _on_a_terminal(*arguments, **environment):
    """Return a command's output to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ece408_op", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=programs.environment(**environment),
    )
    os.close(theirs)
    text = b""
    # At the end of its output a pseudo-terminal raises.
    while True:
        try:
            text += os.read(ours, 1 << 16)
        except OSError:
            break
    process.wait(60)
    os.close(ours)
    return text.decode()


def test_errors_are_red_on_a_terminal():
    text = _on_a_terminal("m2.1", "0", TERM="xterm", NO_COLOR="")
    assert text.startswith("ece408: \x1b[31merror\x1b[0m: '0' is not a size")


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"NO_COLOR": "", "TERM": "dumb"}])
def test_who_wants_none_gets_none(variables):
    text = _on_a_terminal("m2.1", "0", **{"TERM": "xterm", **variables})
    assert text.startswith("ece408: error: '0' is not a size")


def test_doctors_marks_have_colours_on_a_terminal(kept):
    given = {"TERM": "xterm", "NO_COLOR": "", "ECE408_CACHE": str(kept)}
    lines = _on_a_terminal("doctor", **given).splitlines()
    assert any(line.startswith("\x1b[32mok\x1b[0m  Python ") for line in lines)
