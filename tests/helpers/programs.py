"""Processes and threads that tests start: their environment, and work that may end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable
from unittest import mock

_starting = threading.Lock()


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment and more, without the variables that our operator has set:
    they change how MXNet plans memory."""
    own = {name: value for name, value in os.environ.items() if name != "NNVM_EXEC_MATCH_RANGE"}
    return {**own, **more}


def run(*command: object, cwd: Any = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command with more variables in its environment; the result has stdout, stderr and
    returncode."""
    return subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=600
    )  # type: ignore[call-overload]


def together(work: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
    """Return work(part) of each part, all at once on threads; raise the first one's error."""
    all_parts = list(parts)
    gate = threading.Barrier(len(all_parts))

    def begin(part: Any) -> Any:
        gate.wait()
        return work(part)

    with ThreadPoolExecutor(len(all_parts)) as pool:
        return list(pool.map(begin, all_parts))


class Died(Exception):
    """The work has ended its process, or takes too long."""


class Worker:
    """A process, and another one after it has died; work takes at most `seconds`, if given."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown()

    def __call__(self, work: Callable[..., Any], *given: object) -> Any:
        """Return work(*given). Raises `Died`."""
        given_environment = environment(MXNET_SUBGRAPH_VERBOSE="0", PYTHONWARNINGS="ignore")
        with _starting, mock.patch.dict(os.environ, given_environment, clear=True):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            future = self._pool.submit(work, *given)
        try:
            return future.result(self._seconds)
        except (BrokenProcessPool, TimeoutError):
            self.__exit__()
            raise Died(f"{work.__name__}{given} ends its process, or takes too long") from None


def shared_out(
    work: Callable[..., Any], parts: Iterable[Any], jobs: int, seconds: float | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield each part and work(worker, part), in order; each of several jobs has a worker."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def one(part: Any) -> tuple[Any, Any]:
        worker = idle.get()
        try:
            return part, work(worker, part)
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as workers, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            idle.put(workers.enter_context(Worker(seconds)))
        yield from pool.map(one, parts)
