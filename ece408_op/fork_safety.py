"""Forks, such as a DataLoader's workers, while an operator of ours is in flight or has run.

Before a fork MXNet waits for its threads without giving up Python's lock, which an operator
written in Python needs in order to end: they wait for each other for ever. And in the child
the threads of OpenMP are gone, so that a parallel region would wait for them.
"""

from __future__ import annotations

import os
from typing import Any

from . import settings

_in_use = False


def note_use() -> None:
    """Call when an operator is created: from then on forks wait for MXNet's work to end."""
    global _in_use
    _in_use = True


def install(mxnet: Any) -> None:
    """Have every fork of this process wait first, and its children compute on one thread."""

    def wait() -> None:
        if _in_use:
            try:
                mxnet.nd.waitall()
            except mxnet.MXNetError:
                # Not the fork's to report: an operator's failure is kept by `errors`.
                return

    os.register_at_fork(before=wait, after_in_child=lambda: settings.configure(threads=1))
