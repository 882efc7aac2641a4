"""Many kernel files, checked, timed under the same conditions, and put in order.

What is done is kept in a file after each step, so that a ranking goes on where it was stopped.
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
from ..files.cachedir import atomic_path
from ..files.records import to_json
from ..problem import ConvProblem
from . import check as checking
from . import ranking_workers
from .check import Verdict
from .ranking_workers import Timings
from .session import OF_GPU_MEMORY
from .timing import OURS, Timing, device_of

# What comes with the course's files, and is none.
_NO_KERNELS = ("gpu-new-forward.h", "cpu-new-forward.h", "new-forward.h.in")


@dataclass
class Entry:
    """A file's standing. `key` is of its content; `wrong` says why it is not timed, `failure` what
    went wrong while it was.

    `seconds` and `around` are those of all counted calls, by layer, `ours` those of our own choice
    in the same rounds, and `rounds` how many there were; `timed` is when the last run began.
    `before` is the sum of an earlier ranking, as a multiple of ours.
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
        """Why it has no rank, if there is a reason."""
        return self.wrong or self.failure

    def timing(self, layer: str) -> Timing:
        seconds, around = self.seconds.get(layer, []), self.around.get(layer, [])
        return Timing(self.name, layer, ConvProblem(1, 1, 1, 1, 1, (1, 1)), seconds, around)


@dataclass
class Ranking:
    """Entries by name, our own choice among them, and what they were measured on."""

    conditions: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        return list(self.conditions["layers"])

    @property
    def precision(self) -> str:
        """How exact kernels must be."""
        return str(self.conditions.get("precision", "float32"))

    def seconds(self, entry: Entry, layer: str) -> float:
        """An entry's median call. Runs differ, so it is the multiple of ours in the same rounds,
        times the median of ours in all."""
        ours = self.entries[OURS].timing(layer).median
        return entry.timing(layer).median / statistics.median(entry.ours[layer]) * ours

    def sum(self, entry: Entry) -> float | None:
        """Seconds of all layers' median calls, or `None` without all of them."""
        if entry.why_not or not all(entry.seconds.get(layer) for layer in self.layers):
            return None
        return sum(self.seconds(entry, layer) for layer in self.layers)

    def multiple(self, entry: Entry) -> float | None:
        """An entry's sum as a multiple of ours, if both have one."""
        own, ours = self.sum(entry), self.sum(self.entries[OURS])
        return own / ours if own and ours else None

    def in_order(self) -> list[Entry]:
        """Those that have a rank, the fastest first."""
        timed = [each for each in self.entries.values() if self.sum(each) is not None]
        return sorted(timed, key=lambda each: self.sum(each) or 0.0)

    def without(self) -> list[Entry]:
        """Those that have none, by name."""
        left = [each for each in self.entries.values() if self.sum(each) is None]
        return sorted(left, key=lambda each: each.name)


def find(paths: Sequence[Path]) -> dict[str, KernelFile | str]:
    """Kernel files, and those in folders, by their paths from the folder that has them all; for a
    file that is none, why. Raises `InvalidSetting` for a path that is not there."""
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
                # Headers are there to be included.
                if not is_folder or each.suffix in (".cu", ".cc", ".cpp", ".cxx"):
                    found[name] = str(error)
    return found


def load(path: Path, conditions: dict[str, Any]) -> Ranking:
    """The ranking that `rank` has kept in a file, or a new one. Raises `InvalidSetting` if it is
    of other conditions, or no ranking."""
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
    with atomic_path(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


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
    """Bring the ranking up to the files: check those that are new or changed, `jobs` at a time, on
    these problems or on the layers and odd ones, and time those that are right on the layers until
    each has its rounds.

    `keep` is called after each step, `progress` with what is done, how much of it, and of how much.
    Raises `NoUsableGpu` and what our own kernels raise.
    """
    _enter(files, ranking)
    kernels = {name: file for name, file in files.items() if isinstance(file, KernelFile)}
    new = [name for name in kernels if not ranking.entries[name].checked]
    asked = functools.partial(
        verdict_on,
        problems=problems,
        layers=[problem for _, problem in layers],
        precision=ranking.precision,
    )
    verdicts = _checked({name: kernels[name] for name in new}, asked, jobs)
    for done, (name, verdict) in enumerate(verdicts, 1):
        progress("checking", min(done, len(new)), len(new))
        _note_verdict(ranking.entries[name], verdict)
        keep()
    _time(kernels, ranking, layers, rounds, keep, progress)


def _enter(files: dict[str, KernelFile | str], ranking: Ranking) -> None:
    """Have an entry for each file, new where its content is; others leave."""
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
    """Have all be timed anew; what they have is what was before."""
    before = {name: ranking.multiple(each) for name, each in ranking.entries.items()}
    for name, each in ranking.entries.items():
        each.before = before[name]
        each.seconds, each.around, each.ours, each.rounds, each.failure = {}, {}, {}, 0, ""


def _checked(
    files: dict[str, KernelFile], asked: Callable[[KernelFile], Verdict], jobs: int
) -> Iterator[tuple[str, Verdict]]:
    """Verdicts on files, by name, as they come.

    After a file that takes the GPU's memory those that were not right may have failed for want of
    it, and are checked again, one at a time; so are those that wait while a process that checks
    ends, and a file with which it ends once more is wrong.
    """
    doubted: dict[str, Verdict | None] = {}
    with ranking_workers.pool(jobs) as pool:
        waiting = {name: pool.submit(asked, file) for name, file in files.items()}
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
            yield name, _checked_alone(files[name], asked)


def _checked_alone(file: KernelFile, asked: Callable[[KernelFile], Verdict]) -> Verdict:
    with ranking_workers.pool(1) as pool:
        try:
            return pool.submit(asked, file).result()
        except BrokenProcessPool:
            return Verdict(str(file.path), broken="ends the process that checks it")


def verdict_on(
    file: KernelFile,
    problems: Sequence[ConvProblem],
    layers: Sequence[ConvProblem],
    precision: str,
) -> Verdict:
    """As `check.check`, and, for a file that does not run at all, why."""
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
    """Rounds until each entry has its number."""
    entries = ranking.entries
    begin = datetime.now().isoformat(" ", "minutes")
    while True:
        behind = [name for name in kernels if not entries[name].why_not]
        has = {entries[name].rounds for name in behind if entries[name].rounds < rounds}
        if not has:
            return
        # Those that have as many take part together, until they have as many as the next ones.
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
    """Move what a round of a run that began then has measured to the entries."""
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
