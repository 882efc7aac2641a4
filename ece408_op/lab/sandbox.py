"""What a process that runs a stranger's code gives up before: files, network, processes.

Linux gives these without being root: a seccomp filter allows few system calls (`seccomp`), Landlock
refuses files (Documentation/userspace-api/landlock.rst), and resource limits bound the rest
(getrlimit(2)).
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from . import seccomp

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Everything that changes a file or a folder; the last two came with versions 2 and 3.
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_BY_VERSION = ((2, 1 << 13), (3, _TRUNCATE))


@dataclass(frozen=True)
class Limits:
    """Bounds of one process: bytes of its address space (0: none), seconds of computing on all
    cores together, and bytes of a file that it writes. (Linux's limit on threads counts all that
    the user has; `Session` counts this process's.)"""

    memory: int
    seconds: int = 600
    file_bytes: int = 64 << 20


def isolate(scratch: Path, limits: Limits, sockets: bool = False) -> list[str]:
    """Give up, for good: writing files but in `scratch` and devices, other processes, the network,
    and what is beyond the limits. Returns what this machine has no means for, a line each.

    With `sockets`, those between processes of this machine are left, which CUDA's driver uses.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(limits)
    lacking = []
    if not _landlock(scratch):
        lacking.append("files can be written: this kernel has no Landlock")
    if not seccomp.install(sockets):
        lacking.append("network and processes are open: seccomp does not work here")
    return lacking


def _limit(limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits.seconds,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    if limits.memory:
        wanted[resource.RLIMIT_AS] = limits.memory
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _landlock(scratch: Path) -> bool:
    """Have files be changed in `scratch` and devices be written only; whether that worked."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    handled = _CHANGES | sum(bit for since, bit in _BY_VERSION if version >= since)
    attributes = ctypes.create_string_buffer(struct.pack("Q", handled), 8)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        for path, allowed in ((scratch, handled), (Path("/dev"), _WRITE_FILE | _TRUNCATE)):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed & handled, folder))
                if _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0) != 0:
                    return False
            finally:
                os.close(folder)
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
