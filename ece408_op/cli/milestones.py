"""The milestones as commands."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import dispatch, settings
from ..backends import kernel_file
from ..course import course_terms, milestone
from ..course.milestone import MILESTONES, Milestone
from ..host import gpu, run_time, this_python
from ..operator import variables
from ..profile import convolution_times
from . import arguments, profile_options, program


def add(commands: Any) -> None:
    """Add a command for each milestone."""
    for each in MILESTONES.values():
        _add_milestone(commands, each)


def parse(line: Sequence[str]) -> argparse.Namespace:
    """Parse a milestone's command line."""
    parser = arguments.Parser(prog="ece408")
    add(parser.add_subparsers(dest="command", metavar="COMMAND"))
    return parser.parse_args(line)


def _add_milestone(commands: Any, each: Milestone) -> None:
    parser = arguments.add_command(commands, each.name, each.title)
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[MODEL] [SIZE]",
        help="SIZE: number of test images, 1 to 10000 (default: 10000); MODEL: " + _models_of(each),
    )
    parser.option(
        "--term TERM",
        f"configuration of the course: {', '.join(course_terms.TERMS)} (default: the only one "
        f"with the model, or {course_terms.DEFAULT_TERM})",
    )
    arguments.add_batch_size(parser)
    if each.own_operator and not each.on_gpu:
        parser.option(
            "--backend NAME",
            f"backend: {', '.join(dispatch.backend_names())} (default: ECE408_BACKEND, "
            "or the fastest)",
        )
    if each.own_operator:
        parser.option(
            "--kernel NAME|FILE",
            "CUDA kernel of the forward pass, one of kernels/README.md, or a file with a "
            "kernel of your own, .cu or .cuh"
            + ("" if each.on_gpu else ", or .cc or .h for the CPU")
            + " (default: ECE408_KERNEL, or the best for each layer)",
        )
        parser.option(
            "--precision NAME",
            f"minimum precision of convolutions: {arguments.PRECISION} (default: "
            "ECE408_PRECISION, or float32); lower ones are faster for CUDA kernels only",
        )
    if each.own_operator or each.on_gpu:
        arguments.add_gpu(parser)
    if each.own_operator and each.on_gpu:
        parser.option(
            "--emulate",
            "run the CUDA kernel on the CPU, without a GPU, and check each memory access; the "
            "default for a file's kernel without a GPU (default kernel: general)",
        )
        arguments.add_fast(parser)
    arguments.add_threads_and_data(parser)
    parser.option(
        "--model-dir DIR", "folder with the model's checkpoint (default: the shipped one)"
    )
    parser.option(
        "--profile",
        "report on stderr where the time went; so do the three options below, which also",
    )
    profile_options.add(parser)
    parser.set_defaults(run=_run_milestone, milestone=each, tables_to=sys.stderr, no_gpu=False)
    parser.set_defaults(emulate=False, fast=False)


def _models_of(each: Milestone) -> str:
    """Return the models that a milestone runs, by term."""
    if not each.own_operator:
        return course_terms.BASELINE
    known = ", ".join(
        f"{' or '.join(m for m in term.models if m != course_terms.BASELINE)} ({term.name})"
        for term in course_terms.TERMS.values()
    )
    return f"{known} (default: {course_terms.TERMS[course_terms.DEFAULT_TERM].default_model})"


def _run_milestone(options: argparse.Namespace) -> None:
    settings.configure(threads=options.threads, data=options.data)
    threads = None if options.threads is None else settings.parse_threads(options.threads)
    variables.set_environment(threads)
    if options.milestone.own_operator:
        settings.configure(kernel=options.kernel, precision=options.precision)
        settings.configure(backend=_backend(options))
        if options.fast or not settings.is_set("emulation"):
            settings.configure(emulation="fast" if options.fast else "checked")
    request = milestone.make_request(
        options.milestone,
        options.arguments,
        term=options.term,
        batch_size=options.batch_size,
        model_dir=options.model_dir,
    )

    profiled = options.profile or any(getattr(options, each) for each in profile_options.NAMES)
    # MXNet has a single profiler, and our operator measures its op times itself.
    timed = not profiled and not options.milestone.own_operator

    def work() -> None:
        with convolution_times.told() if timed else contextlib.nullcontext():
            milestone.run(options.milestone, request)
        print(run_time.summary(), file=sys.stderr)

    if profiled:
        _profile_milestone(options, work)
    else:
        work()
        program.end_at_once()


def _backend(options: argparse.Namespace) -> str | None:
    """Return the backend of a milestone that runs our operator."""
    if not options.milestone.on_gpu:
        return options.backend
    kernel = settings.kernel()
    if options.emulate or options.fast:
        return "emulator"
    if kernel is not None and kernel_file.device_of(kernel) == "cuda":
        return dispatch.backend_of_cuda_files()
    return "cuda"


def _profile_milestone(options: argparse.Namespace, work: Callable[[], None]) -> None:
    from . import profiling  # imported here, because it imports much that others do not need

    on_gpu = options.milestone.on_gpu or settings.backend() == "cuda"
    on_gpu = on_gpu and settings.backend() != "emulator"
    if on_gpu:
        gpu.find_driver()
    on_gpu = on_gpu and not options.no_gpu
    line = profile_options.without(options.line)
    again = [*this_python.running(__package__.partition(".")[0]), *line]
    outcome = profiling.profile(work, line, again, options, on_gpu, options.tables_to)
    if outcome.failure is not None:
        raise outcome.failure
