"""Server or scheduler of a job: `python -m ece408_op.operator.parameter_server`.

Importing MXNet makes the process what DMLC_ROLE says; the import returns when the job ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from .loading import load_mxnet


def main() -> None:
    """Serve. Raises `MXNetMissing`."""
    sys.unraisablehook = _end
    load_mxnet()
    sys.exit(f"DMLC_ROLE is {os.environ.get('DMLC_ROLE')!r}, not server or scheduler")


def _end(given: Any) -> None:
    """End the process if its optimizer, or unpickling one, raises: MXNet would continue with wrong
    weights, because Python only prints exceptions in callbacks from C++."""
    traceback.print_exception(given.exc_type, given.exc_value, given.exc_traceback)
    if "callback" in (given.err_msg or ""):
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
