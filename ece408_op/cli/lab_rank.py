"""`ece408 lab rank`: a class's kernel files in order, as tables, a CSV file and a page."""

from __future__ import annotations

import contextlib
import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .. import settings
from ..backends.cuda.runtime import device
from ..errors import InvalidSetting
from ..files import markdown
from ..files.cachedir import atomic_path
from ..lab import ranking as ranks
from ..lab.ranking import Entry, Ranking
from ..lab.timing import OURS, STEADY, device_of
from ..operator.environment import cpu_model
from ..problem import check_precision
from ..report import page
from .lab import asked_layers

_LAYERS_ONLY = "right on these layers only"


def rank(
    paths: Sequence[Path],
    layers: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    folder: Path,
    again: bool,
    jobs: int | None,
    precision: str,
) -> None:
    """Rank the files, print a table, and keep ranking.json, ranking.csv and ranking.html in a
    folder; what is there already of the same files is not measured a second time, but with `again`.

    Raises `InvalidSetting` for paths and numbers that mean nothing, and for files of two devices,
    and `NoUsableGpu`.
    """
    files = ranks.find(paths)
    kernels = [file for file in files.values() if not isinstance(file, str)]
    if not kernels:
        raise InvalidSetting(f"no kernel file in {', '.join(map(str, paths))}")
    if jobs is not None and jobs < 1:
        raise InvalidSetting("--jobs takes numbers from 1 on")
    kind = device_of(kernels)
    wanted = asked_layers(kind, layers, batches or (1000,), rounds)
    conditions = {
        "device": device.get(settings.devices()[0]).name if kind == "cuda" else cpu_model(),
        "layers": {layer: str(problem) for layer, problem in wanted},
        "rounds": rounds,
        "precision": check_precision(precision),
    }
    kept = folder / "ranking.json"
    ranking = ranks.load(kept, conditions)
    if again:
        ranks.again(ranking)
    with contextlib.closing(_Progress()) as progress:
        ranks.rank(
            files,
            ranking,
            wanted,
            rounds,
            jobs or max(1, settings.threads() // 2),
            lambda: ranks.save(ranking, kept),
            progress.show,
        )
    ranks.save(ranking, kept)
    head, rows = _table(ranking)
    _write(folder / "ranking.csv", _csv(head, rows))
    text = _markdown(ranking, head, rows)
    with _without_page(folder):
        _write(folder / "ranking.html", page.render(text, "Ranking", folder))
    print(_terminal(head, rows))
    for each in ranking.without():
        print(f"not ranked: {each.name}: {each.why_not or 'not timed'}")
    print(f"{folder}: ranking.json, ranking.csv, ranking.html")


class _Progress:
    """A bar for each kind of step."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._what = ""

    def show(self, what: str, done: int, total: int) -> None:
        if self._bar is None or self._what != what:
            self.close()
            self._bar = tqdm(total=total, desc=what, leave=False, disable=None)
            self._what = what
        self._bar.n, self._bar.total = done, total
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def _without_page(folder: Path):  # type: ignore[no-untyped-def]
    """Say what is missing for the page; the rest is there without it."""
    try:
        yield
    except InvalidSetting as error:
        print(f"no {folder / 'ranking.html'}: {error}")


def _table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Head and rows: rank, name, op times, sum, over our best, over last time, remarks."""
    layers = ranking.layers
    head = ["rank", "name", *(f"{layer}, ms" for layer in layers), "sum, ms", "ours", "before"]
    head += ["around, ms", "remarks"]
    ours = ranking.entries[OURS].sum(layers)
    rows = []
    place = 0
    for entry in ranking.in_order():
        place += entry.name != OURS
        total = entry.sum(layers) or 0.0
        rows.append(
            [
                "" if entry.name == OURS else str(place),
                entry.name,
                *(f"{1e3 * entry.timing(layer).median:.3f}" for layer in layers),
                f"{1e3 * total:.3f}",
                f"{total / ours:.2f}x" if ours else "",
                f"{total / entry.before:.2f}x" if entry.before else "",
                _around(entry, layers),
                "; ".join(_remarks(entry, layers)),
            ]
        )
    return head, rows


def _around(entry: Entry, layers: Sequence[str]) -> str:
    found = [entry.around[layer] for layer in layers if entry.around.get(layer)]
    return f"{1e3 * sum(map(statistics.median, found)):.1f}" if found else ""


def _remarks(entry: Entry, layers: Sequence[str]) -> list[str]:
    remarks = [_LAYERS_ONLY] if entry.layers_only and entry.name != OURS else []
    spread = max(entry.timing(layer).spread for layer in layers)
    if spread > STEADY:
        remarks.append(f"spread {spread:.0%}")
    return [*remarks, entry.note] if entry.note else remarks


def _terminal(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table without the columns in which no row has anything."""
    columns = [column for column in zip(head, *rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(
            text.ljust(width) if column[0] in ("name", "remarks") else text.rjust(width)
            for column, text, width in zip(columns, line, widths)
        ).rstrip()
        for line in zip(*columns)
    ]
    return "\n".join(lines)


def _csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def _markdown(ranking: Ranking, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The ranking as Markdown, of which the page is made."""
    numbers = [i for i, name in enumerate(head) if name not in ("name", "remarks")]
    cells = [[_cell(text) for text in row] for row in rows]
    conditions = ranking.conditions
    parts = [
        "# Ranking",
        f"On {conditions['device']}, {conditions['rounds']} rounds, {ranking.precision}. Medians; "
        f"the sum decides. {OURS} is what this package chooses itself.",
        markdown.table(head, cells, numbers),
    ]
    left = ranking.without()
    if left:
        rows = [[_cell(each.name), _cell(each.why_not or "not timed")] for each in left]
        parts += ["## Not ranked", markdown.table(["name", "why"], rows)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Text for a table's cell, as code where it could mean something."""
    plain = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
