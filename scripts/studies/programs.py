"""Whole programs in turns: milestones, and a PyTorch program that does the same."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ece408_op import settings
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.course import course_terms
from ece408_op.course.dataset import fashion_data, resize
from ece408_op.errors import InvalidSetting

from .bench_request import Request

ABOUT = (
    "Whole programs in turns after a first one of each, which compiles CUDA kernels and fills "
    "caches, with all 10000 images in one batch; torch is a PyTorch program with the same network, "
    "parameters and images."
)
_TORCH = Path(__file__).with_name("torch_milestone.py")
_ACCURACY = re.compile(r"(?:Correctness:|'accuracy':|^accuracy) ([\d.]+)", re.M)
PEER = "torch"


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each program beside PyTorch's. Raises the errors of `fashion_data.load`, and
    `InvalidSetting` for a program that fails."""
    with tempfile.TemporaryDirectory() as folder:
        ms, accuracy = run(commands(request, Path(folder)), request.repeat)
    found = {name: summary(each) for name, each in ms.items()}
    peer = {PEER: found.pop(PEER)} if PEER in found else {}
    theirs = {"torch_accuracy": accuracy[PEER]} if peer else {}
    for name, each in found.items():
        yield {"case": name, "accuracy": accuracy[name], **theirs, "ms": {OURS: each, **peer}}


def run(
    programs: dict[str, list[str]], repeat: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return by program the milliseconds of each run in turns, without the first, and the
    accuracy."""
    ms: dict[str, list[float]] = {name: [] for name in programs}
    accuracy = {}
    for turn in range(repeat + 1):
        for name, command in programs.items():
            begin = time.perf_counter()
            result = subprocess.run(command, capture_output=True, text=True)
            if turn > 0:
                ms[name].append(1e3 * (time.perf_counter() - begin))
            accuracy[name] = _accuracy(name, result)
    return ms, accuracy


def commands(request: Request, folder: Path) -> dict[str, list[str]]:
    """Return the commands by name; the folder receives the images and the inputs of PyTorch's
    program."""
    term = course_terms.find_term(course_terms.DEFAULT_TERM)
    _, labels = fashion_data.load("t10k", term.image_size)
    threads = str(settings.threads())
    ece408 = [sys.executable, "-m", "ece408_op"]
    found = {each: [*ece408, *each.split(), f"--threads={threads}"] for each in request.cases}
    if PEER not in request.against:
        return found
    has_it = [request.peer_python, "-c", "import torch; print(torch.__version__)"]
    try:
        version = subprocess.run(has_it, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        request.miss(PEER, f"{request.peer_python} lacks PyTorch; set --peer-python")
        return found
    request.versions[PEER] = version.strip()
    parameters = course_terms.load_model(term, course_terms.BASELINE).arg_params
    weights = {name: each.asnumpy().astype(np.float32) for name, each in parameters.items()}
    others = folder / "others.npz"
    np.savez(others, labels=np.asarray(labels), **weights)
    images = resize.cached_path("t10k", term.image_size)
    found[PEER] = [request.peer_python, str(_TORCH), str(images), str(others), threads]
    return found


def _accuracy(name: str, result: subprocess.CompletedProcess[str]) -> float:
    if result.returncode:
        reason = (result.stderr.strip() or "nothing printed").splitlines()[-1]
        raise InvalidSetting(f"{name} failed: {reason}")
    found = _ACCURACY.search(result.stdout)
    if found is None:
        raise InvalidSetting(f"{name} printed no accuracy: {result.stdout.strip()[-80:]!r}")
    return float(found[1])
