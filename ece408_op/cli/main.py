"""The `ece408` command; the scripts of the course are subcommands of it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from .. import dispatch, settings
from ..backends import kernel_file
from ..bench import tune_targets
from ..course import (
    comparison,
    comparison_files,
    comparison_plot,
    comparison_sides,
    comparison_table,
    milestone,
    model_card,
    models,
    training,
)
from ..course.dataset import data, fetch
from ..course.milestone import MILESTONES, Milestone
from ..errors import Ece408Error, InvalidSize, NoUsableGpu, WrongResult
from ..files.cachedir import atomic_path
from ..host import gpu, run_time
from ..operator import variables
from ..operator.checkpoint import load_checkpoint
from ..operator.net_comparison import compare_symbols
from ..operator.swap import save_swapped, swap_symbol
from ..problem import PRECISIONS
from ..report import make as report_make
from ..report import own_kernels
from ..report import plan as report_plan
from ..version import __version__
from . import arguments, cache, doctor, lab_commands, program, tune
from . import profile as profiling
from .program import EXIT_INTERRUPTED, EXIT_UNEXPECTED

_EXAMPLES = """\
examples:
  ece408 m1.1 1000               MXNet's own convolution on the first 1000 test images
  ece408 m2.1                    our operator on all 10000
  ece408 m2.1 --batch-size 500   the same in batches, with less memory
  ece408 m2.1 100 --backend reference
  ece408 profile m3.1 1000       where the time goes, in nvprof's columns
"""


# Networks whose sums have another order differ by less, in float32, and in float16 or TF32.
_SWAPPED_ERROR, _SWAPPED_HALF_ERROR = 1e-4, 1e-2


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    program.run("ece408", lambda: execute(arguments))


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code. An error is one line on stderr.

    A command returns an exit code of its own, or `None` for 0.
    """
    options = _parser().parse_args(arguments)
    options.line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with settings.override():
            return options.run(options) or 0
    except KeyboardInterrupt:
        return _fail(options, "interrupted", EXIT_INTERRUPTED)
    except Ece408Error as error:
        return _fail(options, str(error), error.exit_code)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
        return _fail(options, text, EXIT_UNEXPECTED)


def _fail(options: argparse.Namespace, text: str, code: int) -> int:
    if options.debug:
        traceback.print_exc()
    return program.fail("ece408", text, code)


# What argparse says of a word that is none of those it knows.
_UNKNOWN = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = _suggestion(message) or f"{message}; --help lists the arguments"
        print(f"{self.prog}: error: {text}", file=sys.stderr)
        sys.exit(2)


