"""Agent beside one process of a job, on the same machine; it ends the process with the job.

It runs as a file, without the package, which would take longer to import. The first line of its
standard input, in JSON, describes the process: `command`, a list; `environment`, variables to add;
`directory`; `sharers`, the number of workers on this machine (`null` for a process that needs one
thread); `silence`, in seconds; `scheduler`, `null` or a list of its address, its port and a
connection timeout in seconds. When the input ends, or is silent for `silence` seconds, the agent
ends the process and its process group. The exit code is the process's, or, as in a shell, 128 plus
a signal's number, or `UNREACHED`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

_CORES = Path(__file__).resolve().parents[1] / "host" / "cores.py"
_POLL_S = 0.1
# Time for a process to end by itself after a request.
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_NOT_RUNNABLE, _NOT_FOUND = 126, 127
# Exit code if no connection to the scheduler succeeded; greater than those of signals.
UNREACHED = 250
_TRY_S, _BETWEEN_TRIES_S = 5.0, 0.5


def main() -> int:
    # Signals to the agent are meant for the process.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return 0
    order = json.loads(line)
    os.environ.update(order["environment"])
    _set_threads(order["sharers"])
    try:
        os.chdir(order["directory"])
        process = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_ending_with_its_parent(),
        )
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE
    try:
        code = _watch(process, order["silence"], order["scheduler"])
    finally:
        _end(process)
    return code if code >= 0 else 128 - code


def _set_threads(sharers: int | None) -> None:
    """Divide the cores among the workers of this machine, unless the environment says otherwise."""
    if "ECE408_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    cores = 1 if sharers is None else runpy.run_path(str(_CORES))["usable"]() // sharers
    for name in ("ECE408_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(max(1, cores))


def _ending_with_its_parent() -> Callable[[], Any]:
    """Return a function for a new process, so that it is killed when this one is. Linux only."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def unreached_line(address: str, port: str, seconds: float) -> str:
    """Return the last line on stderr for exit code `UNREACHED`."""
    return f"cannot connect to the scheduler at {address}:{port} within {seconds:g} seconds"


def _reach(address: str, port: str, seconds: float, unreached: threading.Event) -> None:
    """Connect to the scheduler, which may still have to start; set `unreached` if the timeout
    passes. MXNet itself would retry forever."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            socket.create_connection((address, int(port)), min(left, _TRY_S)).close()
            return
        time.sleep(min(left, _BETWEEN_TRIES_S))
    unreached.set()


def _watch(
    process: subprocess.Popen[bytes],
    silence: float | None,
    scheduler: tuple[str, str, float] | None,
) -> int:
    """Wait for the process, or for the end of the job, which ends it."""
    unreached = threading.Event()
    if scheduler is not None:
        threading.Thread(target=_reach, args=(*scheduler, unreached), daemon=True).start()
    heard = time.monotonic()
    while process.poll() is None:
        if scheduler is not None and unreached.is_set():
            _end(process)
            print(unreached_line(*scheduler), file=sys.stderr)
            return UNREACHED
        if select.select([0], [], [], _POLL_S)[0]:
            if not os.read(0, 4096):
                break
            heard = time.monotonic()
        if silence is not None and time.monotonic() - heard > silence:
            print(f"the job has said nothing for {silence:g} seconds", file=sys.stderr)
            break
    else:
        return process.returncode
    _end(process)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and the rest of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
