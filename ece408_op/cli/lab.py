"""`ece408 lab`: users' own kernels: templates, checks and timing."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from .. import dispatch, errors
from ..backends import kernel_file
from ..backends.cuda.kernels import catalog
from ..backends.emulator.library import Emulation
from ..bench import shapes
from ..bench.peers import cudnn
from ..errors import (
    Ece408Error,
    InvalidSetting,
    KernelCompileFailed,
    KernelNotSupported,
    WrongResult,
)
from ..files import markdown
from ..files.cachedir import write_text
from ..files.resources import kernels_dir
from ..lab import check as checking
from ..lab import counting, explanation, ranking, sanitizer, timing
from ..lab.check import Group, Verdict
from ..lab.explanation import Explanation
from ..lab.sanitizer import Sanitized
from ..lab.session import Ended
from ..lab.timing import Timing
from ..problem import ConvProblem, check_precision
from ..profile import kernel_limits, occupancy
from . import lab_counts
from .colour import paint, plain

# For each form: the template for `new`, and its description.
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
_MOST_FAILURES, _COLUMNS = 3, 100
# Terms whose layers are the default for timing: for the form since 2020, and for others.
_LATER, _TERM = shapes.LAST, "2019fa"
_EXPLAINED_BATCH = 1000
_BATCHES = {"cpu": (100, 1000), "cuda": (100, 1000, 10000), "emulator": (2,)}


def new(options: argparse.Namespace) -> None:
    """Write a template of a form, or of the form suggested by the name's suffix.

    Raises `InvalidSetting` for a name without a known suffix and for an existing file, and
    `CacheUnwritable`.
    """
    name, path = options.name, Path(options.name)
    form = options.form or _BY_SUFFIX.get(path.suffix)
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
    write_text(path, source.read_text(encoding="utf-8"))
    milestone = "m2.1" if form.startswith("cpu") else "m3.1"
    print(f"{path}: {FORMS[form][1]}; right, and slow")
    print(f"next: ece408 lab check {path}; ece408 {milestone} 1000 --kernel {path}")


def check(options: argparse.Namespace) -> None:
    """Check files and print a verdict on each; also write them as JSON if `output` is given. With
    `sanitize` CUDA files also run under compute-sanitizer. With `emulate`, and without a GPU, CUDA
    files run on the CPU. If a term is named, its layers decide.

    Raises `WrongResult` unless all are right, `UnknownModel` for an unknown term, `InvalidSetting`
    for a file that cannot be sanitized, and `ProfilerMissing` without compute-sanitizer.
    """
    files = list(itertools.chain.from_iterable(map(_files, options.files)))
    options.precision = check_precision(options.precision)
    if options.term:
        shapes.of_term(options.term)
    if options.sanitize:
        for file in files:
            if file.device == "cpu":
                raise InvalidSetting(f"--sanitize takes CUDA files, and {file.name} is for the CPU")
        sanitizer.find()
    emulation = _emulation(options)
    if emulation is None and not options.sanitize and _must_emulate(files):
        emulation = Emulation()
    parsed = [ConvProblem.parse(text) for text in options.problem]
    verdicts = []
    for file in files:
        selected = checking.groups(file.form, parsed, 0, "cpu", term=options.term)
        total = sum(len(own) for _, own in selected)
        shown = {"desc": plain(file.name), "unit": "problem", "leave": False, "disable": None}
        with tqdm(total=total, **shown) as bar:
            own = emulation if file.device == "cuda" else None
            verdicts.append(_check(file, parsed, bar, own, options))
        if options.sanitize and verdicts[-1].groups:
            bar = tqdm(total=len(sanitizer.TOOLS), desc="sanitizing", leave=False, disable=None)
            with bar:
                verdicts[-1].sanitized = sanitizer.sanitize(file, parsed, bar.update)
        print(_text(verdicts[-1]), flush=True)
    _write(options.output, [dataclasses.asdict(each) for each in verdicts])
    unchecked = [each for each in verdicts if each.by_machine]
    wrong = [each for each in verdicts if not each.is_right and not each.by_machine]
    if wrong:
        names = ", ".join(Path(each.file).name for each in wrong)
        raise WrongResult(f"{names}: not right; the errors are listed above")
    if unchecked:
        names = ", ".join(Path(each.file).name for each in unchecked)
        kind = getattr(errors, unchecked[0].by_machine)
        raise kind(f"{names}: cannot be tried here; {unchecked[0].broken}")


def _emulation(options: argparse.Namespace) -> Emulation | None:
    """Return the emulation that the options request, if any."""
    is_random = options.order == "random"
    if not (options.emulate or options.fast or is_random):
        return None
    # For a random order, `check` sets the seed for each problem.
    return Emulation("fast" if options.fast else "checked", seed=0 if is_random else None)


def _write(output: Path | None, content: object) -> None:
    """Write JSON, if an output is named."""
    if output is not None:
        write_text(output, json.dumps(content, indent=1) + "\n")


def time(options: argparse.Namespace) -> None:
    """Time files, and CUDA kernels of this package by name, on layers, given by name or as
    problems, at each batch size; print a table for each, and also write every call as JSON if
    `output` is given. With `peer_python`, a Python that has PyTorch, cuDNN is timed, too; with
    `explains`, the limits of CUDA kernels follow. With `emulate`, and without a GPU, the emulator
    counts the work of CUDA kernels instead, with their occupancy on the architecture `arch`.

    Raises `InvalidSetting` for an unknown kernel and for kernels of two devices, and `WrongResult`
    if one fails.
    """
    contenders = [_contender(name) for name in options.files]
    options.precision = check_precision(options.precision)
    kind, rounds = timing.device_of(contenders), options.repeat
    layers = options.layer or own_layers(contenders)
    if kind == "cuda" and (options.emulate or dispatch.backend_of_cuda_files() == "emulator"):
        wanted = selected_layers("emulator", layers, options.batch_size, rounds)
        _count(contenders, wanted, options.arch, options.output)
        return
    wanted = selected_layers(kind, layers, options.batch_size, rounds)
    turns = (rounds + 1) * len(wanted) * (len(contenders) + 1)
    with tqdm(total=turns, unit="turn", leave=False, disable=None) as bar:
        found = timing.measure(contenders, wanted, rounds, bar.update, options.precision)
    peers = _cudnn(wanted, rounds, options.peer_python) if options.peer_python else {}
    for layer, _ in wanted:
        own = [each for each in found if each.layer == layer]
        print(plain(_timings(kind, own, peers.get(layer, {}))))
    if options.explains and kind == "cuda":
        _explain(contenders, wanted, found)
    _write(options.output, [{**dataclasses.asdict(e), "problem": str(e.problem)} for e in found])
    failed = sorted({each.name for each in found if each.failure})
    if failed:
        raise WrongResult(f"{', '.join(failed)}: not timed; the reason is above")


def _count(
    contenders: Sequence[kernel_file.KernelFile | str],
    wanted: Sequence[tuple[str, ConvProblem]],
    architecture: str,
    output: Path | None,
) -> None:
    """Print the counts of each contender's warps on each layer; also write them as JSON if `output`
    is given. Raises `InvalidSetting` for an unknown architecture, and `WrongResult` if a contender
    does not run."""
    if architecture not in occupancy.KNOWN:
        known = ", ".join(occupancy.KNOWN)
        raise InvalidSetting(
            f"unknown architecture {architecture!r} (--arch); choose one of {known}"
        )
    names = timing.names(contenders)
    selected = [(layer, problem, each) for layer, problem in wanted for each in contenders]
    rows, failed = [], set()
    for layer, problem, each in tqdm(selected, desc="counting", leave=False, disable=None):
        try:
            found = counting.count(each, problem, architecture)
        except (Ended, Ece408Error) as error:
            said = _named(kernel_file.reason(error), _source_of(each))
            tqdm.write(_wrapped(f"{names[each]}, {layer}: {said}"), sys.stdout)
            failed.add(names[each])
            continue
        source = _source_of(each)
        tqdm.write(lab_counts.text(names[each], layer, found, source, architecture), sys.stdout)
        content = dataclasses.asdict(found)
        rows.append({"name": names[each], "layer": layer, "problem": str(problem), **content})
    _write(output, rows)
    if failed:
        raise WrongResult(f"{', '.join(sorted(failed))}: not counted; the reason is above")


def _source_of(kernel: kernel_file.KernelFile | str) -> Path:
    if isinstance(kernel, kernel_file.KernelFile):
        return kernel.path
    return kernels_dir() / "cuda" / catalog.get(kernel).source


def _explain(
    contenders: Sequence[kernel_file.KernelFile | str],
    wanted: Sequence[tuple[str, ConvProblem]],
    found: Sequence[Timing],
) -> None:
    """Print the limiting factor of each timed contender, on each layer at one batch size."""
    failed = {each.name for each in found if each.failure}
    names = timing.names(contenders)
    selected = [
        (layer, problem, each)
        for layer, problem in _at_one_batch(wanted)
        for each in contenders
        if names[each] not in failed
    ]
    for layer, problem, each in tqdm(selected, desc="explaining", leave=False, disable=None):
        text = _explanation(names[each], layer, explanation.explain(each, problem))
        tqdm.write(text, sys.stdout)


def _at_one_batch(wanted: Sequence[tuple[str, ConvProblem]]) -> list[tuple[str, ConvProblem]]:
    """Return for each layer the largest batch of up to 1000 images, or else the smallest one."""
    found: dict[ConvProblem, tuple[str, ConvProblem]] = {}
    for layer, problem in sorted(wanted, key=lambda each: each[1].batch):
        one = dataclasses.replace(problem, batch=1)
        if one not in found or problem.batch <= _EXPLAINED_BATCH:
            found[one] = (layer, problem)
    return list(found.values())


def _explanation(name: str, layer: str, found: Explanation) -> str:
    """Return a contender's limiting factor, its functions' counters, and the compiler's
    resources."""
    lines = [f"{name}, {layer}: " + (f"limited by {found.sentence}" if found.sentence else "")]
    if found.failure:
        lines[0] = f"{name}, {layer}: {found.sentence or 'what limits it is not known'}"
        lines.append(f"  {found.failure}")
    rows = [{**kernel_limits.columns(each), "function": each.name} for each in found.kernels]
    if rows:
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        lines += [f"  {line}" for line in markdown.aligned(cells, (len(rows[0]) - 1,))]
    ran = {explanation.plain_name(each.name) for each in found.kernels}
    for function, each in found.resources.items():
        if not ran or explanation.plain_name(function) in ran:
            lines.append(
                f"  {function}: {each.registers} registers a thread, {each.spilled_bytes} bytes of "
                f"spilled ones; {each.shared_bytes} bytes of static shared memory a block"
            )
    return "\n".join(lines)


def own_layers(contenders: Iterable[kernel_file.KernelFile | str], term: str = "") -> list[str]:
    """Return the names of a term's layers, by default of a term whose files have this form."""
    forms = {getattr(each, "form", "declared") for each in contenders}
    return list(shapes.of_term(term or (_LATER if forms == {"course_2020"} else _TERM)))


