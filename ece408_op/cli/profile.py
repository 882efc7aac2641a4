"""`ece408 profile`: runs a program and reports where its time went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..course.milestone import MILESTONES
from ..errors import NoUsableGpu
from ..host import gpu
from . import arguments, milestones, profile_options, profiling


def add(commands: Any) -> None:
    """Add `ece408 profile`."""
    parser = arguments.add_command(
        commands,
        "profile",
        "run a milestone or a script, and report where the time went, in nvprof's columns",
        epilog="Prints tables to stdout after the script's own output: GPU activities and CUDA API "
        "calls, MXNet's operators and calls of ours, and our kernels' rates; entries above the "
        "dashed line make up 90 % of the time. Exit code: the script's.",
    )
    profile_options.add(parser)
    parser.option("--no-gpu", "do not record GPUs: needs no CUPTI")
    parser.add_argument("script", metavar="SCRIPT|MILESTONE", help="such as m3.1, or a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments and options"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.script not in MILESTONES:
        on_gpu = not options.no_gpu and _has_gpu()
        script = Path(options.script)
        return profiling.profile_script(script, options.arguments, options, on_gpu)
    line = [options.script, *options.arguments]
    inner = milestones.parse([options.script, "--profile", *options.arguments])
    inner.line, inner.tables_to, inner.no_gpu = line, sys.stdout, options.no_gpu
    for name in profile_options.NAMES:
        setattr(inner, name, getattr(inner, name) or getattr(options, name))
    arguments.choose_gpu(inner)
    return inner.run(inner) or 0


def _has_gpu() -> bool:
    try:
        return bool(gpu.find_driver().gpus)
    except NoUsableGpu:
        return False
