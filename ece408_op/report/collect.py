"""Execution of a report's programs, one after the other, with their output stored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from subprocess import CompletedProcess

from tqdm import tqdm

from .plan import Measurement
from .store import Result, Store

Runner = Callable[[Sequence[str]], "CompletedProcess[str]"]


def collect(measurements: Sequence[Measurement], store: Store, runner: Runner) -> dict[str, Result]:
    """Return results by key; results in the store are reused.

    Shows progress on stderr if it is a terminal. Raises `CacheUnwritable`.
    """
    results: dict[str, Result] = {}
    with tqdm(measurements, unit="run", disable=None) as progress:
        for each in progress:
            progress.set_description(each.title)
            found = store.find(each)
            if found is None:
                found = _left_out(each, results) or _run(each, runner)
                store.add(each, found)
            results[each.key] = found
    return results


def _left_out(measurement: Measurement, results: dict[str, Result]) -> Result | None:
    """Return the result of the measurement's `gate` if it found no GPU, else `None`."""
    gate = results.get(measurement.gate) if measurement.gate else None
    if gate is None or not gate.lacks_gpu:
        return None
    return dataclasses.replace(gate, command=measurement.command, seconds=0.0)


def _run(measurement: Measurement, runner: Runner) -> Result:
    if measurement.profile is not None:
        measurement.profile.unlink(missing_ok=True)
    start = time.perf_counter()
    done = runner(measurement.command)
    seconds = time.perf_counter() - start
    profile = None
    if measurement.profile is not None and measurement.profile.is_file():
        profile = measurement.profile.read_text(encoding="utf-8")
        measurement.profile.unlink()
    return Result(measurement.command, done.returncode, done.stdout, done.stderr, seconds, profile)