def selected_layers(
    kind: str, layers: Sequence[str], batches: Sequence[int], rounds: int
) -> list[tuple[str, ConvProblem]]:
    """Return each layer's name and problem at each batch size, by default the device's usual ones.
    Raises `InvalidSetting`."""
    if rounds < 1 or any(batch < 1 for batch in batches):
        raise InvalidSetting("--repeat and --batch-size take numbers from 1 on")
    return [
        (f"{layer}, {batch} images", shapes.find(layer, batch))
        for layer in layers
        for batch in batches or _BATCHES[kind]
    ]


def _contender(name: str) -> kernel_file.KernelFile | str:
    """Return a file, or the name of one of our CUDA kernels."""
    if kernel_file.device_of(name) is not None:
        return kernel_file.find(name)
    kernel: str = catalog.get(name).name
    return kernel


def _cudnn(
    wanted: Sequence[tuple[str, ConvProblem]], samples: int, python: str
) -> dict[str, dict[str, float]]:
    """Return cuDNN's median seconds by layer and variant."""
    with cudnn.Peer(python) as peer:
        found = {layer: peer.measure(problem, samples) for layer, problem in wanted}
    return {
        layer: {
            f"cuDNN, {name}": statistics.median(timed["samples_ms"]) / 1e3
            for name, timed in variants.items()
            if "samples_ms" in timed
        }
        for layer, variants in found.items()
    }


