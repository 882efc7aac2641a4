"""`python -m ece408_op.report.measure_ladder cpu|gpu`: prints times of a device's kernels as
JSON."""

from __future__ import annotations

import argparse
import sys

from .. import settings
from ..course.course_terms import find_term
from ..errors import Ece408Error
from ..operator.variables import set_environment
from . import cpu_ladder, gpu_ladder, ladder


def main() -> int:
    """Print the times; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("--term", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads")
    parser.add_argument("--peer-python")
    options = parser.parse_args()
    settings.configure(threads=options.threads)
    try:
        set_environment()
        layers = ladder.problems(find_term(options.term), options.batch)
        if options.device == "cpu":
            measured = cpu_ladder.measure(layers, options.peer_python)
        else:
            measured = gpu_ladder.measure(layers, options.peer_python)
    except Ece408Error as error:
        print(f"ece408: error: {error}", file=sys.stderr)
        return error.exit_code
    print(ladder.to_json(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
