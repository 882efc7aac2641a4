"""`ece408 tune`: measures kernels, saves the results and prints tables."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import settings
from ..backends import DIRECTIONS, kernel_file
from ..backends.cuda import work
from ..backends.cuda.kernel_plan import Kernel
from ..backends.cuda.kernels import tuned
from ..backends.cuda.kernels.tuned import Result
from ..backends.cuda.runtime import compiler, device
from ..backends.cuda.runtime.device import Gpu
from ..bench import side_by_side, tune_targets, tuner
from ..bench.side_by_side import Answer, Job
from ..bench.tuner import Candidate, Task
from ..course import course_terms
from ..errors import Ece408Error, InvalidSetting
from ..files.cachedir import write_text
from ..operator import variables
from ..operator.environment import machine
from ..problem import PRECISIONS, check_precision
from . import arguments

# Number of tasks whose candidates are compiled concurrently if they are few.
_COMPILED_TOGETHER = 12


def add(commands: Any) -> None:
    """Add `ece408 tune`."""
    title = "find the fastest CUDA kernel and tiles for a network's layers on this GPU"
    parser = arguments.add_command(
        commands,
        "tune",
        title,
        epilog="Earlier results for the same GPU, driver and kernels are kept, so an interrupted "
        "run resumes. Later calls use the results.",
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="TERM|SHAPE|NETWORK|CHECKPOINT",
        help=f"a term ({', '.join(course_terms.TERMS)}), a shape such as fa19_1 or "
        "b100,c12,h33,w33,m24,k5, a network of MXNet's model zoo such as resnet18_v1, zoo for "
        f"{len(tune_targets.ZOO)} of these and all terms, or the prefix of a checkpoint (default: "
        f"{course_terms.DEFAULT_TERM})",
    )
    parser.option(
        "--batch-size N",
        "images at once (may be repeated; default: a shape's own, otherwise 100 and 10000)",
        action="append",
        default=[],
    )
    parser.option("--image CxHxW", "the images of a checkpoint, such as 3x224x224")
    parser.option(
        "--precision NAME",
        f"minimum precision of kernels: {arguments.PRECISION} (may be repeated; "
        "default: ECE408_PRECISION, or float32)",
        action="append",
    )
    parser.option(
        "--kernel FILE",
        "measure the tunables of a CUDA file that declares its launch, '// ece408: tunable "
        "TILE = 8, 16, 32', and not this package's kernels; the file then runs with the best ones",
        type=str,
    )
    parser.option("--gradients", "tune the gradients as well")
    parser.option(
        "--quick",
        "measure only kernels that may run untuned, each with the few tiles that are expected "
        "to be best; several layers are compiled concurrently",
    )
    parser.option("--force", "measure again what has been measured")
    arguments.add_gpu(parser, "several of one kind split the problems")
    parser.option("--json FILE", "write every candidate's time to FILE")
    parser.option("--output FILE", "add the results to FILE instead of the cache")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, save the results after each problem, and print tables to stdout.

    Raises `NoUsableGpu`, `InvalidSetting` for a file that declares no launch, what
    `tune_targets.problems` raises, and, after all tasks, the first one's error.
    """
    variables.set_environment()
    only = None if options.kernel is None else _file(options.kernel)
    named = options.precision or [settings.precision()]
    precisions = list(dict.fromkeys(map(check_precision, named)))
    names = options.what or [course_terms.DEFAULT_TERM]
    problems = tune_targets.problems(names, options.batch_size, options.image)
    gpus = settings.devices()
    gpu = device.get(gpus[0])
    side_by_side.check_alike(gpus)
    compiler.require(options.kernel)
    directions = DIRECTIONS if options.gradients and only is None else DIRECTIONS[:1]
    tasks = [
        Task(problem, direction, options.kernel, options.quick)
        for problem in problems
        for direction in directions
    ]
    wanted = {task: _wanted(task, precisions, gpu, options) for task in tasks}
    wanted = {task: names for task, names in wanted.items() if names}
    measured: dict[Task, tuple[list[Candidate], list[Result]]] = {}
    failures = []
    for task, answer in _answers(gpus, wanted, options.quick):
        if isinstance(answer, Ece408Error):
            failures.append(answer)
            print(f"ece408: {task} is left out: {answer}", file=sys.stderr)
            continue
        measured[task] = found, results = answer
        path = tuned.save(results, gpu, options.output)
        print(tuner.table(task, found))
        for result in results:
            print(_line(result))
        sys.stdout.flush()
    if measured:
        print(f"ece408: results are in {path}", file=sys.stderr)
    if options.json is not None:
        _write(options.json, [(task, *measured[task]) for task in wanted if task in measured])
    if failures:
        raise failures[0]


