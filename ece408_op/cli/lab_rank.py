"""`ece408 lab rank`: ranking of a class's kernel files, as tables, a CSV file and a page."""

from __future__ import annotations

import argparse
import csv
import io
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import date

from tqdm import tqdm

from .. import settings
from ..backends.cuda.runtime import device
from ..backends.kernel_file import KernelFile
from ..errors import InvalidSetting
from ..files import markdown
from ..files.cachedir import write_text
from ..lab import ranking as ranks
from ..lab.ranking import Entry, Ranking
from ..lab.timing import OURS, STEADY, device_of
from ..operator.environment import cpu_model
from ..problem import check_precision
from ..report import page
from .colour import plain
from .lab import own_layers, selected_layers

_DEVICES = {"cpu": "the CPU", "cuda": "GPUs"}
_LAYERS_ONLY = "right on these layers only"


def rank(options: argparse.Namespace) -> None:
    """Rank the files on layers, or on those of a term; print a table, and write ranking.json,
    ranking.csv and ranking.html to a folder. Existing results of unchanged files are kept, unless
    `again`.

    Raises `InvalidSetting` for invalid paths and numbers, and for files of two devices,
    `UnknownModel` for an unknown term, and `NoUsableGpu`.
    """
    if options.layer and options.term:
        raise InvalidSetting(f"--term {options.term} has layers of its own; leave --layer out")
    files = ranks.find(options.paths)
    kernels = [file for file in files.values() if not isinstance(file, str)]
    if not kernels:
        raise InvalidSetting(f"no kernel file in {', '.join(map(str, options.paths))}")
    if options.jobs is not None and options.jobs < 1:
        raise InvalidSetting("--jobs takes numbers from 1 on")
    kind, rounds, folder = _most(files), options.repeat, options.output
    layers = options.layer or own_layers(kernels, options.term)
    wanted = selected_layers(kind, layers, options.batch_size or (1000,), rounds)
    conditions = {
        "device": device.get(settings.devices()[0]).name if kind == "cuda" else cpu_model(),
        "layers": {layer: str(problem) for layer, problem in wanted},
        "rounds": rounds,
        "precision": check_precision(options.precision),
    }
    kept = folder / "ranking.json"
    ranking = ranks.load(kept, conditions)
    if options.again:
        ranks.again(ranking)
    with tqdm(leave=False, disable=None) as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.desc, bar.n, bar.total = what, done, total
            bar.refresh()

        ranks.rank(
            files,
            ranking,
            wanted,
            rounds,
            options.jobs or max(1, settings.threads() // 2),
            lambda: ranks.save(ranking, kept),
            show,
        )
    ranks.save(ranking, kept)
    head, rows = _table(ranking)
    write_text(folder / "ranking.csv", _csv(head, [*rows, *_left(ranking, head)]))
    written = ["ranking.json", "ranking.csv"]
    print(plain(_terminal(head, rows)))
    for each in ranking.without():
        print(plain(f"not ranked: {each.name}: {each.why_not or 'not timed'}"))
    text = _markdown(ranking, head, rows)
    try:
        write_text(folder / "ranking.html", page.render(text, "Ranking", folder))
        written.append("ranking.html")
    except InvalidSetting as error:
        # The other files do not need it.
        print(f"no {folder / 'ranking.html'}: {error}")
    print(f"{folder}: {', '.join(written)}")


def _most(files: dict[str, KernelFile | str]) -> str:
    """Return the device of the majority of files; the others' entries say why they are not ranked.
    Raises `InvalidSetting` for a tie."""
    kernels = {name: file for name, file in files.items() if isinstance(file, KernelFile)}
    counts = Counter(file.device for file in kernels.values())
    (kind, count), *others = counts.most_common()
    if others and others[0][1] == count:
        device_of(list(kernels.values()))
    for name, file in kernels.items():
        if file.device != kind:
            own, most = _DEVICES[file.device], _DEVICES[kind]
            files[name] = f"it is for {own}, and most files are for {most}"
    return kind


def _table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: rank, name, op times, sum, over our best, over last time, remarks."""
    layers = ranking.layers
    head = ["rank", "name", *(f"{layer}, ms" for layer in layers), "sum, ms", "ours", "before"]
    head += ["around, ms", "remarks"]
    rows = []
    place = 0
    for entry in ranking.in_order():
        place += entry.name != OURS
        total, multiple = ranking.sum(entry) or 0.0, ranking.multiple(entry)
        rows.append(
            [
                "" if entry.name == OURS else str(place),
                entry.name,
                *(f"{1e3 * ranking.seconds(entry, layer):.3f}" for layer in layers),
                f"{1e3 * total:.3f}",
                f"{multiple:.2f}x" if multiple else "",
                f"{multiple / entry.before:.2f}x" if multiple and entry.before else "",
                _around(entry, layers),
                "; ".join(_remarks(entry, ranking)),
            ]
        )
    return head, rows


def _left(ranking: Ranking, head: Sequence[str]) -> list[list[str]]:
    """Return the rows of the files that are not ranked."""
    cells = {"name": "{0.name}", "remarks": "not ranked: {1}"}
    return [
        [cells.get(column, "").format(each, each.why_not or "not timed") for column in head]
        for each in ranking.without()
    ]


def _around(entry: Entry, layers: Sequence[str]) -> str:
    found = [entry.around[layer] for layer in layers if entry.around.get(layer)]
    return f"{1e3 * sum(map(statistics.median, found)):.1f}" if found else ""


def _remarks(entry: Entry, ranking: Ranking) -> list[str]:
    remarks = [_LAYERS_ONLY] if entry.layers_only and entry.name != OURS else []
    if entry.timed != ranking.entries[OURS].timed:
        remarks.append(f"timed in an earlier run, {entry.timed}")
    spread = max(entry.timing(layer).spread for layer in ranking.layers)
    if spread > STEADY:
        remarks.append(f"spread {spread:.0%}")
    return [*remarks, entry.note] if entry.note else remarks


def _terminal(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table without empty columns."""
    columns = [column for column in zip(head, *rows) if any(column[1:])]
    words = [i for i, column in enumerate(columns) if column[0] in ("name", "remarks")]
    return "\n".join(markdown.aligned(list(zip(*columns)), words))


def _csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    cells = [[_harmless(each) for each in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows([head, *cells])
    return text.getvalue()


def _harmless(text: str) -> str:
    """Escape a cell that a spreadsheet would treat as a formula."""
    text = plain(text)
    return f"'{text}" if text.startswith(tuple("=+-@\t")) else text


def _markdown(ranking: Ranking, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the ranking as Markdown, the source of the page."""
    numbers = [i for i, name in enumerate(head) if name not in ("name", "remarks")]
    cells = [[_cell(text) for text in row] for row in rows]
    conditions = ranking.conditions
    parts = [
        "# Ranking",
        f"On {conditions['device']}, {date.today()}, {conditions['rounds']} rounds, "
        f"{ranking.precision}. Medians; the sum decides. {OURS} is what this package chooses "
        "itself; it is timed in every run, and runs are compared by it.",
        markdown.table(head, cells, numbers),
    ]
    left = ranking.without()
    if left:
        rows = [[_cell(each.name), _cell(each.why_not or "not timed")] for each in left]
        parts += ["## Not ranked", markdown.table(["name", "why"], rows)]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Return text for a table's cell, as code if it has special characters."""
    line = " ".join(plain(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{line}`" if line else ""
