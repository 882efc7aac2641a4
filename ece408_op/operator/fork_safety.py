"""Fork safety: makes forks, such as a DataLoader's workers, safe while our operator runs or after
it has run.

Before a fork MXNet waits for its threads without releasing the GIL, which an operator in Python
needs to complete: a deadlock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from . import python_calls

# Time without deletions of operators before a fork. MXNet's threads delete them in Python, too,
# after the operators' work has been reported as done.
_QUIET_S = 0.03
_GLANCE_S = 0.003

_in_use = False
_actions: set[Callable[[], None]] = set()


def note_use() -> None:
    """Record that an operator in Python is created or runs: it must be deleted before the next
    fork."""
    global _in_use
    _in_use = True


def do_before_forks(action: Callable[[], None]) -> None:
    """Call `action` once before each fork from now on, when no operator runs."""
    _actions.add(action)


def install(mxnet: Any) -> None:
    """Make every fork of this process wait first."""

    def wait() -> None:
        global _in_use
        # The compiled operator may be about to call Python. Errors are not the fork's to report:
        # `errors` keeps those of operators.
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
