"""How many cores this process has: those it may run on, less what its container withholds."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def usable() -> int:
    """Whole cores' worth of time, at least 1: threads beyond that would wait for each other."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


@functools.lru_cache(maxsize=1)
def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the container grants (control groups 1 and 2); `None`: no limit.

    It is read once.
    """
    cgroup = root / "sys/fs/cgroup"
    version_2 = _words(cgroup / "cpu.max")
    version_1 = [
        *_words(cgroup / "cpu/cpu.cfs_quota_us"),
        *_words(cgroup / "cpu/cpu.cfs_period_us"),
    ]
    for words in (version_2, version_1):
        if len(words) == 2 and words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
