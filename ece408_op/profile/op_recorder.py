"""Recorder of our operator's calls, by layer name and kernel, from the log of op times."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from ..op_log import OpTime, op_times
from ..operator.graphs.graph_json import OP_TYPE
from .activities import OP_CALL, Activity


class OpRecorder:
    """Records every call of a backend between `start` and `stop`, by the system's clock."""

    def __init__(self) -> None:
        self._activities: list[Activity] = []
        self._log = contextlib.ExitStack()

    def start(self) -> None:
        self._log.enter_context(op_times(self._note))

    def stop(self) -> list[Activity]:
        self._log.close()
        return self._activities

    def _note(self, entry: OpTime) -> None:
        # Entries are published on the calling thread as soon as the call has ended.
        duration_ns = round(1e9 * entry.seconds)
        details: dict[str, Any] = {
            "layer": entry.layer,
            "direction": entry.direction,
            "backend": entry.backend,
            "kernel": entry.kernel,
            "problem": str(entry.problem),
            "flops": entry.problem.flops,
            "bytes": entry.problem.bytes,
        }
        if entry.gpu is not None:
            details["events_ms"] = 1e3 * entry.gpu.kernel_seconds
        self._activities.append(
            Activity(
                OP_CALL,
                f"{entry.layer or OP_TYPE} {entry.direction} by {entry.backend} {entry.kernel}",
                time.time_ns() - duration_ns,
                duration_ns,
                thread_track(threading.get_ident()),
                details,
            )
        )


def thread_track(identifier: int) -> str:
    """Return the track of a thread; CUPTI uses the lower half of its identifier."""
    return f"thread {identifier & 0xFFFFFFFF:08x}"
