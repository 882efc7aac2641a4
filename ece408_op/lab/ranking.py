"""Ranking of many kernel files: checked, timed under the same conditions, and sorted.

Results are saved to a file after each step, so an interrupted ranking can resume.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..backends import kernel_file
from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error, InvalidSetting, NoUsableGpu
from ..files.cachedir import write_text
from ..files.records import to_json
from ..problem import ConvProblem
from . import check as checking
from . import ranking_workers
from .check import Verdict
from .ranking_workers import Timings
from .session import OF_GPU_MEMORY
from .timing import OURS, Timing, device_of

# Files of the course's projects that contain no kernel.
_NO_KERNELS = ("gpu-new-forward.h", "cpu-new-forward.h", "new-forward.h.in")


@dataclass
class Entry:
    """A file's results. `key` is a checksum of its content; `wrong` says why it is not timed,
    `failure` why its timing failed.

    `seconds` and `around` hold all counted calls by layer, `ours` those of our own choice in the
    same rounds, `rounds` their number; `timed` is the start of the last run. `before` is the sum in
    an earlier ranking, as a multiple of ours.
    """

    name: str
    key: str
    checked: bool = False
    wrong: str = ""
    failure: str = ""
    layers_only: bool = False
    rounds: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    around: dict[str, list[float]] = field(default_factory=dict)
    ours: dict[str, list[float]] = field(default_factory=dict)
    timed: str = ""
    note: str = ""
    before: float | None = None

    @property
    def why_not(self) -> str:
        """Return why it has no rank, or an empty string."""
        return self.wrong or self.failure

    def timing(self, layer: str) -> Timing:
        seconds, around = self.seconds.get(layer, []), self.around.get(layer, [])
        return Timing(self.name, layer, ConvProblem(1, 1, 1, 1, 1, (1, 1)), seconds, around)


@dataclass
class Ranking:
    """Entries by name, including our own choice, and the conditions of measurement."""

    conditions: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        return list(self.conditions["layers"])

    @property
    def precision(self) -> str:
        """The required precision of kernels."""
        return str(self.conditions.get("precision", "float32"))

    def seconds(self, entry: Entry, layer: str) -> float:
        """Return an entry's median call. Runs differ, so this is the ratio to ours in the same
        rounds, times the median of ours in all rounds."""
        ours = self.entries[OURS].timing(layer).median
        return entry.timing(layer).median / statistics.median(entry.ours[layer]) * ours

    def sum(self, entry: Entry) -> float | None:
        """Return the sum of all layers' median calls, or `None` if one is missing."""
        if entry.why_not or not all(entry.seconds.get(layer) for layer in self.layers):
            return None
        return sum(self.seconds(entry, layer) for layer in self.layers)

    def multiple(self, entry: Entry) -> float | None:
        """Return an entry's sum as a multiple of ours, if both exist."""
        own, ours = self.sum(entry), self.sum(self.entries[OURS])
        return own / ours if own and ours else None

    def in_order(self) -> list[Entry]:
        """Return the entries with a rank, fastest first."""
        timed = [each for each in self.entries.values() if self.sum(each) is not None]
        return sorted(timed, key=lambda each: self.sum(each) or 0.0)

    def without(self) -> list[Entry]:
        """Return the entries without a rank, by name."""
        left = [each for each in self.entries.values() if self.sum(each) is None]
        return sorted(left, key=lambda each: each.name)


def find(paths: Sequence[Path]) -> dict[str, KernelFile | str]:
    """Return kernel files, including those in folders, by their paths relative to the common
    folder; for an invalid file, the reason. Raises `InvalidSetting` for a missing path."""
    found: dict[str, KernelFile | str] = {}
    for path in paths:
        if not path.exists():
            raise InvalidSetting(f"{path} is not there; give kernel files, or folders of them")
    folders = [str((path if path.is_dir() else path.parent).absolute()) for path in paths]
    above = os.path.commonpath(folders) if folders else ""
    for path in paths:
        is_folder = path.is_dir()
        inside = [each for each in path.rglob("*") if not each.is_dir()] if is_folder else [path]
        for each in sorted(inside):
            if kernel_file.device_of(each.name) is None or each.name in _NO_KERNELS:
                continue
            name = os.path.relpath(each.absolute(), above)
            try:
                found[name] = kernel_file.find(str(each))
            except InvalidSetting as error:
                # Headers are only included.
                if not is_folder or each.suffix in (".cu", ".cc", ".cpp", ".cxx"):
                    found[name] = str(error)
    return found


