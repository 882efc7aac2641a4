"""Profile: activities on one time line, and the recorded program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting

SCHEMA = 1

# Kinds of activities. GPU: a kernel, a copy or a fill. CPU: a CUDA API call, an MXNet operator, or
# a call of our operator's backend.
KERNEL, MEMCPY, MEMSET = "kernel", "memcpy", "memset"
API, OPERATOR, OP_CALL = "api", "operator", "op_call"
KINDS = (KERNEL, MEMCPY, MEMSET, API, OPERATOR, OP_CALL)
ON_GPU = (KERNEL, MEMCPY, MEMSET)


@dataclass(frozen=True)
class Activity:
    """An activity of `duration_ns` nanoseconds, `start_ns` after the recording began.

    `track` is its stream or thread, such as "GPU 0 stream 7" or "thread 1234"; activities of one
    track follow or enclose each other. `details` depend on `kind`:

    kernel: grid, block (lists of 3), registers (per thread), static_shared, dynamic_shared
        (bytes per block), local (bytes per thread: the stack and spilled registers), device
    memcpy, memset: bytes, device
    api: none
    operator: context, such as "cpu/0"
    op_call: layer, direction, backend, kernel, problem (the repro line), flops, bytes (each input
        read once and each output written once); on a GPU events_ms, the time between events
        before and after its kernels

    An activity on a GPU within one call of our operator also has that call's layer.
    """

    kind: str
    name: str
    start_ns: int
    duration_ns: int
    track: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Profile:
    """One program's run. Activities are sorted by their start.

    `command` is what ran, `exit_code` its exit code, `elapsed_s` wall seconds; `machine` is
    `environment.machine()`'s description with versions. `notes` say what could not be recorded and
    why. `kernel_figures` are `kernel_figures.Figure`s as dicts, and `ceilings` the GPU's measured
    rates for comparison (`None` without a GPU); `counters` are ncu's, by kernel.
    """

    activities: tuple[Activity, ...]
    command: tuple[str, ...]
    elapsed_s: float
    exit_code: int
    machine: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    kernel_figures: tuple[Mapping[str, Any], ...] = ()
    ceilings: Mapping[str, float] | None = None
    counters: tuple[Mapping[str, Any], ...] = ()

    def of_kinds(self, *kinds: str) -> list[Activity]:
        """Return the activities of these kinds, in order."""
        return [activity for activity in self.activities if activity.kind in kinds]


_COLUMNS = ("kind", "name", "start_ns", "duration_ns", "track", "details")
_PLAIN = ("elapsed_s", "exit_code", "machine", "ceilings")
_TUPLES = ("command", "notes", "kernel_figures", "counters")


def to_json(profile: Profile, **more: Any) -> str:
    """Return the profile as JSON text for `from_json`; `more` is added at the top level.

    One line per activity, a list in the order of "columns".
    """
    names = (*_PLAIN, *_TUPLES)
    head = {"schema": SCHEMA, **{name: getattr(profile, name) for name in names}, **more}
    text = json.dumps({**head, "columns": _COLUMNS}, indent=1)
    rows = [
        json.dumps([getattr(each, name) for name in _COLUMNS], separators=(",", ":"))
        for each in profile.activities
    ]
    return text[: -len("\n}")] + ',\n "activities": [\n' + ",\n".join(rows) + "\n]}\n"


def from_json(text: str) -> Profile:
    """Parse a text written by `to_json`. Raises `InvalidSetting` for any other text."""
    try:
        document = json.loads(text)
        found = document["schema"]
        if found != SCHEMA:
            raise InvalidSetting(
                f"a profile of schema {found!r} cannot be read, only {SCHEMA}; record it again"
            )
        rows = (dict(zip(document["columns"], row)) for row in document["activities"])
        fields: dict[str, Any] = {name: document[name] for name in _PLAIN}
        fields.update({name: tuple(document[name]) for name in _TUPLES})
        return Profile(tuple(Activity(**row) for row in rows), **fields)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InvalidSetting(f"this is no profile of ours ({error!r}); record it again") from error


def read(path: Path) -> Profile:
    """Read a file written by `--json`. Raises `InvalidSetting`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}; record it again") from error
    return from_json(text)


def in_order(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    """Sort by start; activities that enclose others with the same start come first."""
    return tuple(sorted(activities, key=lambda each: (each.start_ns, -each.duration_ns)))
