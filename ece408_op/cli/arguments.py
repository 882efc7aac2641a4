"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from .. import settings
from ..errors import InvalidSize
from ..problem import PRECISIONS

# argparse's message for an unknown word.
_UNKNOWN = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")

_FLAG = {"action": "store_true"}
# What helps say of a precision.
PRECISION = f"{', '.join(PRECISIONS)}, or the largest error of an element"
# Types of values by their names in `Parser.option`.
_TYPES = {"N": int, "FILE": Path, "DIR": Path, "PREFIX": Path}


class Parser(argparse.ArgumentParser):
    """A parser that reports an error of the command line in one line."""

    def option(self, form: str, text: str, **more: Any) -> None:
        """Add an option, written as on the command line, such as "--repeat N"; one without a value
        is a flag. `text` is its help. The value of N is a whole number, that of FILE, DIR and
        PREFIX a path."""
        name, _, metavar = form.partition(" ")
        kind: dict[str, Any] = {"metavar": metavar, "type": _TYPES.get(metavar)}
        self.add_argument(name, help=text, **{**(kind if metavar else _FLAG), **more})

    def error(self, message: str) -> NoReturn:
        text = self._suggestion(message) or f"{message}; --help lists the arguments"
        print(f"{self.prog}: error: {text}", file=sys.stderr)
        sys.exit(2)

    def _suggestion(self, message: str) -> str | None:
        """Return a message that suggests a known word of similar spelling, in place of argparse's
        list."""
        word, what = message.partition("unrecognized arguments: ")[2], "option"
        known = self._options()
        unknown = _UNKNOWN.fullmatch(message)
        if unknown is not None:
            what, word, text = unknown.groups()
            known = re.findall(r"[^\s',]+", text)
        word = re.split(r"[\s=]", word)[0]
        close = difflib.get_close_matches(word, known, 1, 0.7)
        return f"there is no {what.lower()} {word!r}; did you mean {close[0]}?" if close else None

    def _options(self) -> list[str]:
        """Return the names of the options, those of subcommands too."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [name for each in action.choices.values() for name in each._options()]
        return found


def add_command(commands: Any, name: str, title: str, **keywords: Any) -> Parser:
    """Add a subcommand; return its parser, with `--debug`."""
    about = f"{title[0].upper()}{title[1:]}."
    parser: Parser = commands.add_parser(name, help=title, description=about, **keywords)
    parser.option("--debug", "show the traceback of an error")
    return parser


def show_help_by_default(parser: Parser) -> None:
    """Make a parser with subcommands print its help when none is given."""
    parser.set_defaults(run=lambda options: parser.print_help(), debug=False)


def add_fast(parser: Parser) -> None:
    """Add `--fast`, for use with `--emulate`."""
    parser.option("--fast", "--emulate, without checking accesses to memory")


def add_data(parser: Parser) -> None:
    """Add `--data`."""
    parser.option(
        "--data DIR",
        "folder with Fashion-MNIST's idx files (default: ECE408_DATA, the distribution's "
        "package, the cache, or a download)",
        type=str,
    )


def add_threads_and_data(parser: Parser) -> None:
    """Add `--threads` and `--data`."""
    parser.option("--threads N", "threads to compute with (default: all usable cores)", type=str)
    add_data(parser)


def add_gpu(parser: Parser, what: str = "several split the batch") -> None:
    """Add `--gpu`, parsed by `settings.devices`."""
    parser.option(
        "--gpu N[,N]", f"number of the GPU, from 0; {what} (default: ECE408_DEVICES, or 0)"
    )


def choose_gpu(options: argparse.Namespace) -> None:
    """Apply `--gpu`, for commands that have it."""
    if getattr(options, "gpu", None) is not None:
        settings.configure(devices=options.gpu)
        settings.devices()


def add_repeat(parser: Parser, what: str) -> None:
    """Add `--repeat`; check its value with `check_repeat`."""
    parser.option("--repeat N", f"{what} (default: %(default)s)", default=1)


def check_repeat(runs: int) -> None:
    """Raise `InvalidSize` for an invalid number of runs."""
    if runs < 1:
        raise InvalidSize(f"{runs} is not a number of runs; give 1 or more")


def add_batch_size(parser: Parser) -> None:
    """Add `--batch-size`."""
    parser.option(
        "--batch-size N",
        "images in one forward pass (default: all; fewer need less memory)",
        type=str,
    )
