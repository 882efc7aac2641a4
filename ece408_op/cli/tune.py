"""`ece408 tune`: measures kernels, keeps the results and prints tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import settings
from ..backends import kernel_file
from ..backends.cuda import work
from ..backends.cuda.kernels import tuned
from ..backends.cuda.kernels.tuned import Result
from ..backends.cuda.plan import Kernel
from ..backends.cuda.runtime import compiler, device
from ..backends.cuda.runtime.device import Gpu
from ..bench import side_by_side, tune_targets, tuner
from ..bench.side_by_side import Found, Task
from ..course import models
from ..errors import InvalidSetting
from ..files.cachedir import atomic_path
from ..operator import variables
from ..operator.environment import machine
from ..problem import PRECISIONS, ConvProblem, check_precision
from . import arguments


@dataclass(frozen=True)
class Request:
    """What to tune for: names and batches as in `tune_targets`, precisions, whether to measure
    again what has been, the GPUs' numbers, files to write to, and a file whose tunables are
    measured in the place of all kernels."""

    names: Sequence[str]
    batches: Sequence[int]
    image: str | None
    precisions: Sequence[str]
    force: bool
    gpus: Sequence[int] = (0,)
    json: Path | None = None
    out: Path | None = None
    kernel: str | None = None


def add(commands: Any) -> None:
    """`ece408 tune`."""
    title = "measure which CUDA kernel, with which tiles, is the best for a network's layers here"
    parser = arguments.add_command(
        commands,
        "tune",
        title,
        epilog="What was measured before for the same GPU, driver and kernels is kept. Forward "
        "passes use the results from then on.",
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="TERM|SHAPE|CHECKPOINT",
        help=f"a term ({', '.join(models.TERMS)}), a shape such as fa19_1 or "
        "b100,c12,h33,w33,m24,k5, or the prefix of a checkpoint (default: "
        f"{models.DEFAULT_TERM})",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=int, action="append", default=[],
        help="images at once (may be repeated; default: a shape's own, otherwise 100 and 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--image", metavar="CxHxW", help="the images of a checkpoint, such as 3x224x224"
    )
    parser.add_argument(
        "--precision",
        metavar="NAME",
        action="append",
        help=f"how exact kernels must be at least: {', '.join(PRECISIONS)} (may be repeated; "
        "default: ECE408_PRECISION, or float32)",
    )
    parser.add_argument(
        "--kernel",
        metavar="FILE",
        help="measure the tunables of a CUDA file that declares its launch, '// ece408: tunable "
        "TILE = 8, 16, 32', and not this package's kernels; the file then runs with the best ones",
    )
    parser.add_argument("--force", action="store_true", help="measure what has been measured")
    arguments.add_gpu(parser, "several of one kind share the problems")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every candidate's time to FILE"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path,
        help="add the results to FILE instead of the cache",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    variables.set_environment()
    run(
        Request(
            options.what or [models.DEFAULT_TERM],
            options.batch_size,
            options.image,
            options.precision or [settings.precision()],
            options.force or options.output is not None,
            settings.devices(),
            options.json,
            options.output,
            options.kernel,
        )
    )


def run(request: Request) -> None:
    """Measure, keep the results after each problem, and print tables to stdout.

    Raises `NoUsableGpu`, `TuningFailed`, `InvalidSetting` for a file that declares no launch, and
    what `tune_targets.problems` raises.
    """
    only = None if request.kernel is None else _file(request.kernel)
    precisions = [check_precision(name) for name in dict.fromkeys(request.precisions)]
    problems = tune_targets.problems(request.names, request.batches, request.image)
    gpu = device.get(request.gpus[0])
    side_by_side.check_alike(request.gpus)
    compiler.require_nvcc()
    tasks = []
    for problem in problems:
        reason = only and only.why_not(problem, gpu.capability)
        if only and reason:
            print(f"ece408: {only.name} does not compute {problem}: {reason}", file=sys.stderr)
            continue
        asked = (gpu, request.force, only)
        wanted = [each for each in precisions if _is_wanted(problem, each, *asked)]
        if wanted:
            tasks.append(Task(problem, wanted, request.kernel))
    measured = []
    for found in _tuned(request.gpus, tasks, gpu, only):
        path = tuned.save(found[2], gpu, request.out)
        measured.append(found)
        print(tuner.table(found[0].problem, found[1]))
        for result in found[2]:
            print(_line(result))
        sys.stdout.flush()
    if measured:
        print(f"ece408: results are in {path}", file=sys.stderr)
    if request.json is not None:
        _write(request.json, sorted(measured, key=lambda found: tasks.index(found[0])))


def _tuned(
    gpus: Sequence[int], tasks: Sequence[Task], gpu: Gpu, only: Kernel | None
) -> Iterator[Found]:
    """What comes of the tasks, with a bar: of candidates, or, on several GPUs, of tasks."""
    if min(len(gpus), len(tasks)) > 1:
        found = side_by_side.tune_all(gpus, tasks)
        yield from tqdm(found, total=len(tasks), unit="problem", disable=None, leave=False)
        return
    for task in tasks:
        loosest = max(task.precisions, key=PRECISIONS.index)
        count = len(tuner.candidates(task.problem, gpu, loosest, only))
        title = str(task.problem)
        with tqdm(total=count, desc=title, unit="tile", disable=None, leave=False) as bar:
            candidates, results = task.run(gpus[0], bar.update)
        yield task, candidates, results


def _file(name: str) -> Kernel:
    if kernel_file.device_of(name) != "cuda":
        raise InvalidSetting(
            f"--kernel takes a CUDA file with tunables, such as mine.cu, not {name}"
        )
    return work.forward_kernel(name)


def _is_wanted(problem: ConvProblem, name: str, gpu: Gpu, force: bool, only: Kernel | None) -> bool:
    """Whether to measure; if not, says why on stderr or prints the kept result to stdout."""
    least = 1 if only else 2
    if problem.dtype != "float32" or len(tuner.candidates(problem, gpu, name, only)) < least:
        print(f"ece408: there is one kernel for {problem}, nothing to choose", file=sys.stderr)
        return False
    result = None if force else tuned.kept(problem, gpu, name, only)
    if result is not None:
        print(f"{_line(result)} (kept; --force measures it again)")
    return result is None


def _line(result: Result) -> str:
    name = result.kernel.partition("@")[0]
    tiles = "".join(f" {name}={value}" for name, value in result.tunables)
    return (
        f"best for {result.problem} in {result.precision}: {name}{tiles}, "
        f"{result.ms:.4f} ms of {result.candidates} candidates"
    )


def _write(path: Path, measured: Sequence[Found]) -> None:
    content: dict[str, Any] = {
        "machine": machine(),
        "problems": [
            {
                "problem": str(task.problem),
                "candidates": [each.document() for each in found],
                "best": [each.document() for each in results],
            }
            for task, found, results in measured
        ],
    }
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
