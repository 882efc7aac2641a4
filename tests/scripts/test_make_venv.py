"""scripts/make_venv.sh chooses an interpreter, or gives advice."""

import subprocess
import sys

import pytest
from places import SCRIPTS

SCRIPT = SCRIPTS / "make_venv.sh"
# The script's questions to an interpreter: is it 3.9 to 3.12, can it make environments?
TOO_NEW = "exit 1"
NO_VENV = 'case "$2" in *ensurepip*) exit 1;; esac; exit 0'


@pytest.fixture
def make_venv(tmp_path):
    """Run the script with only the given commands, name: shell code."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for tool in ("sh", "rm"):
        (commands / tool).symlink_to(f"/bin/{tool}")

    def run(environment=None, **fakes):
        for name, code in fakes.items():
            path = commands / name
            path.write_text(f"#!/bin/sh\n{code}\n")
            path.chmod(0o755)
        return subprocess.run(
            ["/bin/sh", str(SCRIPT), str(tmp_path / "venv")],
            capture_output=True,
            text=True,
            env={"PATH": str(commands), **(environment or {})},
        )

    return run


@pytest.mark.slow
def test_a_suitable_python_makes_the_environment(make_venv, tmp_path):
    result = make_venv(python3=f'exec "{sys.executable}" "$@"')
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "venv" / "bin" / "pip").exists()


def test_a_suitable_one_is_preferred_to_the_usual_one(make_venv, tmp_path):
    other = {"python3.10": 'case "$1" in -m) echo "$@";; esac'}
    assert make_venv(python3=TOO_NEW, **other).stdout == f"-m venv {tmp_path / 'venv'}\n"


def test_uv_brings_one_when_the_systems_is_too_new(make_venv, tmp_path):
    result = make_venv(python3=TOO_NEW, uv='echo "$@"')
    assert result.stdout == f"venv --quiet --seed --python 3.11 {tmp_path / 'venv'}\n"


@pytest.mark.parametrize(
    ("environment", "fakes", "message"),
    [
        ({}, {"python3": TOO_NEW}, "no Python from 3.9 to 3.12 found"),
        ({}, {"python3": NO_VENV}, "python3 cannot make virtual environments; install the package"),
        ({"PYTHON": "python3"}, {"python3": TOO_NEW}, "PYTHON=python3 does not run or is not"),
    ],
)
def test_otherwise_it_says_what_to_do(make_venv, environment, fakes, message):
    result = make_venv(environment, **fakes)
    assert result.returncode == 1
    assert result.stderr.startswith(f"make_venv.sh: {message}")
    assert len(result.stderr.splitlines()) == 1
