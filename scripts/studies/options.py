"""Options shared by several scripts."""

from __future__ import annotations

from ece408_op.cli.arguments import Parser


def add_output(parser: Parser) -> None:
    """Add `--output PREFIX`, for `results.show`."""
    parser.option("--output PREFIX", "write PREFIX.md and PREFIX.json as well")


def add_gpu(parser: Parser) -> None:
    parser.option("--gpu N", "number of the GPU (default: 0)", default=0)
