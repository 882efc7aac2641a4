"""Profile options of milestones and `ece408 profile`."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import Parser

NAMES = ("json", "trace", "ncu")


def add(parser: Parser) -> None:
    """Add `--json`, `--trace` and `--ncu`."""
    parser.option("--json FILE", "write the profile, every activity of it, to FILE")
    parser.option(
        "--trace FILE", "write the time line to FILE in Chrome's trace format, for ui.perfetto.dev"
    )
    parser.option("--ncu", "add hardware counters: runs once more, under ncu")


def without(line: Sequence[str]) -> list[str]:
    """Return a milestone's command line without its profile options."""
    parser = Parser(add_help=False)
    parser.add_argument("--profile", action="store_true")
    add(parser)
    return parser.parse_known_args(line)[1]
