"""One host thread per GPU, pinned to the cores nearest to it.

The first write to a page decides its NUMA node, and a thread pool started by a pinned thread
inherits its cores. So page-locked memory and results are allocated near their GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Placed(Hashable, Protocol):
    """A device and the cores nearest to it."""

    @property
    def cores(self) -> frozenset[int]: ...


_threads: dict[Placed, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def run_all(tasks: Sequence[tuple[Placed, Callable[[], Result]]]) -> list[Result]:
    """Call each function on the thread of its GPU (a single one on the caller's thread) and return
    the results; when all have ended, raise the first error, if any."""
    if len(tasks) == 1:
        return [tasks[0][1]()]
    under_way = [_thread(place).submit(function) for place, function in tasks]
    try:
        return [each.result() for each in under_way]
    finally:
        wait(under_way)


def _thread(place: Placed) -> ThreadPoolExecutor:
    with _lock:
        if place not in _threads:
            _threads[place] = ThreadPoolExecutor(1, f"ece408 {place}", _keep_to, (place.cores,))
        return _threads[place]


def _keep_to(cores: frozenset[int]) -> None:
    """Pin this thread, and those that it starts, to these cores."""
    # The process may have lost these cores since.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
