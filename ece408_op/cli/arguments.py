"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from .. import settings
from ..errors import InvalidSize

# argparse's message for an unknown word.
_UNKNOWN = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error of the command line in one line."""

    def error(self, message: str) -> NoReturn:
        text = _suggestion(message) or f"{message}; --help lists the arguments"
        print(f"{self.prog}: error: {text}", file=sys.stderr)
        sys.exit(2)


def _suggestion(message: str) -> str | None:
    """Return a message that suggests a known word of similar spelling, in place of argparse's
    list."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is None:
        return None
    what, word, known = unknown.groups()
    close = difflib.get_close_matches(word, re.findall(r"[^\s',]+", known), 1)
    return f"there is no {what.lower()} {word!r}; did you mean {close[0]}?" if close else None


def add_command(commands: Any, name: str, title: str, **keywords: Any) -> argparse.ArgumentParser:
    """Add a subcommand; return its parser, with `--debug`."""
    parser = commands.add_parser(name, help=title, description=title[0].upper() + title[1:] + ".",
                                 **keywords)  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def show_help_by_default(parser: argparse.ArgumentParser) -> None:
    """Make a parser with subcommands print its help when none is given."""
    parser.set_defaults(run=lambda options: parser.print_help(), debug=False)


def add_fast(parser: argparse.ArgumentParser) -> None:
    """Add `--fast`, for use with `--emulate`."""
    parser.add_argument(
        "--fast", action="store_true", help="--emulate, without checking accesses to memory"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add `--data`."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder with Fashion-MNIST's idx files (default: ECE408_DATA, the distribution's "
        "package, the cache, or a download)",
    )


def add_threads_and_data(parser: argparse.ArgumentParser) -> None:
    """Add `--threads` and `--data`."""
    parser.add_argument(
        "--threads", metavar="N", help="threads to compute with (default: all usable cores)"
    )
    add_data(parser)


def add_gpu(parser: argparse.ArgumentParser, what: str = "several split the batch") -> None:
    """Add `--gpu`, parsed by `settings.devices`."""
    parser.add_argument(
        "--gpu",
        metavar="N[,N]",
        help=f"number of the GPU, from 0; {what} (default: ECE408_DEVICES, or 0)",
    )


def choose_gpu(options: argparse.Namespace) -> None:
    """Apply `--gpu`, for commands that have it."""
    if getattr(options, "gpu", None) is not None:
        settings.configure(devices=options.gpu)
        settings.devices()


def add_repeat(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--repeat`; check its value with `check_repeat`."""
    parser.add_argument(
        "--repeat", metavar="N", type=int, default=1, help=f"{what} (default: %(default)s)"
    )


def check_repeat(runs: int) -> None:
    """Raise `InvalidSize` for an invalid number of runs."""
    if runs < 1:
        raise InvalidSize(f"{runs} is not a number of runs; give 1 or more")


def add_batch_size(parser: argparse.ArgumentParser) -> None:
    """Add `--batch-size`."""
    parser.add_argument(
        "--batch-size",
        metavar="N",
        help="images in one forward pass (default: all; fewer need less memory)",
    )
