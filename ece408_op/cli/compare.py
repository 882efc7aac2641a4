"""`ece408 compare`: runs the milestones side by side, or shows earlier comparisons side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import dispatch, settings
from ..course import (
    comparison,
    comparison_files,
    comparison_plot,
    comparison_sides,
    comparison_table,
    course_terms,
)
from ..errors import InvalidSize
from . import arguments
from .program import EXIT_UNEXPECTED


def add(commands: Any) -> None:
    """Add `ece408 compare`."""
    parser = arguments.add_command(
        commands,
        "compare",
        "run all milestones that this machine can run, and print their figures in one table",
        epilog="Each run is a separate process. Milestones that need a missing GPU are listed with "
        "the reason. Exit code: 0, or 1 when a run failed for another reason. With files written "
        "by --json or scripts/bench.py, such as `ece408 compare before.json after.json`, nothing "
        "is run: their figures are shown side by side.",
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="SIZE | FILE.json",
        help="number of test images, 1 to 10000 (default: 10000); or files of other comparisons",
    )
    terms = parser.add_mutually_exclusive_group()
    terms.add_argument(
        "--term",
        action="append",
        help=f"configuration of the course: {', '.join(course_terms.TERMS)} (default: "
        f"{course_terms.DEFAULT_TERM}; may be repeated)",
    )
    terms.add_argument("--all-terms", action="store_true", help="every configuration")
    arguments.add_batch_size(parser)
    parser.option(
        "--backend NAME",
        f"backend of our operator on the CPU: {', '.join(dispatch.backend_names())} "
        "(default: ECE408_BACKEND, or the fastest)",
    )
    parser.option(
        "--kernel NAME|FILE",
        "CUDA kernel or file for the milestones on the GPU, or a file for the CPU (default: "
        "the fastest)",
    )
    parser.option(
        "--precision NAME",
        f"minimum precision of our operator: {arguments.PRECISION} (default: "
        "ECE408_PRECISION, or float32)",
    )
    arguments.add_gpu(parser)
    arguments.add_threads_and_data(parser)
    arguments.add_repeat(parser, "make every run N times and print the median of each figure")
    parser.option("--json FILE", "write machine, versions and every run to FILE")
    parser.option(
        "--plot FILE",
        f"draw op times and program times to FILE ({', '.join(comparison_plot.SUFFIXES)})",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if any(each.endswith(".json") for each in options.what):
        print(comparison_sides.text(comparison_sides.read([Path(each) for each in options.what])))
        return 0
    if len(options.what) > 1:
        raise InvalidSize(f"{' '.join(options.what)!r} is not one number of images")
    arguments.check_repeat(options.repeat)
    settings.configure(backend=options.backend, threads=options.threads, data=options.data)
    settings.configure(kernel=options.kernel, precision=options.precision)
    dispatch.check_settings()
    names = course_terms.TERMS if options.all_terms else options.term or [course_terms.DEFAULT_TERM]
    chosen = comparison.Options(
        next(iter(options.what), None),
        *(options.batch_size, options.backend, options.threads, options.data),
        *(options.kernel, options.precision, options.gpu),
    )
    jobs = comparison.plan([course_terms.find_term(name) for name in dict.fromkeys(names)], chosen)
    if options.plot is not None:
        comparison_plot.check(options.plot)
    for path in filter(None, (options.json, options.plot)):
        comparison_files.check_writable(path)
    comparison.prepare_data(jobs)
    rows = comparison.compare(jobs, options.repeat)
    print(comparison_table.table(rows), flush=True)
    if options.json is not None:
        comparison_files.write_json(options.json, rows, chosen)
    if options.plot is not None and not comparison_plot.write_plot(options.plot, rows):
        print(f"ece408: no run has figures to draw to {options.plot}", file=sys.stderr)
    return EXIT_UNEXPECTED if any(row.summary.failed for row in rows) else 0
