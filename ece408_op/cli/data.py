"""`ece408 data`: finds, fetches and verifies Fashion-MNIST."""

from __future__ import annotations

import argparse
from typing import Any

from .. import settings
from ..course.dataset import fashion_data, fetch
from . import arguments


def add(commands: Any) -> None:
    """Add `ece408 data`."""
    parser = arguments.add_command(commands, "data", "find, fetch and verify Fashion-MNIST")
    parser.add_argument(
        "action",
        nargs="?",
        choices=("where", "fetch", "verify"),
        default="where",
        help="where: print its folder, after fetching it if it is missing; fetch: bring a "
        "sound copy of all four files into the cache; verify: check them (default: %(default)s)",
    )
    arguments.add_data(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    settings.configure(data=options.data)
    if options.action == "fetch":
        fetch.fetch(fashion_data.cache_folder(), fashion_data.KINDS)
        print(fashion_data.cache_folder())
    elif options.action == "verify":
        for kind in fashion_data.KINDS:
            for path in fashion_data.verify(kind):
                print(f"{path}: ok")
    else:
        for folder in dict.fromkeys(fashion_data.locate(kind) for kind in fashion_data.KINDS):
            print(folder)
