"""A profile: activities on one time line, and the program they were recorded from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting

SCHEMA = 1

# Kinds of activities. On a GPU: a kernel, a copy or a fill. On the CPU: a call of CUDA's API, an
# operator of MXNet's, or a call of our operator's backend.
KERNEL, MEMCPY, MEMSET = "kernel", "memcpy", "memset"
API, OPERATOR, OP_CALL = "api", "operator", "op_call"
KINDS = (KERNEL, MEMCPY, MEMSET, API, OPERATOR, OP_CALL)
ON_GPU = (KERNEL, MEMCPY, MEMSET)


@dataclass(frozen=True)
class Activity:
    """Something that took `duration_ns` nanoseconds, from `start_ns` after the recording began.

    `track` is what it ran on, such as "GPU 0 stream 7" or "thread 1234"; activities of one track
    follow or enclose each other. `details` depend on `kind`:

    kernel: grid, block (lists of 3), registers (of a thread), static_shared, dynamic_shared
        (bytes of a block), local (bytes of a thread: the stack and spilled registers), device
    memcpy, memset: bytes, device
    api: none
    operator: context, such as "cpu/0"
    op_call: layer, direction, backend, kernel, problem (the repro line), flops, bytes (each input
        read once and each output written once); on a GPU events_ms, what lies between events
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

    `command` is what ran, `exit_code` how it ended, `elapsed_s` wall seconds; `machine` is
    `environment.machine()`'s description with versions. `notes` say what could not be recorded and
    why. `kernel_figures` are `kernel_figures.Figure`s as dicts, and `ceilings` the measured rates
    of the GPU that they are held against (`None` without a GPU); `counters` are ncu's, by kernel.
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
        """The activities of these kinds, in order."""
        return [activity for activity in self.activities if activity.kind in kinds]


_COLUMNS = ("kind", "name", "start_ns", "duration_ns", "track", "details")
_PLAIN = ("elapsed_s", "exit_code", "machine", "ceilings")
_TUPLES = ("command", "notes", "kernel_figures", "counters")


def to_json(profile: Profile, **more: Any) -> str:
    """The profile as JSON text that `from_json` reads; `more` is added at the top.

    One line for each activity, a list in the order of "columns".
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
    """The profile in a text that `to_json` wrote. Raises `InvalidSetting` for any other text."""
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
    """The profile in a file that `--json` wrote. Raises `InvalidSetting`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}; record it again") from error
    return from_json(text)


def in_order(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    """Sorted by start; of those that start together, what encloses the others comes first."""
    return tuple(sorted(activities, key=lambda each: (each.start_ns, -each.duration_ns)))
