"""What programs that tests start get from the tests' own process."""

from __future__ import annotations

import os


def environment(**more: str) -> dict[str, str]:
    """This process's environment and more, without what our operator has set in it: with this
    variable MXNet takes more memory, and plans it otherwise."""
    own = {name: value for name, value in os.environ.items() if name != "NNVM_EXEC_MATCH_RANGE"}
    return {**own, **more}
