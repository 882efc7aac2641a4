"""`ece408 tune`: measures kernels, keeps the results and prints tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..backends import kernel_file
from ..backends.cuda import work
from ..backends.cuda.kernels import tuned
from ..backends.cuda.kernels.tuned import Result
from ..backends.cuda.plan import Kernel
from ..backends.cuda.runtime import compiler, device
from ..backends.cuda.runtime.device import Gpu
from ..bench import tune_targets, tuner
from ..bench.tuner import Candidate
from ..errors import InvalidSetting
from ..files.cachedir import atomic_path
from ..operator.environment import machine
from ..problem import PRECISIONS, ConvProblem, check_precision


@dataclass(frozen=True)
class Request:
    """What to tune for: names and batches as in `tune_targets`, precisions, whether to measure
    again what has been, the GPU's number, files to write to, and a file whose tunables are
    measured in the place of all kernels."""

    names: Sequence[str]
    batches: Sequence[int]
    image: str | None
    precisions: Sequence[str]
    force: bool
    gpu: int = 0
    json: Path | None = None
    out: Path | None = None
    kernel: str | None = None


def run(request: Request) -> None:
    """Measure, keep the results after each problem, and print tables to stdout.

    Raises `NoUsableGpu`, `TuningFailed`, `InvalidSetting` for a file that declares no launch, and
    what `tune_targets.problems` raises.
    """
    only = None if request.kernel is None else _file(request.kernel)
    precisions = [check_precision(name) for name in dict.fromkeys(request.precisions)]
    problems = tune_targets.problems(request.names, request.batches, request.image)
    gpu = device.get(request.gpu)
    compiler.require_nvcc()
    measured = []
    for problem in problems:
        reason = only and only.why_not(problem, gpu.capability)
        if only and reason:
            print(f"ece408: {only.name} does not compute {problem}: {reason}", file=sys.stderr)
            continue
        asked = (gpu, request.force, only)
        wanted = [each for each in precisions if _is_wanted(problem, each, *asked)]
        if wanted:
            found, results = _measure(gpu, problem, wanted, only)
            path = tuned.save(results, gpu, request.out)
            measured.append((problem, found, results))
            print(tuner.table(problem, found))
            for result in results:
                print(_line(result))
            sys.stdout.flush()
    if measured:
        print(f"ece408: results are in {path}", file=sys.stderr)
    if request.json is not None:
        _write(request.json, measured)


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


def _measure(
    gpu: Gpu, problem: ConvProblem, precisions: Sequence[str], only: Kernel | None
) -> tuple[list[Candidate], list[Result]]:
    loosest = max(precisions, key=PRECISIONS.index)
    count = len(tuner.candidates(problem, gpu, loosest, only))
    with tqdm(total=count, desc=str(problem), unit="tile", disable=None, leave=False) as progress:
        return tuner.tune(gpu, problem, precisions, progress.update, only)


def _line(result: Result) -> str:
    name = result.kernel.partition("@")[0]
    tiles = "".join(f" {name}={value}" for name, value in result.tunables)
    return (
        f"best for {result.problem} in {result.precision}: {name}{tiles}, "
        f"{result.ms:.4f} ms of {result.candidates} candidates"
    )


def _write(
    path: Path, measured: Sequence[tuple[ConvProblem, list[Candidate], list[Result]]]
) -> None:
    content: dict[str, Any] = {
        "machine": machine(),
        "problems": [
            {
                "problem": str(problem),
                "candidates": [each.document() for each in found],
                "best": [each.document() for each in results],
            }
            for problem, found, results in measured
        ],
    }
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
