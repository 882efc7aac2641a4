"""The transcripts of docs/first_hour.md: each command runs, and prints what the page shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from places import ROOT
from transcripts import pattern

PAGE = (ROOT / "docs" / "first_hour.md").read_text()
PEOPLE = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def _commands(text):
    """Yield each command of the text's transcripts, which may have a here-document, with its
    output."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            end = part.index("\nEND\n") + 5 if "<<'END'" in part else part.index("\n") + 1
            found.append((part[:end], part[end:]))
    return found


def _play(person, folder, cache):
    """Run a person's commands in one shell; return each with its actual and expected output."""
    commands = _commands(PEOPLE[person])
    script = "".join(
        f"{command}\necho; echo '<<{i}>>'\n" for i, (command, _) in enumerate(commands)
    )
    # A nested `make` prints its folder.
    plain = dict.fromkeys(("MAKEFLAGS", "MFLAGS", "MAKELEVEL"), "")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-s"],
        input=script,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        timeout=600,
        env=programs.environment(
            PATH=path, COLUMNS="100", PYTHONUNBUFFERED="1", ECE408_CACHE=str(cache), **plain
        ),
    )
    printed = re.split(r"\n<<\d+>>\n", done.stdout)
    assert len(printed) == len(commands) + 1, done.stdout
    return [(command, text, expected) for (command, expected), text in zip(commands, printed)]


@pytest.fixture
def checkout(tmp_path):
    """Return a writable copy of the checkout."""
    for name in ("Makefile", "scripts", "tests", "setup.py", "pyproject.toml", "kernels", ".venv"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("person", PEOPLE)
def test_a_persons_hour(person, checkout, kept_with_data):
    # In a new environment `make run` would install everything again.
    if subprocess.run(["make", "--question", ".venv/.installed"], cwd=ROOT).returncode:
        pytest.skip("the environment that make makes is not there, or older than the sources")
    if shutil.which("nvidia-smi"):
        pytest.skip("what is printed is that of a machine without a GPU")
    for command, printed, expected in _play(person, checkout, kept_with_data):
        assert re.fullmatch(pattern(expected), printed), f"$ {command}{printed}\n--\n{expected}"


def test_a_transcript_that_is_not_what_is_printed_is_found():
    assert re.fullmatch(pattern("a 1.5 b\n...\nc ...\n"), "a  27.25 b\nx\ny\nc d e\n")
    for printed in ("a  remarks\nb\n", "a\nb  spread 9%\n"):
        assert re.fullmatch(pattern("a remarks\nb  spread 17%\n"), printed)
    assert not re.fullmatch(pattern("a  spread 17%\n"), "a  not known\n")
    for printed in ("a 1.5 c\nc d\n", "a b\nc d\n", "a 1.5 b\nc\nd\n", ""):
        assert not re.fullmatch(pattern("a 1.5 b\n...\nc ...\n"), printed)
    assert len(PEOPLE) == 4
    assert all(_commands(text) for text in PEOPLE.values())
