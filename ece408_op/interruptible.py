"""Long calls into MXNet that Ctrl-C can still end."""

from __future__ import annotations

import threading
from typing import Callable, TypeVar

Result = TypeVar("Result")


def run_interruptibly(work: Callable[[], Result]) -> Result:
    """Call `work` on another thread and wait for it here; returns or raises what it does.

    Python handles Ctrl-C on the main thread only, and not while that thread waits inside
    MXNet; waiting for another thread it can. After a `KeyboardInterrupt` the work is still
    going on: the caller must end the process.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
