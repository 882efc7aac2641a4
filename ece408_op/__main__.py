"""`python -m ece408_op` is the `ece408` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from .host import gpu

# Commands that start NVIDIA's driver while they import the rest, which takes about as long.
ON_GPU = ("m1.2", "m3.1", "m4.1", "final")


def main(line: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, by default the process's, and end the process with its exit code."""
    words = sys.argv[1:] if line is None else line
    if words and words[0] in ON_GPU and not {"-h", "--help"}.intersection(words):
        gpu.start_ahead()
    try:
        from .cli.main import main as run
    except KeyboardInterrupt:
        # In the format of `cli.program`, which may not be imported yet.
        print("ece408: error: interrupted", file=sys.stderr)
        sys.exit(130)
    run(line)


if __name__ == "__main__":
    main()
