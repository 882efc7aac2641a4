"""cuDNN's times stored in the checkout, for reports from machines without cuDNN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..bench import results, shapes
from ..course.course_terms import Term
from ..files.resources import results_dir
from . import ladder


@dataclass(frozen=True)
class Recorded:
    """Median milliseconds by variant and layer, and the machine that measured them: GPU, date,
    versions."""

    gpu: str
    date: str
    versions: str
    batch: int
    times: Mapping[str, Mapping[str, float]]


def recorded(term: Term) -> Recorded | None:
    """Return the times of a term's layers; `None` without a checkout or without times."""
    folder = results_dir()
    if folder is None:
        return None
    document = results.load(folder / "cuda_bench.json")
    rows = {row["case"]: row for row in document.get("rows", ())}
    found: dict[str, dict[str, float]] = {}
    batch = 0
    for layer, problem in ladder.problems(term, 1).items():
        row = rows.get(shapes.called(problem), {"ms": {}})
        for who in row["ms"]:
            ms = results.median(row, who)
            if who.startswith("cudnn ") and ms is not None:
                batch = row["batch"]
                found.setdefault(who.partition(" ")[2], {})[layer] = ms
    if not found:
        return None
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    gpus = " and ".join(document["machine"]["gpus"])
    return Recorded(gpus, document["date"], versions, batch, found)
