"""A thread for each of several GPUs, on the cores that are nearest to it.

Who writes a page first decides on which node of the machine it lies, and the threads that copy for
one that keeps to some cores keep to these, too. So page-locked memory, and results, come to lie
beside the GPU whose they are.
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
    """What computes, and the cores nearest to it."""

    @property
    def cores(self) -> frozenset[int]: ...


_threads: dict[Placed, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def run_all(tasks: Sequence[tuple[Placed, Callable[[], Result]]]) -> list[Result]:
    """The results of all functions, each called on the thread of its GPU, or on the caller's if
    there is only one; returns, or raises what one of them raises, when all have ended."""
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
    """Have this thread, and those that it starts, run on these cores."""
    # They may have been taken away from the process since.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