def load(path: Path, conditions: dict[str, Any]) -> Ranking:
    """Return the ranking that `rank` has saved in a file, or a new one. Raises `InvalidSetting` for
    other conditions or an invalid file."""
    if not path.is_file():
        return Ranking(conditions)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [Entry(**{**each, "ours": each["ours"]}) for each in content["entries"]]
        kept = content["conditions"]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidSetting(f"{path} is no ranking ({error}); remove it") from error
    if {**kept, "rounds": 0} != {**conditions, "rounds": 0}:
        changed = [name for name in conditions if kept.get(name) != conditions[name]]
        raise InvalidSetting(
            f"{path} was measured with another {', '.join(changed)}; give the same, or another "
            "folder by --output"
        )
    return Ranking(conditions, {each.name: each for each in entries})


def save(ranking: Ranking, path: Path) -> None:
    entries = [dataclasses.asdict(each) for each in ranking.entries.values()]
    content = to_json({"conditions": ranking.conditions, "entries": entries})
    write_text(path, content)


def rank(
    files: dict[str, KernelFile | str],
    ranking: Ranking,
    layers: Sequence[tuple[str, ConvProblem]],
    rounds: int,
    jobs: int,
    keep: Callable[[], object],
    progress: Callable[[str, int, int], object],
    problems: Sequence[ConvProblem] = (),
) -> None:
    """Update the ranking: check files that are new or changed, `jobs` at a time, on these problems
    or on the layers and odd ones; time the right ones on the layers until each has its rounds.

    `keep` is called after each step, `progress` with the step, the completed count and the total.
    Raises `NoUsableGpu` and what our own kernels raise.
    """
    _enter(files, ranking)
    kernels = {name: file for name, file in files.items() if isinstance(file, KernelFile)}
    new = [name for name in kernels if not ranking.entries[name].checked]
    checked = functools.partial(
        verdict_on,
        problems=problems,
        layers=[problem for _, problem in layers],
        precision=ranking.precision,
    )
    verdicts = _checked({name: kernels[name] for name in new}, checked, jobs)
    for done, (name, verdict) in enumerate(verdicts, 1):
        progress("checking", min(done, len(new)), len(new))
        _note_verdict(ranking.entries[name], verdict)
        keep()
    _time(kernels, ranking, layers, rounds, keep, progress)


def _enter(files: dict[str, KernelFile | str], ranking: Ranking) -> None:
    """Create entries for new and changed files; remove those of missing files."""
    kept = ranking.entries
    kept.setdefault(OURS, Entry(OURS, "", checked=True))
    entries = {OURS: kept[OURS]}
    for name, file in files.items():
        key = file.key if isinstance(file, KernelFile) else ""
        last = kept.get(name)
        if last is None or last.key != key:
            before = ranking.multiple(last) if last is not None else None
            last = Entry(name, key, before=before)
        if isinstance(file, str):
            last.checked, last.wrong = True, file
        entries[name] = last
    ranking.entries = entries


def again(ranking: Ranking) -> None:
    """Discard all times; keep each sum as the earlier one."""
    before = {name: ranking.multiple(each) for name, each in ranking.entries.items()}
    for name, each in ranking.entries.items():
        each.before = before[name]
        each.seconds, each.around, each.ours, each.rounds, each.failure = {}, {}, {}, 0, ""


