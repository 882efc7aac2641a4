"""Other processes that keep the machine busy."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Keeps a core busy until its parent process ends, which handles Ctrl-C for both.
_BUSY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1000000):
        pass
"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` busy processes for the duration of a `with` block."""
    command = [sys.executable, "-c", _BUSY, str(os.getpid())]
    with contextlib.ExitStack() as started:
        for _ in range(count):
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            started.enter_context(process)
            started.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield
