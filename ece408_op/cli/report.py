"""`ece408 report`: runs all milestones and writes their report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .. import dispatch, settings
from ..course import course_terms
from ..report import make as report_make
from ..report import own_kernels
from ..report import plan as report_plan
from . import arguments
from .program import EXIT_UNEXPECTED


def add(commands: Any) -> None:
    """Add `ece408 report`."""
    parser = arguments.add_command(
        commands,
        "report",
        "run all milestones that this machine can run, and write their report",
        epilog="Writes report.html, report.md and its pictures. Notes that you write at the marked "
        "places of report.md stay when the report is written again. Results of an interrupted "
        "report are kept. Exit code: 0, or 1 when a run failed that this machine could make; the "
        "report then says which.",
    )
    parser.option(
        "--output DIR", "folder to write to (default: %(default)s)", default=Path("report")
    )
    parser.option(
        "--term TERM",
        f"configuration of the course: {', '.join(course_terms.TERMS)} (default: %(default)s)",
        default=course_terms.DEFAULT_TERM,
    )
    parser.option(
        "--sizes N,N",
        "numbers of test images to time op times with, 1 to 10000 (default: %(default)s)",
        default=report_plan.DEFAULT_SIZES,
    )
    arguments.add_repeat(
        parser, "time every milestone in N runs and report the median and the quartiles"
    )
    arguments.add_gpu(parser)
    arguments.add_threads_and_data(parser)
    parser.option(
        "--peer-python PYTHON",
        "a Python with PyTorch, for times of PyTorch on the CPU and cuDNN on a GPU (default: none)",
    )
    parser.option(
        "--kernels DIR",
        "a folder with versions of your own kernel, .cu, .cuh, .cc or .h, in the order of "
        "their names: adds a section on the change and gain of each",
    )
    parser.option(
        "--reuse",
        "run nothing, but write the report again, with your notes, from the results of the "
        "last one in DIR, measured on this machine or another one",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    arguments.check_repeat(options.repeat)
    settings.configure(threads=options.threads, data=options.data)
    dispatch.check_settings()
    if options.gpu is not None:
        # For the programs that the report runs.
        os.environ["ECE408_DEVICES"] = options.gpu
    requested = report_plan.Options(
        course_terms.find_term(options.term),
        report_plan.parse_sizes(options.sizes),
        options.threads,
        options.data,
        options.peer_python,
        own_kernels.find(options.kernels) if options.kernels is not None else (),
        options.repeat,
    )
    try:
        if options.reuse:
            made = report_make.write(options.output)
        else:
            made = report_make.make(requested, options.output)
    except KeyboardInterrupt:
        kept, wanted = report_make.results_kept(requested, options.output)
        print(f"ece408: {kept} of {wanted} results are kept in {options.output}; the same command "
              "goes on from them", file=sys.stderr)  # fmt: skip
        raise
    for path in made.files:
        print(path)
    for failure in made.failures:
        print(f"ece408: {failure}", file=sys.stderr)
    return EXIT_UNEXPECTED if made.failures else 0
