"""The steps from the command line's options to report.html and report.md."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..course import comparison
from ..course.comparison import run_process
from ..errors import CacheUnwritable, ReportUnwritable
from ..files.cachedir import atomic_path, ensure_folder, locked, write_text, writing
from . import document, notes, page, plan, svg
from .collect import Runner, collect
from .document import Document
from .plan import Measurement, Options
from .store import Store

MARKDOWN, HTML = "report.md", "report.html"
_RESULTS = "results"


@dataclass(frozen=True)
class Made:
    """The files written, and a line on each program that failed.

    A program that lacks a GPU or a profiler on this machine has not failed.
    """

    files: tuple[Path, ...]
    failures: tuple[str, ...]


def make(options: Options, folder: Path, runner: Runner | None = None) -> Made:
    """Run the report's programs and write the report to `folder`.

    Results are stored in it immediately, so that an interrupted report can continue. Errors of
    `folder` are found before anything runs. `runner` runs a command, by default
    `comparison.run_process`.

    Raises what `measure` and `write` raise.
    """
    _check(folder)
    measure(options, folder, runner)
    return write(folder)


def measure(options: Options, folder: Path, runner: Runner | None = None) -> None:
    """Run the report's programs, and store the results in `folder`.

    Raises `ReportUnwritable`, and the errors of loading Fashion-MNIST.
    """
    with _writing_to(folder):
        _check_writable(folder)
    store = Store(folder / _RESULTS)
    measurements = plan.plan(options, store.folder)
    comparison.prepare_data([each.job for each in measurements if each.job is not None])
    with _writing_to(folder), locked(store.folder, f"measure for {folder / HTML}"):
        store.open(options)
        collect(measurements, store, runner or run_process)
        store.finish()


def write(folder: Path) -> Made:
    """Write a report from the results of `measure` in `folder`, from this or another machine.

    Raises `ReportUnwritable`, also without complete results, `NotesUnreadable`, and
    `InvalidSetting` without the libraries of the extra `report`.
    """
    _check(folder)
    store = Store(folder / _RESULTS)
    options = store.reopen()
    found = {each: store.get(each) for each in plan.plan(options, store.folder)}
    missing = [each.title for each, result in found.items() if result is None]
    if missing:
        raise ReportUnwritable(
            f"the results in {store.folder} lack {', '.join(missing)}; run ece408 report without "
            "--reuse"
        )
    results = {each.key: result for each, result in found.items() if result is not None}
    made = document.build(options, list(found), results, store.state, notes.read(folder / MARKDOWN))
    with _writing_to(folder):
        files = _write_files(folder, made)
    return Made(files, made.failures)


def results_kept(options: Options, folder: Path) -> tuple[int, int]:
    """Return how many programs' results the next report can reuse, and the number of programs."""
    store = Store(folder / _RESULTS)
    measurements: Sequence[Measurement] = plan.plan(options, store.folder)
    return sum(store.find(each) is not None for each in measurements), len(measurements)


def _write_files(folder: Path, made: Document) -> tuple[Path, ...]:
    texts = {folder / name: text for name, text in made.pictures.items()}
    texts[folder / MARKDOWN] = made.markdown
    for path, text in texts.items():
        write_text(path, text)
    write_text(folder / HTML, page.render(made.markdown, made.title, folder))
    return folder / HTML, folder / MARKDOWN


def _check(folder: Path) -> None:
    """Raise early the error that writing the report would raise."""
    svg.require()
    page.require()
    with _writing_to(folder):
        _check_writable(folder)
    notes.read(folder / MARKDOWN)


def _check_writable(folder: Path) -> None:
    ensure_folder(folder / _RESULTS)
    for path in (folder, folder / _RESULTS):
        # A file system may refuse although permissions allow it.
        with atomic_path(path / ".probe"):
            pass
        (path / ".probe").unlink()
    for name in (MARKDOWN, HTML):
        with writing(folder / name):
            if (folder / name).exists() and not (folder / name).is_file():
                raise FileExistsError("something that is not a file has this name")


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except CacheUnwritable as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise ReportUnwritable(
            f"cannot write the report to {folder}: {reason}; choose another folder with --output"
        ) from error
