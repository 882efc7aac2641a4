"""Modules of this package as programs of their own, with nothing from the current folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = __package__.partition(".")[0]
# `python -m` looks into the current folder first, where a `random.py` would be taken for Python's.
# The package is the one that this process has, wherever it is.
_START = """\
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, runpy
name, place, module = sys.argv[1:4]
spec = importlib.util.spec_from_file_location(name, place)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
del sys.argv[1:4]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def running(module: str) -> list[str]:
    """The beginning of a command that runs a module of this package; its arguments follow."""
    place = Path(__file__).parents[1] / "__init__.py"
    return [sys.executable, "-c", _START, _PACKAGE, str(place), module]


def parts(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Such a beginning of a command, and its arguments."""
    length = len(running(""))
    return list(command[:length]), list(command[length:])
