"""How many cores this process may use: its affinity, limited by its container's CPU quota."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def usable() -> int:
    """Usable cores, rounded down, at least 1: more threads would wait for each other."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


@functools.lru_cache(maxsize=1)
def cpu_quota(root: Path = Path("/")) -> float | None:
    """The container's CPU quota in cores (control groups 1 and 2); `None` without a limit.

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