def _suggestion(message: str) -> str | None:
    """What is said of a word that looks like a known one, in place of argparse's list."""
    unknown = _UNKNOWN.fullmatch(message)
    if unknown is None:
        return None
    what, word, known = unknown.groups()
    close = difflib.get_close_matches(word, re.findall(r"[^\s',]+", known), 1)
    return f"there is no {what.lower()} {word!r}; did you mean {close[0]}?" if close else None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ece408",
        description="Hand-written convolution kernels in MXNet: the milestones of the course.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ece408_op {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    arguments.show_help_by_default(parser)
    for each in MILESTONES.values():
        _add_milestone(commands, each)
    _add_profile(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_data(commands)
    _add_swap(commands)
    _add_models(commands)
    _add_train(commands)
    _add_doctor(commands)
    tune.add(commands)
    lab_commands.add(commands)
    cache.add(commands)
    return parser


def _add_milestone(commands: Any, each: Milestone) -> None:
    parser = arguments.add_command(commands, each.name, each.title)
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[MODEL] [SIZE]",
        help="SIZE: number of test images, 1 to 10000 (default: 10000); MODEL: " + _models_of(each),
    )
    parser.add_argument(
        "--term",
        help=f"configuration of the course: {', '.join(models.TERMS)} (default: the only one "
        f"that has the model, or {models.DEFAULT_TERM})",
    )
    arguments.add_batch_size(parser)
    if each.own_operator and not each.on_gpu:
        parser.add_argument(
            "--backend",
            metavar="NAME",
            help=f"who computes: {', '.join(dispatch.backend_names())} (default: ECE408_BACKEND, "
            "or the fastest)",
        )
    if each.own_operator:
        parser.add_argument(
            "--kernel",
            metavar="NAME|FILE",
            help="CUDA kernel of the forward pass, one of kernels/README.md, or a file with a "
            "kernel of your own, .cu or .cuh"
            + ("" if each.on_gpu else ", or .cc or .h for the CPU")
            + " (default: ECE408_KERNEL, or for each layer the best that fits)",
        )
        parser.add_argument(
            "--precision",
            metavar="NAME",
            help=f"how exact convolutions must be at least: {', '.join(PRECISIONS)} (default: "
            "ECE408_PRECISION, or float32); CUDA kernels only gain by it",
        )
    if each.own_operator and each.on_gpu:
        parser.add_argument(
            "--emulate",
            action="store_true",
            help="run the CUDA kernel on the CPU, without a GPU, and check each access to memory; "
            "what is done with a file's kernel where there is no GPU (default kernel: general)",
        )
        arguments.add_fast(parser)
    arguments.add_threads_and_data(parser)
    parser.add_argument(
        "--model-dir",
        metavar="DIR",
        type=Path,
        help="folder with the model's checkpoint (default: the one that comes with the package)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="tell on stderr where the time went; so do the three options below, which also",
    )
    profiling.add_options(parser)
    parser.set_defaults(run=_run_milestone, milestone=each, tables_to=sys.stderr, no_gpu=False)
    parser.set_defaults(emulate=False, fast=False)


def _models_of(each: Milestone) -> str:
    """What a milestone can be asked to run, term by term."""
    if not each.own_operator:
        return models.BASELINE
    known = ", ".join(
        f"{' or '.join(m for m in term.models if m != models.BASELINE)} ({term.name})"
        for term in models.TERMS.values()
    )
    return f"{known} (default: {models.TERMS[models.DEFAULT_TERM].default_model})"


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

    def program() -> None:
        milestone.run(options.milestone, request)
        print(run_time.summary(), file=sys.stderr)

    asked = profiling.options_of(options)
    if options.profile or asked != profiling.ProfileOptions():
        _profile_milestone(options, asked, program)
    else:
        program()


def _backend(options: argparse.Namespace) -> str | None:
    """Who computes a milestone that runs our operator."""
    if not options.milestone.on_gpu:
        return options.backend
    kernel = settings.kernel()
    if options.emulate or options.fast:
        return "emulator"
    if kernel is not None and kernel_file.device_of(kernel) == "cuda":
        return dispatch.backend_of_cuda_files()
    return "cuda"


def _profile_milestone(
    options: argparse.Namespace, asked: profiling.ProfileOptions, program: Callable[[], None]
) -> None:
    on_gpu = options.milestone.on_gpu or settings.backend() == "cuda"
    on_gpu = on_gpu and settings.backend() != "emulator"
    if on_gpu:
        gpu.find_driver()
    on_gpu = on_gpu and not options.no_gpu
    line = profiling.without_options(options.line)
    again = [sys.executable, "-m", __package__, *line]
    outcome = profiling.profile(program, line, again, asked, on_gpu, options.tables_to)
    if outcome.failure is not None:
        raise outcome.failure


def _add_profile(commands: Any) -> None:
    parser = arguments.add_command(
        commands,
        "profile",
        "run a milestone or a script, and tell where the time went, in nvprof's columns",
        epilog="Prints tables to stdout after the script's own output: what the GPU did and the "
        "calls of CUDA's API, operators of MXNet and calls of ours, and what our kernels achieve; "
        "entries above the dashed line make up 90 % of the time. Exit code: the script's.",
    )
    profiling.add_options(parser)
    parser.add_argument(
        "--no-gpu", action="store_true", help="leave out what GPUs do: needs no CUPTI"
    )
    parser.add_argument("script", metavar="SCRIPT|MILESTONE", help="such as m3.1, or a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments and options"
    )
    parser.set_defaults(run=_run_profile)