def _checked(
    files: dict[str, KernelFile], checked: Callable[[KernelFile], Verdict], jobs: int
) -> Iterator[tuple[str, Verdict]]:
    """Yield verdicts on files, by name, as they complete.

    If a file uses up the GPU's memory, files that failed may have lacked memory, and are checked
    again, one at a time. If a checking process ends, its waiting files are checked again, too; a
    file that ends it a second time is wrong.
    """
    doubted: dict[str, Verdict | None] = {}
    with ranking_workers.pool(jobs) as pool:
        waiting = {name: pool.submit(checked, file) for name, file in files.items()}
        for name, future in waiting.items():
            try:
                verdict = future.result()
            except (NoUsableGpu, BrokenProcessPool):
                doubted[name] = None
                continue
            if not verdict.is_right:
                doubted[name] = verdict
            yield name, verdict
    took_memory = any(each is not None and each.says(OF_GPU_MEMORY) for each in doubted.values())
    for name, found in doubted.items():
        if found is None or (took_memory and not found.says(OF_GPU_MEMORY)):
            yield name, _checked_alone(files[name], checked)


def _checked_alone(file: KernelFile, checked: Callable[[KernelFile], Verdict]) -> Verdict:
    with ranking_workers.pool(1) as pool:
        try:
            return pool.submit(checked, file).result()
        except BrokenProcessPool:
            return Verdict(str(file.path), broken="ends the process that checks it")


def verdict_on(
    file: KernelFile,
    problems: Sequence[ConvProblem],
    layers: Sequence[ConvProblem],
    precision: str,
) -> Verdict:
    """As `check.check`, and for a file that does not run at all, the reason."""
    try:
        own = list(dict.fromkeys(layers))
        return checking.check(file, problems, layers=own, precision=precision)
    except NoUsableGpu:
        raise
    except Ece408Error as error:
        return Verdict(str(file.path), broken=kernel_file.reason(error))


def _note_verdict(entry: Entry, verdict: Verdict) -> None:
    entry.checked, entry.wrong = True, ""
    entry.layers_only = bool(verdict.elsewhere)
    if verdict.is_right:
        return
    failures = [each for group in verdict.groups if not group.told for each in group.failures]
    entry.wrong = verdict.broken or "it refuses the layers"
    if failures:
        entry.wrong = f"{failures[0].problem}: {failures[0].text}"
    if verdict.allowed_by:
        entry.wrong = f"right with --precision {verdict.allowed_by} only"


def _time(
    kernels: dict[str, KernelFile],
    ranking: Ranking,
    layers: Sequence[tuple[str, ConvProblem]],
    rounds: int,
    keep: Callable[[], object],
    progress: Callable[[str, int, int], object],
) -> None:
    """Time rounds until each entry has its number."""
    entries = ranking.entries
    begin = datetime.now().isoformat(" ", "minutes")
    while True:
        behind = [name for name in kernels if not entries[name].why_not]
        has = {entries[name].rounds for name in behind if entries[name].rounds < rounds}
        if not has:
            return
        # Entries with the fewest rounds run together until they have as many as the next ones.
        least = min(has)
        until = min([rounds, *(has - {least})])
        who: dict[KernelFile | str, Entry] = {
            kernels[name]: entries[name] for name in behind if entries[name].rounds == least
        }
        turns = ranking_workers.Turns(list(who), layers, until - least, ranking.precision)
        who[device_of(list(who))] = entries[OURS]
        for timings in turns.rounds(progress):
            _take_over(timings, who, begin)
            keep()


def _take_over(timings: Timings, who: dict[KernelFile | str, Entry], begin: str) -> None:
    """Add the results of a round to the entries; the run started at `begin`."""
    measured: dict[int, Entry] = {}
    ours = {timing.layer: timing.seconds for timing in timings.values() if timing.name == OURS}
    for (contender, layer), timing in timings.items():
        entry = who[contender]
        entry.timed = begin
        measured[id(entry)] = entry
        entry.seconds.setdefault(layer, []).extend(timing.seconds)
        entry.ours.setdefault(layer, []).extend(ours[layer])
        entry.around.setdefault(layer, []).extend(timing.around)
        entry.note = timing.note or entry.note
        if timing.failure:
            entry.failure = f"while it was timed on {layer}: {timing.failure}"
    for entry in measured.values():
        entry.rounds += 1
    ranking_workers.clear(timings)
