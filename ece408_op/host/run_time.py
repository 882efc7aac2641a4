"""The program's run time, as /usr/bin/time prints it below the course's output."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def summary() -> str:
    """Time, memory and page faults of this process since its start, in two lines.

    The same fields in the same form as GNU time's default: user and system seconds, elapsed
    time, share of a CPU, maximum resident set in KiB, file system reads and writes, faults.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    elapsed = _elapsed_seconds()
    busy = usage.ru_utime + usage.ru_stime
    return (
        f"{usage.ru_utime:.2f}user {usage.ru_stime:.2f}system {_clock(elapsed)}elapsed "
        f"{100 * busy / elapsed:.0f}%CPU (0avgtext+0avgdata {_peak_kib()}maxresident)k\n"
        f"{usage.ru_inblock}inputs+{usage.ru_oublock}outputs "
        f"({usage.ru_majflt}major+{usage.ru_minflt}minor)pagefaults {usage.ru_nswap}swaps"
    )


def _peak_kib() -> int:
    """Largest resident set so far; the kernel's ru_maxrss starts at that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _elapsed_seconds() -> float:
    """Wall time since the process started, by the kernel's own record of the start."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.01)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours}:{minutes:02d}:{int(rest):02d}"
    return f"{minutes}:{rest:05.2f}"
