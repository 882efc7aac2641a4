"""Profile options of milestones and `ece408 profile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

NAMES = ("json", "trace", "ncu")


def add(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, `--trace` and `--ncu`."""
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


def without(line: Sequence[str]) -> list[str]:
    """Return a milestone's command line without its profile options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--profile", action="store_true")
    add(parser)
    return parser.parse_known_args(line)[1]
