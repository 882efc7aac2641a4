"""Environment of programs that tests start."""

from __future__ import annotations

import os


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment and more, without the variables that our operator has set:
    they change how MXNet plans memory."""
    own = {name: value for name, value in os.environ.items() if name != "NNVM_EXEC_MATCH_RANGE"}
    return {**own, **more}
