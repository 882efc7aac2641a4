"""The `ece408` command; the scripts of the course are subcommands of it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from .. import dispatch, settings
from ..backends import kernel_file
from ..course import milestone, model_card, models, team, training
from ..course.dataset import data, fetch
from ..course.milestone import MILESTONES, Milestone
from ..errors import Ece408Error, InvalidSize, NoUsableGpu
from ..files.cachedir import atomic_path
from ..host import gpu, run_time
from ..operator import variables
from ..problem import PRECISIONS
from ..profile import convolution_times
from ..report import make as report_make
from ..report import own_kernels
from ..report import plan as report_plan
from ..version import __version__
from . import arguments, cache, compare, doctor, lab_commands, launch, program, swap, tune
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
            _choose_gpu(options)
            return options.run(options) or 0
    except KeyboardInterrupt:
        return _fail(options, "interrupted", EXIT_INTERRUPTED)
    except Ece408Error as error:
        return _fail(options, str(error), error.exit_code)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
        return _fail(options, text, EXIT_UNEXPECTED)


def _choose_gpu(options: argparse.Namespace) -> None:
    """`--gpu`, of the commands that have it."""
    if getattr(options, "gpu", None) is not None:
        settings.configure(devices=options.gpu)
        settings.devices()


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
    compare.add(commands)
    _add_report(commands)
    _add_data(commands)
    swap.add(commands)
    _add_models(commands)
    _add_train(commands)
    launch.add(commands)
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
    if each.own_operator or each.on_gpu:
        arguments.add_gpu(parser)
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

    asked = profiling.options_of(options)
    profiled = options.profile or asked != profiling.ProfileOptions()
    # MXNet has one profiler, and our operator says its op times itself.
    timed = not profiled and not options.milestone.own_operator

    def program() -> None:
        with convolution_times.told() if timed else contextlib.nullcontext():
            milestone.run(options.milestone, request)
        print(run_time.summary(), file=sys.stderr)

    if profiled:
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
    _choose_gpu(inner)
    return inner.run(inner) or 0


def _has_gpu() -> bool:
    try:
        return bool(gpu.find_driver().gpus)
    except NoUsableGpu:
        return False


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
    arguments.add_gpu(parser)
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
    if options.gpu is not None:
        # For the programs that the report runs.
        os.environ["ECE408_DEVICES"] = options.gpu
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
    parser = arguments.add_command(
        commands,
        "train",
        "train a term's model with MXNet",
        epilog="An interrupted run goes on where it stopped. As the command of ece408 launch it is "
        "a worker of several, which share each batch.",
    )
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
        "--batch-size",
        metavar="N",
        type=int,
        default=recipe.batch_size,
        help="images in a step of all workers together (default: %(default)s)",
    )
    parser.add_argument(
        "--kvstore",
        metavar="NAME",
        help=f"MXNet's KVStore: {', '.join(team.KVSTORES)}; dist_* in a job of ece408 launch: with "
        "dist_sync each step is of all workers, with dist_async each makes its own (default: "
        "dist_sync in a job, else local)",
    )
    arguments.add_gpu(parser, "train on it, several share the batch; needs MXNet's CUDA build")
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
    if options.batch_size < 1:
        raise InvalidSize(f"{options.batch_size} is not a batch size; give 1 or more")
    variables.set_environment()
    settings.configure(data=options.data)
    term = models.find_term(options.term)
    recipe = training.recipe_for(term, options.model)
    recipe = dataclasses.replace(
        recipe,
        epochs=options.epochs or recipe.epochs,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    work = settings.cache() / "training" / f"{term.name}-{recipe.model}"
    if options.restart:
        training.discard(work)
    gpus = () if options.gpu is None else settings.devices()
    trained = training.train(recipe, work, options.kvstore or team.default_kvstore(), gpus)
    if trained.test_accuracy is None:
        # The first worker has the rest to do.
        return
    for path in training.export(recipe, trained, options.output or Path("models") / term.name):
        print(path)
    print(f"test accuracy: {trained.test_accuracy}")
