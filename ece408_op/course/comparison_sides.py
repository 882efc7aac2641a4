"""Side-by-side table of earlier measurements, from several machines or versions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidSetting
from ..files.markdown import aligned, listed

# Minimum runs per side for a significance test, and its significance level.
_ENOUGH = 4
_CHANCE = 0.05
# Properties of a machine that are shown.
_ABOUT = ("cpu", "cores", "gpus", "mxnet", "ece408_op")


class Key(NamedTuple):
    """What was run, and the figure with its unit."""

    run: str
    figure: str


@dataclass(frozen=True)
class Side:
    """A file: its name, machine and date, and the figures of every run, or their medians."""

    name: str
    about: str
    figures: Mapping[Key, Sequence[float]]
    has_medians: bool


def read(paths: Sequence[Path]) -> list[Side]:
    """Read files written by `ece408 compare --json` or a benchmark. Raises `InvalidSetting` for
    others."""
    # The shortest unambiguous names.
    ways = (lambda p: p.stem, lambda p: f"{p.absolute().parent.name}/{p.stem}", str)
    named = ([way(path) for path in paths] for way in ways)
    names = next((each for each in named if len(set(each)) == len(paths)), list(map(str, paths)))
    return [_read(path, name) for path, name in zip(paths, names)]


def _read(path: Path, name: str) -> Side:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = {key: document["machine"].get(key) for key in _ABOUT}
        about = listed({key: value for key, value in machine.items() if value})
        figures = _medians(document) if "rows" in document else _samples(document)
        return Side(name, f"{document['date']}: {about}", figures, "rows" in document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidSetting(
            f"{path} is not a file that `ece408 compare --json` or scripts/bench.py has written "
            f"({type(error).__name__}: {error})"
        ) from None


def _medians(document: Mapping[str, Any]) -> dict[Key, list[float]]:
    """Return a benchmark's figures."""
    figures = {}
    for row in document["rows"]:
        batch = f"batch {row['batch']}" if "batch" in row else ""
        run = ", ".join(filter(None, [row["case"], batch, row.get("direction")]))
        for who, ms in row.get("ms", {}).items():
            figures[Key(run, f"{who} ms")] = [float(ms["median"])]
    return figures


def _samples(document: Mapping[str, Any]) -> dict[Key, list[float]]:
    """Return a comparison's figures; failed runs have none."""
    figures: dict[Key, list[float]] = {}
    for row in document["runs"]:
        for run in row["samples"]:
            if run["error"] is None:
                name = f"{run['script']} {run['model']} {run['term']}, {int(run['size'])}"
                found = {f"conv{i} ms": 1e3 * float(s) for i, s in enumerate(run["op_seconds"], 1)}
                found["program s"] = float(run["elapsed_s"])
                for figure, value in found.items():
                    figures.setdefault(Key(name, figure), []).append(value)
    return figures


def text(sides: Sequence[Side]) -> str:
    """Return the sides' machines, and a table: each figure's median and half its interquartile
    range per side, and the speed-up over the first side."""
    abouts = [f"{side.name}: {side.about}" for side in sides]
    keys = list(dict.fromkeys(key for side in sides for key in side.figures))
    header = ["run", "figure", sides[0].name]
    for side in sides[1:]:
        header += [side.name, "gain"]
    rows = [header, *(_row(key, sides) for key in keys)]
    lines = aligned(rows, range(2))
    return "\n".join([*abouts, "", *lines, "", *_notes(rows, sides)])


def _row(key: Key, sides: Sequence[Side]) -> list[str]:
    first = sides[0].figures.get(key, ())
    row = [key.run, key.figure, _cell(first)]
    for side in sides[1:]:
        values = side.figures.get(key, ())
        doubt = "" if side.has_medians or _differ(first, values) else "?"
        row += [_cell(values), _gain(first, values) + doubt if first and values else "-"]
    return row


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    median = statistics.median(values)
    digits = 1 if median >= 100 else 2 if median >= 1 else 4
    if len(values) == 1:
        return f"{median:.{digits}f}"
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.{digits}f} ±{(quartiles[2] - quartiles[0]) / 2:.{digits}f}"


def _gain(first: Sequence[float], values: Sequence[float]) -> str:
    return f"{statistics.median(first) / statistics.median(values):.2f}x"


def _differ(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether the samples differ significantly (Mann and Whitney's U test)."""
    # SciPy's statistics take a second to import.
    from scipy import stats

    if min(len(a), len(b)) < _ENOUGH:
        return False
    return bool(stats.mannwhitneyu(a, b).pvalue < _CHANCE)


def _notes(rows: Sequence[Sequence[str]], sides: Sequence[Side]) -> list[str]:
    if all(side.has_medians for side in sides):
        return ["gain: how many times as fast as the first, by medians."]
    notes = ["gain: how many times as fast as the first; ±: half the distance of the quartiles."]
    if any(len(values) == 1 for side in sides for values in side.figures.values()):
        notes.append("Figures without ± are of a single run.")
    if any(cell.endswith("x?") for row in rows for cell in row):
        notes.append(
            f"?: may be chance: fewer than {_ENOUGH} runs of a side (--repeat), or samples that "
            "overlap."
        )
    return notes
