"""Ctrl-C during long calls into MXNet, and its delay while a process is started."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Callable, TypeVar

Result = TypeVar("Result")

# A signal that arrives just as a thread begins to wait is handled at its next wake-up.
_WAKES_UP_S = 0.5


def run_interruptibly(work: Callable[[], Result]) -> Result:
    """Call `work` on another thread and wait for it; return or raise its result.

    Python handles Ctrl-C on the main thread only, and not while that thread waits inside MXNet, but
    it does while it waits for another thread. After a `KeyboardInterrupt` the work is still
    running: the caller must end the process.
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
    while thread.is_alive():
        thread.join(_WAKES_UP_S)
    if failures:
        raise failures[0]
    return results[0]


@contextlib.contextmanager
def interrupts_later() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C within the block; call the yielded function after it to raise it.

    Does nothing on threads other than the main one, or if Ctrl-C is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or not callable(before):
        yield lambda: None
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield lambda: signal.raise_signal(signal.SIGINT) if arrived else None
    finally:
        signal.signal(signal.SIGINT, before)
