"""Commands that run modules of this package, without modules from the current folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = __package__.partition(".")[0]
# `python -m` searches the current folder first, where a `random.py` would replace Python's. The
# package is the one that this process uses, wherever it is.
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
    """Return the start of a command that runs a module of this package; append its arguments."""
    place = Path(__file__).parents[1] / "__init__.py"
    return [sys.executable, "-c", _START, _PACKAGE, str(place), module]


def parts(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split such a command into its start and its arguments."""
    length = len(running(""))
    return list(command[:length]), list(command[length:])
