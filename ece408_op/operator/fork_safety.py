"""Makes forks, such as a DataLoader's workers, safe while our operator runs or after it has run.

Before a fork MXNet waits for its threads without giving up Python's lock, which an operator written
in Python needs in order to end: a deadlock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from . import python_calls

# How long operators must have stopped being deleted: MXNet's threads do that in Python too,
# after the work that they did has been reported as done.
_QUIET_S = 0.03
_GLANCE_S = 0.003

_in_use = False
_actions: set[Callable[[], None]] = set()


def note_use() -> None:
    """Call when an operator in Python is created or runs: before the next fork it is deleted."""
    global _in_use
    _in_use = True


def do_before_forks(action: Callable[[], None]) -> None:
    """Have `action` called, once, before each fork from now on, when no operator runs."""
    _actions.add(action)


def install(mxnet: Any) -> None:
    """Have every fork of this process wait first."""

    def wait() -> None:
        global _in_use
        # The compiled operator may be about to ask Python something. A failure is not the fork's
        # to report: an operator's is kept by `errors`.
        with contextlib.suppress(mxnet.MXNetError):
            mxnet.nd.waitall()
        if _in_use:
            _in_use = False
            _wait_for_deletions(mxnet.operator._registry.ref_holder)
        for action in _actions:
            action()

    python_calls.before_forks(wait)


def _wait_for_deletions(operators: dict[int, Any]) -> None:
    count, since = len(operators), time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        time.sleep(_GLANCE_S)
        if len(operators) != count:
            count, since = len(operators), time.monotonic()
