"""Time line of a profile in Chrome's trace format, for Perfetto and chrome://tracing.

The format is described in "Trace Event Format" of the Chromium project: complete events ("X") with
times in microseconds, and metadata events ("M") that name processes and threads.
"""

from __future__ import annotations

import json
from typing import Any

from .activities import ON_GPU, Activity, Profile

_CPU, _GPU = 1, 2
_PROCESSES = {_CPU: "CPU", _GPU: "GPU"}


def to_trace(profile: Profile) -> str:
    """Return the time line as JSON text; its rows are the GPUs' streams and the CPU's threads."""
    tracks: dict[tuple[int, str], int] = {}
    events = []
    for activity in profile.activities:
        process = _GPU if activity.kind in ON_GPU else _CPU
        number = tracks.setdefault((process, activity.track), len(tracks) + 1)
        events.append(_event(activity, process, number))
    named = [_name("process_name", process, 0, name) for process, name in _PROCESSES.items()]
    named += [_name("thread_name", process, n, track) for (process, track), n in tracks.items()]
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in [*named, *events])
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + lines + "\n]}\n"


def _event(activity: Activity, process: int, track: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": activity.kind,
        "name": activity.name,
        "pid": process,
        "tid": track,
        "ts": activity.start_ns / 1e3,
        "dur": activity.duration_ns / 1e3,
        "args": dict(activity.details),
    }


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
