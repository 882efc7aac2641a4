"""What README.md shows runs, and what it lists is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from studies import cpu_table

from ece408_op import errors
from ece408_op.cli.main import _parser
from ece408_op.op_log import op_times
from ece408_op.settings import _VARIABLES

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_python_examples_run(mx, capsys):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert "swapped 26: squeezenet" in capsys.readouterr().out


def test_the_recipe_for_errors_shows_the_original_one(mx, capsys, monkeypatch):
    from ece408_op.backends.cpu.backend import CpuBackend

    def failing(self, *arguments):
        raise ZeroDivisionError("inside the kernel")

    first, _, recipe = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names: dict = {}
    exec(first, names)
    mx.nd.waitall()
    monkeypatch.setattr(CpuBackend, "forward", failing)
    # While op times are collected, the backend is called by Python.
    with op_times():
        exec(recipe, names)
    printed = capsys.readouterr().out
    assert printed == "the operator failed: ZeroDivisionError: inside the kernel\n"


def test_every_command_is_listed():
    commands = _parser()._subparsers._group_actions[0].choices
    for command in commands:
        assert f"`ece408 {command}" in TEXT, command


@pytest.mark.parametrize("variable", _VARIABLES.values())
def test_every_setting_is_listed(variable):
    assert f"| `{variable}` |" in TEXT


def _all_errors(base=errors.Ece408Error):
    for each in base.__subclasses__():
        yield each
        yield from _all_errors(each)


def test_every_exit_code_is_listed():
    listed = TEXT[TEXT.index("## Exit codes") : TEXT.index("## Development")]
    for error in _all_errors():
        assert re.search(rf"\b{error.exit_code} ", listed), error


def test_the_table_of_times_is_what_was_measured():
    document = json.loads((ROOT / "docs" / "results" / "cpu.json").read_text())
    assert cpu_table.with_table(TEXT, document) == TEXT
