"""`ece408 lab`: kernels of one's own, begun, checked and timed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ..backends import kernel_file
from ..bench import shapes
from ..errors import InvalidSetting, KernelCompileFailed, WrongResult
from ..files.cachedir import atomic_path
from ..files.resources import kernels_dir
from ..lab import check as checking
from ..lab import timing
from ..lab.check import Group, Verdict
from ..lab.timing import Timing
from ..problem import ConvProblem

# Of each form: the file that `new` writes, and what it is.
FORMS = {
    "cuda": ("start.cu", "CUDA kernels, whose launch a comment declares"),
    "course-2020": (
        "new-forward.cu",
        "the course's CUDA file from 2020 on: prolog, kernel, epilog",
    ),
    "course-2019": ("new-forward.cuh", "the course's CUDA file to 2019"),
    "cpu-2020": ("cpu-new-forward.cc", "the course's C++ file from 2020 on"),
    "cpu-2019": ("new-forward.h", "the course's C++ file to 2019"),
}
_BY_SUFFIX = {".cu": "cuda", ".cuh": "course-2019", ".cc": "cpu-2020", ".h": "cpu-2019"}
_MOST_FAILURES = 3
# What `time` takes unless it is told: layers of the default term.
_LAYERS = ("fa19_1", "fa19_2")
_BATCHES = (100, 1000)


def new(name: str, form: str | None) -> None:
    """Write a starting file of a form, or of the one that the name's ending suggests.

    Raises `InvalidSetting` for a name without a known ending, and for a file that is there, and
    `CacheUnwritable`.
    """
    path = Path(name)
    form = form or _BY_SUFFIX.get(path.suffix)
    if form is None:
        raise InvalidSetting(
            f"{name} should end in one of {', '.join(_BY_SUFFIX)}, or give --form "
            f"({', '.join(FORMS)})"
        )
    source = kernels_dir() / "files" / "starters" / FORMS[form][0]
    if not path.suffix:
        path = path.with_suffix(source.suffix)
    if path.suffix != source.suffix:
        raise InvalidSetting(f"{name} should end in {source.suffix}, as files of form {form} do")
    if path.exists():
        raise InvalidSetting(f"{path} is there already; choose another name, or remove it")
    with atomic_path(path) as temporary:
        temporary.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    milestone = "m2.1" if form.startswith("cpu") else "m3.1"
    print(f"{path}: {FORMS[form][1]}; right, and slow")
    print(f"next: ece408 lab check {path}; ece408 {milestone} 1000 --kernel {path}")


def check(
    names: Sequence[str], problems: Sequence[str], seed: int | None, output: Path | None
) -> None:
    """Check files and print a verdict on each; write them as JSON, too, if `output` is given.

    Raises `WrongResult` unless all are right.
    """
    files = [kernel_file.find(name) for name in names]
    parsed = [ConvProblem.parse(text) for text in problems]
    total = sum(len(group) for _, group in checking.groups(parsed, 0, "cpu"))
    verdicts = []
    for file in files:
        with tqdm(total=total, desc=file.name, unit="problem", leave=False, disable=None) as bar:
            verdicts.append(_check(file, parsed, seed, bar))
        print(_text(verdicts[-1]), flush=True)
    if output is not None:
        with atomic_path(output) as temporary:
            content = [dataclasses.asdict(each) for each in verdicts]
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = [each for each in verdicts if not each.is_right]
    if wrong:
        names = ", ".join(Path(each.file).name for each in wrong)
        raise WrongResult(f"{names}: not right; what is wrong stands above")


def time(
    names: Sequence[str],
    layers: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    output: Path | None,
) -> None:
    """Time files on layers, by names or problems, at each batch, and print a table for each; write
    every call as JSON, too, if `output` is given.

    Raises `InvalidSetting` for files that are not for the CPU, and `WrongResult` if one fails.
    """
    files = [kernel_file.find(name) for name in names]
    for file in files:
        if file.device != "cpu":
            raise InvalidSetting(
                f"{file.path}: lab time takes files for the CPU, .cc and .h, so far"
            )
    if rounds < 1 or any(batch < 1 for batch in batches):
        raise InvalidSetting("--rounds and --batch take numbers from 1 on")
    wanted = [
        (f"{layer}, {batch} images", shapes.find(layer, batch))
        for layer in layers or _LAYERS
        for batch in batches or _BATCHES
    ]
    calls = (rounds + 1) * len(wanted) * (len(files) + 1)
    with tqdm(total=calls, unit="call", leave=False, disable=None) as bar:
        found = timing.measure(files, wanted, rounds, bar.update)
    for layer, _ in wanted:
        print(_timings([each for each in found if each.layer == layer]))
    if output is not None:
        with atomic_path(output) as temporary:
            content = [{**dataclasses.asdict(e), "problem": str(e.problem)} for e in found]
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    failed = sorted({each.name for each in found if each.failure})
    if failed:
        raise WrongResult(f"{', '.join(failed)}: not timed; why stands above")


def _timings(found: Sequence[Timing]) -> str:
    """A layer's contenders, the fastest first."""
    ours = next(each for each in found if each.name == timing.OURS)
    floor = timing.cpu_ceilings().floor_ms(ours.problem)
    lines = [f"{ours.layer} ({ours.problem}), floor {floor:.2f} ms"]
    lines.append(f"  {'op time ms':>12} {'spread':>8} {'floor':>6} {'ours':>7}  kernel")
    timed = sorted((each for each in found if each.seconds), key=lambda each: each.median)
    for each in timed:
        spread = f"{each.spread:.1%}" + ("!" if each.spread > timing.STEADY else " ")
        share = floor / (1e3 * each.median)
        times = f"{each.median / ours.median:.2f}x" if ours.seconds else ""
        lines.append(
            f"  {1e3 * each.median:12.3f} {spread:>8} {share:>6.1%} {times:>7}  {each.name}"
        )
    lines += [f"  {each.name}: {each.failure}" for each in found if each.failure]
    return "\n".join(lines)