def _timings(kind: str, found: Sequence[Timing], peers: dict[str, float]) -> str:
    """Return the table of a layer's contenders, fastest first."""
    ours = next(each for each in found if each.name == timing.OURS)
    floor = timing.floor_seconds(kind, ours.problem)
    base = ours.median if ours.seconds else None
    lines = [f"{ours.layer} ({ours.problem}), floor {1e3 * floor:.3f} ms"]
    lines.append(
        f"  {'op time ms':>12} {'spread':>8} {'floor':>6} {'ours':>7} {'around ms':>10}  kernel"
    )
    rows = [(each.median, _timing(each), each.name) for each in found if each.seconds]
    rows += [(seconds, ("", ""), name) for name, seconds in peers.items()]
    for seconds, (spread, around), name in sorted(rows):
        times = f"{seconds / base:.2f}x" if base else ""
        lines.append(
            f"  {1e3 * seconds:12.3f} {spread:>8} {floor / seconds:>6.1%} {times:>7} {around:>10}"
            f"  {name}"
        )
    lines += [f"  {each.name}: {each.failure}" for each in found if each.failure]
    lines += [f"  {each.name}: {each.note}" for each in found if each.note]
    return "\n".join(lines)


def _timing(each: Timing) -> tuple[str, str]:
    """Return the spread of a contender's calls, and its time around them."""
    spread = f"{each.spread:.1%}" + ("!" if each.spread > timing.STEADY else " ")
    around = f"{1e3 * statistics.median(each.around):.1f}" if each.around else ""
    return spread, around