def _run_profile(options: argparse.Namespace) -> int:
    asked = profiling.options_of(options)
    if options.script not in MILESTONES:
        on_gpu = not options.no_gpu and _has_gpu()
        script = Path(options.script)
        return profiling.profile_script(script, options.arguments, asked, on_gpu)
    line = [options.script, *options.arguments]
    inner = _parser().parse_args([options.script, "--profile", *options.arguments])
    inner.line, inner.tables_to, inner.no_gpu = line, sys.stdout, options.no_gpu
    for name, value in dataclasses.asdict(asked).items():
        setattr(inner, name, getattr(inner, name) or value)
    return inner.run(inner) or 0


def _has_gpu() -> bool:
    try:
        return bool(gpu.find_driver().gpus)
    except NoUsableGpu:
        return False


def _add_compare(commands: Any) -> None:
    parser = arguments.add_command(
        commands,
        "compare",
        "run all milestones that this machine can run, and print their figures in one table",
        epilog="Each run is a process of its own. What cannot run without a GPU is listed with "
        "the reason. Exit code: 0, or 1 when a run failed for another reason. With files that "
        "--json has written, such as `ece408 compare before.json after.json`, nothing is run: "
        "they are shown side by side.",
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
        help=f"configuration of the course: {', '.join(models.TERMS)} (default: "
        f"{models.DEFAULT_TERM}; may be repeated)",
    )
    terms.add_argument("--all-terms", action="store_true", help="every configuration")
    arguments.add_batch_size(parser)
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help=f"who computes our operator on the CPU: {', '.join(dispatch.backend_names())} "
        "(default: ECE408_BACKEND, or the fastest)",
    )
    arguments.add_threads_and_data(parser)
    arguments.add_repeat(parser, "make every run N times and give the median of each figure")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write machine, versions and every run to FILE"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help=f"draw op times and program times to FILE ({', '.join(comparison_plot.SUFFIXES)})",
    )
    parser.set_defaults(run=_run_compare)


def _run_compare(options: argparse.Namespace) -> int:
    if any(each.endswith(".json") for each in options.what):
        print(comparison_sides.text(comparison_sides.read([Path(each) for each in options.what])))
        return 0
    if len(options.what) > 1:
        raise InvalidSize(f"{' '.join(options.what)!r} is not one number of images")
    arguments.check_repeat(options.repeat)
    settings.configure(backend=options.backend, threads=options.threads, data=options.data)
    dispatch.check_settings()
    names = models.TERMS if options.all_terms else options.term or [models.DEFAULT_TERM]
    asked = comparison.Options(
        next(iter(options.what), None),
        *(options.batch_size, options.backend, options.threads, options.data),
    )
    jobs = comparison.plan([models.find_term(name) for name in dict.fromkeys(names)], asked)
    if options.plot is not None:
        comparison_plot.check(options.plot)
    for path in filter(None, (options.json, options.plot)):
        comparison_files.check_writable(path)
    comparison.prepare_data(jobs)
    rows = comparison.compare(jobs, options.repeat)
    print(comparison_table.table(rows), flush=True)
    if options.json is not None:
        comparison_files.write_json(options.json, rows, asked)
    if options.plot is not None and not comparison_plot.write_plot(options.plot, rows):
        print(f"ece408: no run has figures to draw to {options.plot}", file=sys.stderr)
    return EXIT_UNEXPECTED if any(row.summary.failed for row in rows) else 0