def _check(
    file: kernel_file.KernelFile, problems: Sequence[ConvProblem], seed: int | None, bar: tqdm
) -> Verdict:
    try:
        return checking.check(file, problems, seed, bar.update)
    except KernelCompileFailed as error:
        # Other files are checked all the same. The command that failed helps nobody here.
        return Verdict(str(file.path), broken=str(error).rpartition(" (exit code ")[0])


def _text(verdict: Verdict) -> str:
    lines = [verdict.file]
    for group in verdict.groups:
        lines += _group(verdict, group)
    if verdict.error:
        lines.append(f"  real numbers: relative error {verdict.error:.1e} at most (L2)")
    lines += [f"  not prevented on this machine: {each}" for each in verdict.lacking]
    if verdict.broken:
        lines.append(f"  stopped: {verdict.broken}")
    if verdict.is_right:
        lines.append("  verdict: right")
    elif verdict.is_right_for_the_course and verdict.groups:
        lines.append("  verdict: right on the course's layers, wrong on other sizes")
    else:
        lines.append("  verdict: wrong")
    return "\n".join(lines)


def _group(verdict: Verdict, group: Group) -> list[str]:
    checked = group.right + len(group.failures)
    refused = ""
    if group.refused:
        reason = group.refused[0].split(": ")[-1].split("; ")[0]
        refused = f", {len(group.refused)} refused ({reason})"
    lines = [f"  {group.name}: {group.right} of {checked} right{refused}"]
    for failure in group.failures[:_MOST_FAILURES]:
        lines.append(f"    {failure.problem}: {failure.text}")
        if failure.first:
            lines.append(f"      first: {failure.first}")
        again = f"ece408 lab check {verdict.file} --problem {failure.problem} --seed {failure.seed}"
        lines.append(f"      again: {again}")
    more = len(group.failures) - _MOST_FAILURES
    if more > 0:
        lines.append(f"    and {more} more")
    return lines