def _check(
    file: kernel_file.KernelFile,
    problems: Sequence[ConvProblem],
    bar: tqdm,
    emulation: Emulation | None,
    options: argparse.Namespace,
) -> Verdict:
    own = {"precision": options.precision, "emulation": emulation, "term": options.term}
    try:
        return checking.check(file, problems, options.seed, bar.update, **own)
    except KernelCompileFailed as error:
        # Other files are checked nevertheless.
        return Verdict(str(file.path), broken=_named(kernel_file.reason(error), file.path))
    except KernelNotSupported as error:
        said, kind = _named(str(error), file.path), type(error).__name__
        return Verdict(str(file.path), broken=said, by_machine=kind)


def _files(name: str) -> list[kernel_file.KernelFile]:
    """Return the file of this name, or those in the folder. Raises `InvalidSetting`."""
    if not Path(name).is_dir():
        return [kernel_file.find(name)]
    found = ranking.find([Path(name)]).values()
    files = [each for each in found if isinstance(each, kernel_file.KernelFile)]
    if not files:
        raise InvalidSetting(f"no kernel file in {name}")
    return files


def _must_emulate(files: Sequence[kernel_file.KernelFile]) -> bool:
    """Return whether there are CUDA files but no GPU; if so, print that."""
    if all(file.device == "cpu" for file in files):
        return False
    return dispatch.backend_of_cuda_files() == "emulator"


def _as_given(file: str) -> str:
    """Return a path relative to the current folder, if it is inside it."""
    from_here = os.path.relpath(file)
    return file if from_here.startswith(os.pardir) else from_here


def _named(text: str, path: Path) -> str:
    """Return a message with the file's path replaced by its name."""
    text = text.replace(f"kernel file {path}: ", "")
    return text.replace(f"{path.parent}{os.sep}", "")


def _text(verdict: Verdict) -> str:
    lines = [_as_given(verdict.file)]
    for group in verdict.groups:
        lines += _group(verdict, group)
    if verdict.error:
        lines.append(f"  real numbers: relative error {verdict.error:.1e} at most (L2)")
    lines += [f"  not prevented on this machine: {each}" for each in verdict.lacking]
    for each in verdict.sanitized:
        lines += _sanitized(each)
    if verdict.broken:
        lines.append(f"  stopped: {verdict.broken}")
    if verdict.is_right and verdict.elsewhere:
        lines.append(f"  right on its own layers; {_why_not_elsewhere(verdict.elsewhere)}")
    said, colour = _said(verdict)
    lines = [_wrapped(plain(each)) for each in lines]
    return "\n".join([*lines, f"  verdict: {paint(said, colour, sys.stdout)}"])


