"""Recorder of GPU activities and CUDA API calls, with NVIDIA's CUPTI through cupti-python.

CUPTI delivers buffers of records on its own threads, with its own clock. Reading that clock and the
system's together maps all activities to one time line.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import ProfilerMissing, ProfilingNotPermitted
from .activities import API, KERNEL, MEMCPY, MEMSET, Activity, in_order
from .demangle import demangle
from .op_recorder import thread_track

# Converting the records of a full buffer to objects holds the GIL for up to 20 ms per 64 KiB, so a
# milestone should not fill one; a large buffer takes time to allocate. Op time of m3.1's second
# layer on an H200: 37 to 53 ms without a profile, 51 to 64 with 16 or 64 KiB, 36 to 40 with 256 or
# 1024 KiB, 35 to 56 with 4096 KiB.
_BUFFER_BYTES = 512 << 10
_MOST_PENDING = 100_000
_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "DRIVER", "RUNTIME")
# CUpti_ActivityMemcpyKind, by nvprof's names.
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA",
               8: "DtoD", 9: "HtoH", 10: "PtoP"}  # fmt: skip
_OLDEST_PYTHON = (3, 10)


class CuptiRecorder:
    """Records kernels, copies, fills and API calls of this process between `start` and `stop`, by
    the system's clock. After `stop`, `notes` says what is missing."""

    def __init__(self) -> None:
        self._cupti = load()
        self._lock = threading.Lock()
        self._pending: list[Any] = []
        self._activities: list[Activity] = []
        self._offset_ns = 0
        kinds, domain = self._cupti.ActivityKind, self._cupti.CallbackDomain
        self._kinds = [getattr(kinds, name) for name in _KINDS]
        self._readers: dict[int, Callable[[Any], Activity]] = {
            int(kinds.CONCURRENT_KERNEL): self._kernel,
            int(kinds.MEMCPY): self._copy,
            int(kinds.MEMCPY2): self._copy,
            int(kinds.MEMSET): self._fill,
            int(kinds.DRIVER): functools.partial(self._call, domain.DRIVER_API),
            int(kinds.RUNTIME): functools.partial(self._call, domain.RUNTIME_API),
        }
        self.notes: list[str] = []

    def start(self) -> None:
        """Start. Raises `ProfilingNotPermitted`, and `ProfilerMissing` if CUPTI does not start."""
        try:
            self._cupti.activity_register_callbacks(_buffer, self._completed)
            for kind in self._kinds:
                self._cupti.activity_enable(kind)
            self._offset_ns = self._clock_offset()
        except Exception as error:
            # The module raises undocumented errors other than cuptiError.
            raise _refusal(error) from error

    def stop(self) -> list[Activity]:
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        with self._lock:
            self._read_pending()
            return without_nested_calls(self._activities)

    def _clock_offset(self) -> int:
        """Return the offset of the system's clock from CUPTI's, in nanoseconds."""
        before = time.time_ns()
        stamp = self._cupti.get_timestamp()
        return (before + time.time_ns()) // 2 - stamp

    def _completed(self, records: list[Any]) -> None:
        # Reading holds the GIL, which the program needs, so it waits for the program's end unless
        # memory would run short: records are large, and keep their buffer alive.
        with self._lock:
            self._pending += records
            if len(self._pending) >= _MOST_PENDING:
                self._read_pending()

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, []
        self._activities += [
            self._readers[r.kind](r) for r in pending if r.kind in self._readers and r.end
        ]

    def _activity(self, kind: str, name: str, record: Any, track: str, **details: Any) -> Activity:
        start = record.start + self._offset_ns
        return Activity(kind, name, start, record.end - record.start, track, details)

    def _kernel(self, record: Any) -> Activity:
        return self._activity(
            KERNEL,
            demangle(record.name),
            record,
            _stream(record),
            grid=[record.grid_x, record.grid_y, record.grid_z],
            block=[record.block_x, record.block_y, record.block_z],
            registers=record.registers_per_thread,
            static_shared=record.static_shared_memory,
            dynamic_shared=record.dynamic_shared_memory,
            local=record.local_memory_per_thread,
            device=record.device_id,
        )

    def _copy(self, record: Any) -> Activity:
        name = f"[CUDA memcpy {_DIRECTIONS.get(record.copy_kind, '?')}]"
        details = {"bytes": record.bytes, "device": record.device_id}
        return self._activity(MEMCPY, name, record, _stream(record), **details)

    def _fill(self, record: Any) -> Activity:
        details = {"bytes": record.bytes, "device": record.device_id}
        return self._activity(MEMSET, "[CUDA memset]", record, _stream(record), **details)

    def _call(self, domain: Any, record: Any) -> Activity:
        name = self._cupti.get_callback_name(domain, record.cbid)
        return self._activity(API, name, record, thread_track(record.thread_id))


def load() -> Any:
    """Return the module `cupti.cupti`. Raises `ProfilerMissing` with what to install."""
    if sys.version_info < _OLDEST_PYTHON:
        raise ProfilerMissing(
            f"profiling on the GPU needs Python 3.10 or later, this is {sys.version.split()[0]}; "
            "leave the GPU out with --no-gpu"
        )
    try:
        return importlib.import_module("cupti.cupti")
    except ImportError as error:
        raise ProfilerMissing(
            f"profiling on the GPU needs CUPTI for Python ({error}); "
            "pip install 'ece408_op[profile]', or leave the GPU out with --no-gpu"
        ) from error


def without_nested_calls(activities: list[Activity]) -> list[Activity]:
    """Return the activities without driver calls made by the runtime: calls within a call of the
    same thread."""
    kept: list[Activity] = []
    ends: dict[str, int] = {}
    for activity in in_order(activities):
        if activity.kind == API:
            if activity.end_ns <= ends.get(activity.track, 0):
                continue
            ends[activity.track] = activity.end_ns
        kept.append(activity)
    return kept


def _buffer() -> tuple[int, int]:
    """Return the size in bytes of a buffer for records, and 0: no other limit on their number."""
    return _BUFFER_BYTES, 0


def _stream(record: Any) -> str:
    return f"GPU {record.device_id} stream {record.stream_id}"


def _refusal(error: Exception) -> Exception:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "PRIVILEGES" in reason.upper():
        return ProfilingNotPermitted(
            f"the driver does not let this user profile ({reason}); ask the administrator to load "
            "it with NVreg_RestrictProfilingToAdminUsers=0, or run as root"
        )
    return ProfilerMissing(
        f"CUPTI does not start ({reason}); it needs a driver for CUDA 13 and no other profiler "
        "in this process"
    )