def _add_report(commands: Any) -> None:
    parser = arguments.add_command(
        commands,
        "report",
        "run all milestones that this machine can run, and write the report of them",
        epilog="Writes report.html, report.md and its pictures. Notes that you write into "
        "report.md, where it says so, stay when the report is made again. What an interrupted "
        "report has measured is kept. Exit code: 0, or 1 when a run failed that this machine "
        "could make; the report then says which.",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("report"),
        help="folder to write to (default: %(default)s)",
    )
    parser.add_argument(
        "--term",
        default=models.DEFAULT_TERM,
        help=f"configuration of the course: {', '.join(models.TERMS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        metavar="N,N",
        default=report_plan.DEFAULT_SIZES,
        help="numbers of test images to time op times with, 1 to 10000 (default: %(default)s)",
    )
    arguments.add_repeat(
        parser, "time every milestone in N runs and give the median and the quartiles"
    )
    arguments.add_threads_and_data(parser)
    parser.add_argument(
        "--peer-python",
        metavar="PYTHON",
        help="a Python with PyTorch, for its times on the CPU, and cuDNN's on a GPU (default: "
        "without)",
    )
    parser.add_argument(
        "--kernels",
        metavar="DIR",
        type=Path,
        help="a folder of versions of a kernel of your own, .cu, .cuh, .cc or .h, whose order is "
        "that of their names: a section on what each changed and gained",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="run nothing, but write the report again, with your notes, from what the last one in "
        "DIR has measured, there or on another machine",
    )
    parser.set_defaults(run=_run_report)


def _run_report(options: argparse.Namespace) -> int:
    arguments.check_repeat(options.repeat)
    settings.configure(threads=options.threads, data=options.data)
    dispatch.check_settings()
    asked = report_plan.Options(
        models.find_term(options.term),
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
            made = report_make.make(asked, options.output)
    except KeyboardInterrupt:
        kept, wanted = report_make.results_kept(asked, options.output)
        print(f"ece408: {kept} of {wanted} results are kept in {options.output}; the same command "
              "goes on from them", file=sys.stderr)  # fmt: skip
        raise
    for path in made.files:
        print(path)
    for failure in made.failures:
        print(f"ece408: {failure}", file=sys.stderr)
    return EXIT_UNEXPECTED if made.failures else 0


def _add_doctor(commands: Any) -> None:
    parser = arguments.add_command(
        commands,
        "doctor",
        "tell what is installed and usable here, and what to do about the rest",
        epilog="exit codes: 0: all milestones can run (except perhaps m1.2, which needs an MXNet "
        f"built for the GPU: the last line says so); {doctor.EXIT_CPU_ONLY}: only those on the "
        f"CPU can; {doctor.EXIT_NOTHING}: not even those can",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    diagnosis = doctor.diagnose()
    print(json.dumps(diagnosis.json(), indent=2) if options.json else diagnosis.text())
    return diagnosis.exit_code


def _add_data(commands: Any) -> None:
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
    parser.set_defaults(run=_run_data)


def _run_data(options: argparse.Namespace) -> None:
    settings.configure(data=options.data)
    if options.action == "fetch":
        fetch.fetch(data.cache_folder(), data.KINDS)
        print(data.cache_folder())
    elif options.action == "verify":
        for kind in data.KINDS:
            for path in data.verify(kind):
                print(f"{path}: ok")
    else:
        for folder in dict.fromkeys(data.locate(kind) for kind in data.KINDS):
            print(folder)


def _add_swap(commands: Any) -> None:
    title = "replace MXNet's Convolution by our operator in a saved checkpoint"
    parser = arguments.add_command(commands, "swap", title)
    parser.add_argument("prefix", metavar="PREFIX", help="reads PREFIX-symbol.json")
    parser.add_argument("epoch", metavar="EPOCH", type=int, help="and PREFIX-EPOCH.params")
    parser.add_argument("out", metavar="OUT", help="writes the same under the prefix OUT")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="only this layer, or those a pattern such as 'conv*' fits (may be repeated)",
    )
    parser.add_argument("--backend", metavar="NAME", help="who computes the swapped layers")
    parser.add_argument(
        "--precision",
        metavar="NAME",
        help=f"how exact they must be at least: {', '.join(PRECISIONS)} (default: not written to "
        "the checkpoint)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the networks' outputs on random images, and write nothing if they differ "
        f"by more than {_SWAPPED_ERROR:g} of the largest ({_SWAPPED_HALF_ERROR:g} in float16 and "
        "TF32); prints their times, too",
    )
    parser.add_argument(
        "--image", metavar="CxHxW", help="with --verify, the images, such as 3x224x224"
    )
    parser.add_argument(
        "--batch", metavar="N", type=int, default=1, help="with --verify, images (default: 1)"
    )
    parser.set_defaults(run=_run_swap)


def _run_swap(options: argparse.Namespace) -> None:
    symbol, arg_params, aux_params = load_checkpoint(options.prefix, options.epoch)
    swapped, report = swap_symbol(symbol, options.backend, options.only, options.precision)
    if options.verify:
        if options.batch < 1:
            raise InvalidSize(f"{options.batch} images are too few; --batch takes 1 and more")
        shape = (options.batch, *tune_targets.image_of(options.image, options.prefix))
        found = compare_symbols(symbol, swapped, arg_params, aux_params, shape)
        print(f"before and after: {found}")
        is_half = any(each.dtype == np.float16 for each in arg_params.values())
        exact = options.precision in (None, "float32") and not is_half
        if not found.error <= (_SWAPPED_ERROR if exact else _SWAPPED_HALF_ERROR):
            raise WrongResult(
                f"the swapped network differs by {found.error:.1e}; {options.out} is not written"
            )
    save_swapped(swapped, options.prefix, options.epoch, options.out)
    print(report)


def _add_models(commands: Any) -> None:
    parser = arguments.add_command(
        commands, "models", "measure the models that come with the package"
    )
    parser.add_argument("--term", action="append", help="only this term's (may be repeated)")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write models/README.md's text to FILE as well"
    )
    arguments.add_data(parser)
    parser.set_defaults(run=_run_models)


