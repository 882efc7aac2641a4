"""Measurements in one format: rows as JSON, and as a Markdown table.

A row has a "case", optionally a "batch" and a "direction", and "ms", a summary by contender:
"ours", one of our kernels by name, or a peer, whose name begins with one of `PEERS`. "errors" and
"failures" are by contender as well; "failure" says why nothing was measured. Other entries of a row
are figures and words about it.
"""

from __future__ import annotations

import datetime
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting
from ..files import markdown
from ..files.cachedir import write_text
from ..files.records import to_json
from ..operator.environment import machine

OURS = "ours"
PEERS = ("mxnet", "torch", "cudnn", "onnxruntime", "openvino")
# Words that do not distinguish peers: the better layout of a peer counts.
_ALIKE = ("NCHW", "NHWC", "float32")
_NOT_FIGURES = ("case", "batch", "direction", "ms", "errors", "failures", "failure")

Row = dict[str, Any]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median and the minimum, to six digits, and the number of samples, at least one."""
    figures = {"median": statistics.median(samples), "min": min(samples)}
    return {name: float(f"{each:.6g}") for name, each in figures.items()} | {"n": len(samples)}


def show(prefix: Path | None, title: str, text: str, content: dict[str, Any]) -> None:
    """Print the text and, if a prefix is given, `write`."""
    print(text)
    if prefix is not None:
        write(prefix, title, text, content)


def write(prefix: Path, title: str, text: str, content: dict[str, Any]) -> None:
    """Write PREFIX.md and PREFIX.json, with this process's command, date, machine and versions.
    Raises `CacheUnwritable` if that fails."""
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command, about = _command(), machine()
    header = markdown.listed(about)
    whole = f"# {title}\n\n    {command}\n\n{date}: {header}\n\n{text}\n"
    document = {"command": command, "date": date, "machine": about, **content}
    for suffix, each in ((".md", whole), (".json", to_json(document))):
        write_text(prefix.with_name(prefix.name + suffix), each)


def _command() -> str:
    """Return this process's command line; absolute paths are cut to their last part."""
    return shlex.join(Path(each).name if each.startswith("/") else each for each in sys.argv)


def load(path: Path) -> dict[str, Any]:
    """Return a JSON file of `write`, with rows; {} if it is missing. Raises `InvalidSetting`."""
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["rows"]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidSetting(f"{path} is no results file ({error}); remove it") from error
    return document


def median(row: Row, who: str) -> float | None:
    """Return the median in milliseconds; `None` if it is missing or failed."""
    failed = who in row.get("failures", ())
    return None if failed or who not in row["ms"] else row["ms"][who]["median"]


def peers(row: Row) -> dict[str, float]:
    """Return by peer the median of its better layout, less accurate precisions separately."""
    found: dict[str, float] = {}
    for who in row["ms"]:
        name = " ".join(word for word in who.split() if word not in _ALIKE)
        ms = median(row, who)
        if _is_peer(who) and ms is not None:
            found[name] = min(ms, found.get(name, math.inf))
    return found


def _is_peer(who: str) -> bool:
    return who.split()[0] in PEERS


def table(rows: Sequence[Row]) -> str:
    """Return all rows in Markdown: a table for each direction and batch with geometric means, and
    the failures."""
    groups: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row.get("ms"):
            groups.setdefault((row.get("direction"), row.get("batch")), []).append(row)
    parts = []
    for (direction, batch), group in groups.items():
        titles = [direction] if direction else []
        titles += [f"batch {batch}"] if batch else []
        parts += [f"## {', '.join(titles)}"] if titles else []
        parts += [_table(group), *_means(group)]
    return "\n\n".join([*parts, *failures(rows)])


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each failure."""
    found = []
    for row in rows:
        batch = f", batch {row['batch']}" if "batch" in row else ""
        name = f"{row['case']}{batch}"
        found += [f"{name}: {row['failure']}"] if "failure" in row else []
        found += [f"{name}: {who}: {why}" for who, why in row.get("failures", {}).items()]
    return found


def _table(rows: Sequence[Row]) -> str:
    figures = list(dict.fromkeys(key for row in rows for key in row if key not in _NOT_FIGURES))
    own = dict.fromkeys(who for row in rows for who in row["ms"] if not _is_peer(who))
    others = [who for who in own if who != OURS]
    against = list(dict.fromkeys(name for row in rows for name in peers(row)))
    head = ["case", *(key.replace("_", " ") for key in figures)]
    if OURS in own:
        head += ["ours, ms", *(["others of ours, ms"] if others else [])]
        head += [cell for name in against for cell in (f"{name}, ms", f"{name} / ours")]
    else:
        head += [f"{name}, ms" for name in (*others, *against)]
    cells = []
    for row in rows:
        ours, theirs = median(row, OURS), peers(row)
        line = [_case(row), *(_cell(row.get(key)) for key in figures)]
        if OURS in own:
            named = [f"{who} {_cell(median(row, who))}" for who in others if who in row["ms"]]
            line += [_cell(ours), *(["; ".join(named)] if others else [])]
            for name in against:
                ms = theirs.get(name)
                line += [_cell(ms), f"{ms / ours:.2f}" if ms and ours else ""]
        else:
            line += [_cell(median(row, who)) for who in others]
            line += [_cell(theirs.get(name)) for name in against]
        cells.append(line)
    return markdown.table(head, cells)


def _case(row: Row) -> str:
    return f"`{row['case']}`" if "," in row["case"] else str(row["case"])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _means(rows: Sequence[Row]) -> list[str]:
    """Return the geometric means of our speed relative to each peer and to the fastest of our
    kernels."""
    factors: dict[str, list[float]] = {}
    speeds = []
    for row in rows:
        ours = median(row, OURS)
        if ours:
            for name, ms in peers(row).items():
                factors.setdefault(name, []).append(ms / ours)
            own = [ms["median"] for who, ms in row["ms"].items() if not _is_peer(who)]
            speeds.append(min(own) / ours)
    lines = [
        f"{name} / ours: {statistics.geometric_mean(each):.2f} in the geometric mean, at least "
        f"{min(each):.2f}, below 1 in {sum(factor < 1 for factor in each)} of {len(each)}."
        for name, each in factors.items()
    ]
    if any(speed < 1 for speed in speeds):
        mean = statistics.geometric_mean(speeds)
        lines.append(f"Our chosen kernel has {mean:.2f} of the speed of our fastest one.")
    return ["\n".join(lines)] if lines else []
