"""Profiling of a program: runs it, prints tables and writes files."""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ..course.comparison_files import check_writable
from ..errors import Ece408Error, ScriptMissing
from ..files.cachedir import write_text
from ..profile import layers, ncu, profile_summary, recording, tables
from ..profile.activities import Profile, to_json
from ..profile.trace import to_trace
from .program import output_failed


def profile_script(
    path: Path, arguments: Sequence[str], requested: argparse.Namespace, gpu: bool
) -> int:
    """Run a Python script as `python path arguments` would, with tables on stdout; return its exit
    code.

    Raises `ScriptMissing`, and what `profile` raises, but not the script's exceptions.
    """
    if not path.is_file():
        raise ScriptMissing(
            f"{str(path)!r} is neither a milestone nor a file; give m1.1, m3.1 or a Python script"
        )
    line = [str(path), *arguments]
    again = [sys.executable, *line]
    outcome = profile(lambda: _run_path(line), line, again, requested, gpu, sys.stdout)
    failure = outcome.failure
    if output_failed():
        # The command reports this in fewer words.
        return outcome.profile.exit_code
    if isinstance(failure, SystemExit) and isinstance(failure.code, str):
        print(failure.code, file=sys.stderr)
    elif failure is not None and not isinstance(failure, SystemExit):
        _print_traceback(failure, path)
    if outcome.profile.exit_code:
        print(
            f"ece408: {path} ended with exit code {outcome.profile.exit_code}; the profile is of "
            "what it did until then",
            file=sys.stderr,
        )
    return outcome.profile.exit_code


def profile(
    program: Callable[[], object],
    command: Sequence[str],
    again: Sequence[str],
    requested: argparse.Namespace,
    gpu: bool,
    stream: TextIO,
) -> recording.Outcome:
    """Record a program, print the tables to `stream` after its own output, and write the files.

    `requested` has the profile options; `command` is the command line named in the profile; `again`
    runs it in a separate process. The outcome contains the program's exception. If nothing was
    recorded before it failed, there are no tables and no files.

    Raises, before the program begins, `CacheUnwritable` for unwritable files, `ProfilerMissing` and
    `ProfilingNotPermitted`; if ncu is the cause, the last two come after everything else.
    """
    for path in filter(None, (requested.json, requested.trace)):
        check_writable(path)
    counter = ncu.find() if requested.ncu else None
    outcome = recording.record(program, command, gpu)
    found = outcome.profile
    if not found.activities:
        return outcome
    found = _with_figures(found)
    refusal: Ece408Error | None = None
    if counter is not None and outcome.failure is None:
        try:
            counters = layers.with_kernel_names(ncu.count(again, counter), found.activities)
            found = dataclasses.replace(found, counters=tuple(map(dataclasses.asdict, counters)))
        except Ece408Error as error:
            refusal = error
    sys.stdout.flush()
    print(f"\n{profile_summary.text(found)}", file=stream, flush=True)
    _write(found, requested)
    if refusal is not None:
        # Everything but the counters has been written by now.
        raise refusal
    return dataclasses.replace(outcome, profile=found)


def _with_figures(found: Profile) -> Profile:
    """Return the profile with figures of our kernels, or with a note on why they are missing."""
    try:
        return recording.with_kernel_figures(found)
    except Ece408Error as error:
        note = f"no figures of our kernels: the GPU's ceilings could not be measured: {error}"
        return dataclasses.replace(found, notes=(*found.notes, note))


def _write(found: Profile, requested: argparse.Namespace) -> None:
    if requested.json is not None:
        sections = [dataclasses.asdict(section) for section in tables.sections(found)]
        write_text(requested.json, to_json(found, tables=sections))
    if requested.trace is not None:
        write_text(requested.trace, to_trace(found))


def _run_path(line: Sequence[str]) -> None:
    """Run a script with its arguments and its folder first on the path, as Python does."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = list(line), str(Path(line[0]).resolve().parent)
    try:
        runpy.run_path(line[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _print_traceback(failure: BaseException, path: Path) -> None:
    """Print the script's own traceback, from its first frame on."""
    place = failure.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != str(path):
        place = place.tb_next
    traceback.print_exception(type(failure), failure, place)
