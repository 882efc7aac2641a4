"""Profile options of milestones and `ece408 profile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProfileOptions:
    """Output files of a profile, and whether ncu also runs the command."""

    json: Path | None = None
    trace: Path | None = None
    ncu: bool = False


def add(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, `--trace` and `--ncu`, parsed by `of`."""
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the profile, every activity of it, to FILE"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write the time line to FILE in Chrome's trace format, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--ncu", action="store_true", help="add hardware counters: runs once more, under ncu"
    )


def of(options: argparse.Namespace) -> ProfileOptions:
    """Return the values of the options added by `add`."""
    return ProfileOptions(options.json, options.trace, options.ncu)


def without(line: Sequence[str]) -> list[str]:
    """Return a milestone's command line without its profile options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--profile", action="store_true")
    add(parser)
    return parser.parse_known_args(line)[1]