def _answers(
    gpus: Sequence[int], wanted: Mapping[Task, Sequence[str]], quick: bool
) -> Iterator[tuple[Task, Answer]]:
    """Yield the tasks' answers, with a progress bar: of candidates, or, with several GPUs, of
    tasks."""
    if min(len(gpus), len(wanted)) > 1:
        found = side_by_side.tune_all(gpus, wanted.items())
        yield from tqdm(found, total=len(wanted), unit="task", disable=None, leave=False)
        return
    gpu = device.get(gpus[0])
    for task, names in _compiled_ahead(gpu, wanted) if quick else wanted.items():
        try:
            yield task, _measure(gpu, task, names)
        except Ece408Error as error:
            yield task, error


def _file(name: str) -> Kernel:
    if kernel_file.device_of(name) != "cuda":
        raise InvalidSetting(
            f"--kernel takes a CUDA file with tunables, such as mine.cu, not {name}"
        )
    return work.forward_kernel(name)


def _wanted(
    task: Task, precisions: Sequence[str], gpu: Gpu, options: argparse.Namespace
) -> list[str]:
    """Return the precisions to measure. For others, print the reason to stderr, or the existing
    result to stdout."""
    reason = task.only and task.only.why_not(task.problem, gpu.capability)
    if task.only and reason:
        name = task.only.name
        print(f"ece408: {name} does not compute {task.problem}: {reason}", file=sys.stderr)
        return []
    least = 1 if task.only else 2
    wanted = []
    for name in precisions:
        if task.problem.dtype != "float32" or len(tuner.candidates(task, gpu, name)) < least:
            print(f"ece408: there is one kernel for {task}, nothing to choose", file=sys.stderr)
            continue
        where = (task.problem, gpu, name, task.only, task.direction, options.output)
        result = None if options.force else tuned.kept(*where)
        if result is None:
            wanted.append(name)
        else:
            print(f"{_line(result)} (kept; --force measures it again)")
    return wanted


def _compiled_ahead(gpu: Gpu, wanted: Mapping[Task, Sequence[str]]) -> Iterator[Job]:
    """Yield the tasks, some at a time after compiling them; print the expected remaining time to
    stderr."""
    tasks, start = list(wanted.items()), time.monotonic()
    for first in range(0, len(tasks), _COMPILED_TOGETHER):
        some = tasks[first : first + _COMPILED_TOGETHER]
        if first:
            left = (time.monotonic() - start) / first * (len(tasks) - first)
            print(
                f"ece408: {first} of {len(tasks)} are measured; the rest will take about "
                f"{left / 60:.0f} minutes",
                file=sys.stderr,
            )
        loosest = max((name for _, names in some for name in names), key=PRECISIONS.index)
        tuner.compile_ahead(gpu, [task for task, _ in some], loosest)
        yield from some


def _measure(
    gpu: Gpu, task: Task, precisions: Sequence[str]
) -> tuple[list[Candidate], list[Result]]:
    loosest = max(precisions, key=PRECISIONS.index)
    count = len(tuner.candidates(task, gpu, loosest))
    with tqdm(total=count, desc=str(task), unit="tile", disable=None, leave=False) as progress:
        return tuner.tune(gpu, task, precisions, progress.update)


def _line(result: Result) -> str:
    name = result.kernel.partition("@")[0]
    what = str(Task(result.problem, result.direction))
    tiles = "".join(f" {name}={value}" for name, value in result.tunables)
    return (
        f"best for {what} in {result.precision}: {name}{tiles}, "
        f"{result.ms:.4f} ms of {result.candidates} candidates"
    )


def _write(path: Path, measured: Sequence[tuple[Task, list[Candidate], list[Result]]]) -> None:
    content: dict[str, Any] = {
        "machine": machine(),
        "problems": [
            {
                "problem": str(task.problem),
                "direction": task.direction,
                "candidates": [each.document() for each in found],
                "best": [each.document() for each in results],
            }
            for task, found, results in measured
        ],
    }
    write_text(path, json.dumps(content, indent=2) + "\n")