def _run_models(options: argparse.Namespace) -> None:
    variables.set_environment()
    settings.configure(data=options.data)
    terms = [models.find_term(name) for name in options.term or models.TERMS]
    chosen = [(term, model) for term in terms for model in term.models]
    progress = tqdm(chosen, unit="model", disable=None)
    cards = [model_card.measure(term, model) for term, model in progress]
    print(model_card.table(cards))
    if options.output is not None:
        with atomic_path(options.output) as temporary:
            temporary.write_text(model_card.document(cards), encoding="utf-8")


def _add_train(commands: Any) -> None:
    parser = arguments.add_command(commands, "train", "train a term's model on the CPU, with MXNet")
    parser.add_argument("term", metavar="TERM", help=f"one of: {', '.join(models.TERMS)}")
    parser.add_argument(
        "--model",
        default=models.BASELINE,
        help="a model with parameters of its own (default: %(default)s, whose parameters the "
        "term's other models share)",
    )
    recipe = training.Recipe(models.DEFAULT_TERM)
    parser.add_argument(
        "--epochs", type=int, help=f"passes over the training images (default: {recipe.epochs})"
    )
    parser.add_argument("--seed", type=int, default=recipe.seed, help="default: %(default)s")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="folder for the checkpoint (default: ./models/TERM)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="start over instead of continuing an interrupted run"
    )
    arguments.add_data(parser)
    parser.set_defaults(run=_run_train)


def _run_train(options: argparse.Namespace) -> None:
    if options.epochs is not None and options.epochs < 1:
        raise InvalidSize(f"{options.epochs} is not a number of epochs; give 1 or more")
    variables.set_environment()
    settings.configure(data=options.data)
    term = models.find_term(options.term)
    recipe = training.recipe_for(term, options.model)
    epochs = options.epochs or recipe.epochs
    recipe = dataclasses.replace(recipe, epochs=epochs, seed=options.seed)
    work = settings.cache() / "training" / f"{term.name}-{recipe.model}"
    if options.restart:
        training.discard(work)
    trained = training.train(recipe, work)
    for path in training.export(recipe, trained, options.output or Path("models") / term.name):
        print(path)
    print(f"test accuracy: {trained.test_accuracy}")
