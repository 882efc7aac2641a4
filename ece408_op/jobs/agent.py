"""Stands beside one process of a job, on the process's machine, and ends it when the job ends.

It is run as a file, without the package, which would take longer to import. The first line of its
standard input, JSON, is what to run: `command`, a list; `environment`, set beside what is there;
`directory`; `sharers`, how many workers share the machine's cores, `null` for what needs one
thread; `silence`, in seconds; `scheduler`, `null` or a list of its address, its port and the
seconds in which a connection to it must succeed. When the input ends, or nothing comes for as long
as `silence` says, so does the process, with all that it has started in its group. The exit code is
the process's, or, as in a shell, 128 and a signal's number, or `UNREACHED`.
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
# How long a process has to end by itself once it is asked to.
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_NOT_RUNNABLE, _NOT_FOUND = 126, 127
# The process was ended as no connection to the scheduler succeeded: beyond those of signals.
UNREACHED = 250
_TRY_S, _BETWEEN_TRIES_S = 5.0, 0.5


def main() -> int:
    # Whoever ends this process means the other one.
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
    """Share the cores among the workers of this machine, unless the environment says otherwise."""
    if "ECE408_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    cores = 1 if sharers is None else runpy.run_path(str(_CORES))["usable"]() // sharers
    for name in ("ECE408_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(max(1, cores))


def _ending_with_its_parent() -> Callable[[], Any]:
    """What a new process calls so that it is killed when this one is. Linux only."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def unreached_line(address: str, port: str, seconds: float) -> str:
    """What is the last line on stderr, with the exit code `UNREACHED`."""
    return f"cannot connect to the scheduler at {address}:{port} within {seconds:g} seconds"


def _reach(address: str, port: str, seconds: float, unreached: threading.Event) -> None:
    """Connect to the scheduler, which may have to start first; set `unreached` if it never
    succeeds. MXNet itself would try for ever."""
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
    """Wait for the process's end, or for that of the job, which ends it."""
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
    """End the process, and what is left of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
