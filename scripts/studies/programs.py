"""Whole programs in turns: milestones, and a PyTorch program that does the same."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op import settings
from ece408_op.course.course_terms import BASELINE, Term
from ece408_op.course.dataset import fashion_data, idx, resize
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown, resources
from ece408_op.report.spread import Spread

_TORCH = Path(__file__).with_name("torch_milestone.py")
_ACCURACY = re.compile(r"(?:Correctness:|'accuracy':|^accuracy) ([\d.]+)", re.M)
MILESTONES = ("m1.1", "m2.1")
ON_GPU = ("m3.1", "m4.1", "final")
PEER = "PyTorch"


@dataclass(frozen=True)
class Timed:
    """A program's accuracy, the wall seconds of each of its runs, and what it says of itself."""

    name: str
    accuracy: float
    seconds: Sequence[float]
    about: str = ""


def commands(term: Term, peer_python: str | None, on_gpu: bool = False) -> dict[str, list[str]]:
    """What to run, by name; the images are ready. Raises the errors of `fashion_data.load`."""
    fashion_data.load("t10k", term.image_size)
    threads = str(settings.threads())
    ece408 = [sys.executable, "-m", "ece408_op"]
    found = {
        name: [*ece408, name, f"--term={term.name}", f"--threads={threads}"]
        for name in (*MILESTONES, *(ON_GPU if on_gpu else ()))
    }
    if peer_python is not None:
        folder = fashion_data.locate("t10k")
        _, labels = idx.files("t10k")
        files = [
            resize.cached_path("t10k", term.image_size),
            idx.find(folder, labels),
            next((resources.models_dir() / term.name).glob(f"{BASELINE}-*.params")),
        ]
        found[PEER] = [peer_python, str(_TORCH), *map(str, files), threads]
    return found


def measure(
    programs: dict[str, list[str]], repeat: int, update: Callable[[], object]
) -> list[Timed]:
    """Run each `repeat` times, in rounds, after a first one that compiles CUDA kernels and fills
    caches. Raises `InvalidSetting` for one that fails."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    printed = {}
    for turn in range(repeat + 1):
        for name, command in programs.items():
            begin = time.perf_counter()
            result = subprocess.run(command, capture_output=True, text=True)
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
            if result.returncode:
                reason = (result.stderr.strip() or "nothing printed").splitlines()[-1]
                raise InvalidSetting(f"{name} failed: {reason}")
            printed[name] = result.stdout
            update()
    return [_timed(name, printed[name], each) for name, each in seconds.items()]


def _timed(name: str, printed: str, seconds: Sequence[float]) -> Timed:
    found = _ACCURACY.search(printed)
    if found is None:
        raise InvalidSetting(f"{name} printed no accuracy: {printed.strip()[-80:]!r}")
    return Timed(name, float(found[1]), seconds, printed.strip() if name == PEER else "")


def table(found: Sequence[Timed]) -> str:
    """Medians and quartiles, and how many times as fast as the last program each is."""
    spreads = [Spread.of(each.seconds) for each in found]
    rows = [
        [
            *(each.name, each.accuracy, f"{spread.median:.2f}"),
            *(f"{spread.low:.2f} to {spread.high:.2f}", f"{last.median / spread.median:.2f}"),
        ]
        for each, spread, last in zip(found, spreads, itertools.repeat(spreads[-1]))
        if spread and last
    ]
    head = ["program", "accuracy", "median, s", "quartiles, s", f"times {found[-1].name}'s speed"]
    return markdown.table(head, rows)


def records(found: Sequence[Timed]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [dict(vars(each), seconds=list(each.seconds)) for each in found]
