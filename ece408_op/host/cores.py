"""Number of cores for this process, by affinity and the container's CPU quota; and the cores
nearest to a device."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def usable() -> int:
    """Return the usable cores, rounded down, at least 1: more threads would wait for each other."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


@functools.lru_cache(maxsize=1)
def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the container's CPU quota in cores (control groups 1 and 2); `None` without a limit.

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


def beside(pci_address: str, root: Path = Path("/")) -> frozenset[int]:
    """Return this process's cores on the NUMA node of a device such as 0000:1b:00.0; all of its
    cores if the node is unknown or has none of them."""
    allowed = frozenset(os.sched_getaffinity(0))
    node = _words(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node")
    # The node is -1 if there is only one, and in many virtual machines.
    cpus = _words(root / f"sys/devices/system/node/node{node[0]}/cpulist") if node else []
    return (allowed & _numbers(cpus[0]) if cpus else allowed) or allowed


def _numbers(ranges: str) -> set[int]:
    """Parse a list such as 0-3,8."""
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
