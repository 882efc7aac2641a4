"""Storage for the output of a report's programs, so that an interrupted report can continue."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ..course.course_terms import find_term
from ..errors import NoUsableGpu, ProfilerMissing, ProfilingNotPermitted, ReportUnwritable
from ..files.cachedir import write_text
from ..operator.environment import machine
from .own_kernels import Version
from .plan import Measurement, Options

_STATE = "state.json"
_IMPOSSIBLE = tuple(
    error.exit_code for error in (NoUsableGpu, ProfilerMissing, ProfilingNotPermitted)
)
# Settings of this package that do not change results.
_PLACES = ("ECE408_DATA", "ECE408_CACHE")
_OTHER_SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Result:
    """A program's exit code, its output, and its duration in seconds.

    `profile` is the JSON text that it wrote, if requested. A program skipped for lack of a GPU has
    the result of the program that found this.
    """

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    profile: str | None = None

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def lacks_gpu(self) -> bool:
        """Tell whether it could not run because a GPU, or software to use one, is missing."""
        return self.returncode == NoUsableGpu.exit_code

    @property
    def failed(self) -> bool:
        """Tell whether it failed for another reason than that it cannot run on this machine."""
        return self.returncode not in (0, *_IMPOSSIBLE)

    @property
    def completed(self) -> CompletedProcess[str]:
        """Return the result in the form that parsers of output take."""
        return CompletedProcess(self.command, self.returncode, self.stdout, self.stderr)


class Store:
    """Results by their measurement's key, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {}

    def open(self, options: Options) -> None:
        """Begin a report, or continue an interrupted one.

        Its results are kept if machine, versions and options are the same; other results are
        removed.
        """
        identity = _identity(options)
        before = self._read(_STATE)
        if before is not None and before["identity"] == identity and not before["finished"]:
            self.state = before
            return
        for path in self.folder.glob("*.json"):
            path.unlink()
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.state = {"identity": identity, "date": now, "finished": False}
        self._write(_STATE, self.state)

    def reopen(self) -> Options:
        """Use the existing results of any machine; return their options.

        Raises `ReportUnwritable` without a complete set of results.
        """
        before = self._read(_STATE)
        if before is None or not before["finished"]:
            raise ReportUnwritable(
                f"no complete results in {self.folder}; run ece408 report without --reuse first"
            )
        self.state = before
        saved = before["identity"]["options"]
        return Options(
            **{
                **saved,
                "term": find_term(saved["term"]),
                "sizes": tuple(saved["sizes"]),
                "versions": tuple(Version(**each) for each in saved["versions"]),
            }
        )

    def find(self, measurement: Measurement) -> Result | None:
        """Return the result of this exact command, unless it failed."""
        found = self.get(measurement)
        return found if found and found.ok and found.command == measurement.command else None

    def get(self, measurement: Measurement) -> Result | None:
        """Return the result with the measurement's key, of any command."""
        found = self._read(f"{measurement.key}.json")
        return None if found is None else Result(**{**found, "command": tuple(found["command"])})

    def add(self, measurement: Measurement, result: Result) -> None:
        """Store a result. Raises `CacheUnwritable`."""
        self._write(f"{measurement.key}.json", dataclasses.asdict(result))

    def finish(self) -> None:
        """Mark the report as complete: the next one starts over."""
        self.state["finished"] = True
        self._write(_STATE, self.state)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(content, indent=1) + "\n")


def _identity(options: Options) -> dict[str, Any]:
    """Return everything besides the command that results depend on, as JSON restores it."""
    return {
        "machine": machine(),
        "options": {
            **dataclasses.asdict(options),
            "term": options.term.name,
            "sizes": list(options.sizes),
            "versions": [dataclasses.asdict(each) for each in options.versions],
        },
        "settings": {name: os.environ[name] for name in sorted(os.environ) if _matters(name)},
    }


def _matters(variable: str) -> bool:
    ours = variable.startswith("ECE408_") and variable not in _PLACES
    return ours or variable in _OTHER_SETTINGS
