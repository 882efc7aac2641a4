"""The `ece408` command; the scripts of the course are subcommands of it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import settings
from ..course.milestone import MILESTONES
from ..errors import Ece408Error
from ..version import __version__
from . import arguments, program
from .program import EXIT_INTERRUPTED, EXIT_UNEXPECTED

_EXAMPLES = """\
examples:
  ece408 m1.1 1000               MXNet's own convolution on the first 1000 test images
  ece408 m2.1                    our operator on all 10000
  ece408 m2.1 --batch-size 500   the same in batches, with less memory
  ece408 m2.1 100 --backend reference
  ece408 profile m3.1 1000       where the time goes, in nvprof's columns
"""
# Modules by command, in the help's order; some of them import much.
_MODULES = {
    **dict.fromkeys(MILESTONES, "milestones"),
    **{name: name for name in ("profile", "compare", "report", "data", "swap", "models", "train")},
    **{"launch": "launch", "doctor": "doctor", "gpu-setup": "gpu_setup", "tune": "tune"},
    **{"lab": "lab_commands", "cache": "cache"},
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    program.run("ece408", lambda: execute(arguments))


def execute(line: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code. An error is one line on stderr.

    A command returns its exit code, or `None` for 0.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        # The shell wants the words that may follow; this ends the process.
        argcomplete.autocomplete(_parser(*os.environ["COMP_LINE"].split()[1:2]))
    line = list(sys.argv[1:] if line is None else line)
    options = _parser(*line[:1]).parse_args(line)
    options.line = line
    try:
        with settings.override():
            arguments.choose_gpu(options)
            return options.run(options) or 0
    except KeyboardInterrupt:
        return _fail(options, "interrupted", EXIT_INTERRUPTED)
    except Ece408Error as error:
        return _fail(options, str(error), error.exit_code)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
        return _fail(options, text, EXIT_UNEXPECTED)


class _Version(argparse.Action):
    """Prints the versions of this package and of what it may use."""

    def __call__(self, *_: Any) -> NoReturn:
        from .doctor_checks import versions

        print(f"ece408_op {__version__}", *versions(), sep="\n")
        sys.exit(0)


def _fail(options: argparse.Namespace, text: str, code: int) -> int:
    if options.debug:
        traceback.print_exc()
    return program.fail("ece408", text, code)


def _parser(first: str = "") -> argparse.ArgumentParser:
    """Return a parser with the command `first`, or with all if it is none; the version needs no
    command."""
    parser = arguments.Parser(
        prog="ece408",
        description="Hand-written convolution kernels in MXNet: the milestones of the course.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    arguments.show_help_by_default(parser)
    if first in _MODULES:
        wanted = [_MODULES[first]]
    else:
        wanted = [] if first == "--version" else list(dict.fromkeys(_MODULES.values()))
    for module in wanted:
        importlib.import_module(f".{module}", __package__).add(commands)
    return parser
