"""Run time of the program in the format of /usr/bin/time, as below the course's output."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def summary() -> str:
    """Return time, memory and page faults of this process since its start, in two lines.

    Same fields and format as GNU time's default: user and system seconds, elapsed time, CPU
    utilisation, maximum resident set in KiB, file system reads and writes, faults.
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
    """Return the peak resident set; ru_maxrss would start at the parent process's value."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _elapsed_seconds() -> float:
    """Return the wall time since the kernel's recorded start of the process."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.01)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours}:{minutes:02d}:{int(rest):02d}"
    return f"{minutes}:{rest:05.2f}"
