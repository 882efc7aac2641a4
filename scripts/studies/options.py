"""Options shared by several scripts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `--output PREFIX`, for `results.show`."""
    parser.add_argument(
        "--output", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")