def _wrapped(line: str) -> str:
    """Wrap a line of a verdict with indentation; a command stays on one line, so that it can be
    copied."""
    if line.lstrip().startswith("again: "):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    wrapper = textwrap.TextWrapper(
        _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(line)


def _said(verdict: Verdict) -> tuple[str, str]:
    """Return the verdict, and its colour."""
    if verdict.by_machine:
        return "cannot be tried here", "yellow"
    if verdict.is_right:
        exact = "" if verdict.precision == "float32" else f", as exact as {verdict.precision} is"
        terms = [group for group in verdict.groups if group.term]
        right = [group.term for group in terms if group.is_right]
        wrong = [group.term for group in terms if not group.is_right]
        said = f"right for {', '.join(right)}" if right and verdict.elsewhere else "right"
        return said + exact + (f"; wrong for {', '.join(wrong)}" if wrong else ""), "green"
    if verdict.allowed_by:
        said = f"wrong in {verdict.precision}, right with --precision {verdict.allowed_by}"
        return said, "yellow"
    if verdict.has_right_results:
        return "right results, but the mistakes above", "yellow"
    if verdict.is_right_for_the_course:
        return "right on the course's layers, wrong on other sizes", "yellow"
    return "wrong", "red"


def _why_not_elsewhere(groups: Sequence[Group]) -> str:
    """Return in one line why a file is wrong on other layers."""
    failures = [each for group in groups for each in group.failures]
    for failure in failures:
        if failure.short:
            return failure.short
    if failures:
        what = failures[0].text.rpartition(" elements are wrong: ")[2]
        return f"{shapes.called(ConvProblem.parse(failures[0].problem))}: {what}"
    mistake = groups[0].mistakes[0]
    return f"on {groups[0].name}, {mistake.place}: {mistake.text}"


def _sanitized(ran: Sanitized) -> list[str]:
    warnings = sum(each.warning for each in ran.findings)
    mistakes = len(ran.findings) - warnings
    lines = [f"  {ran.tool}: {mistakes} mistakes" + (f", {warnings} warnings" if warnings else "")]
    if ran.failure:
        lines = [f"  {ran.tool}: not known: {ran.failure}"]
    for each in ran.findings[:_MOST_FAILURES]:
        times = f", {each.count} times" if each.count > 1 else ""
        thread = f", first by {each.thread}" if each.thread else ""
        kind = "warning: " if each.warning else ""
        lines.append(f"    {each.place}: {kind}{each.text}{thread}{times}")
    more = len(ran.findings) - _MOST_FAILURES
    return lines + ([f"    and {more} more"] if more > 0 else [])


def _group(verdict: Verdict, group: Group) -> list[str]:
    checked = group.right + len(group.failures)
    refused = ""
    if group.refused:
        reason = group.refused[0].split(": ")[-1].split("; ")[0]
        refused = f", {len(group.refused)} refused ({reason})"
    lines = [f"  {group.name}: {group.right} of {checked} right{refused}"]
    lines += [f"    {each}" for each in group.notes]
    failures = [each for each in group.failures if not (each.near and verdict.allowed_by)]
    shown = failures[: 1 if group.told else _MOST_FAILURES]
    for failure in shown:
        text = (group.told and failure.short) or failure.text
        lines.append(f"    {failure.problem}: {text}")
        if failure.first:
            lines.append(f"      first: {failure.first}")
        again = f"ece408 lab check {_as_given(verdict.file)} --problem {failure.problem}"
        again += f" --seed {failure.seed}"
        if verdict.precision != "float32":
            again += f" --precision {verdict.precision}"
        if verdict.order:
            again += f" --order {verdict.order}"
        lines.append(f"      again: {again}")
    if len(failures) > len(shown):
        lines.append(f"    and {len(failures) - len(shown)} more")
    if not group.failures and group.told:
        known = {each.place for ran in verdict.sanitized for each in ran.findings}
        more = [each for each in group.mistakes if each.place not in known]
        lines += [f"    {each.place}: {each.text}" for each in more[:_MOST_FAILURES]]
    return lines
