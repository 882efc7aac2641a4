"""What a process that runs a stranger's code gives up before: files, network, processes.

Linux gives these without being root: seccomp filters refuse system calls (Documentation/
userspace-api/seccomp_filter.rst), Landlock refuses files (landlock.rst), and resource limits bound
the rest (getrlimit(2)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

# --- seccomp: a filter is instructions of the old BPF, which see a call's number and arguments.
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = 317, 1, 1
_X86_64, _X32_CALLS = 0xC000003E, 0x40000000
_CLONE_THREAD, _AF_UNIX = 0x10000, 1
# By their numbers on x86-64: other processes, other ways to open and to connect, the system.
_REFUSED = {
    **{"fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101},
    **{"process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "pidfd_getfd": 438},
    **{"pidfd_send_signal": 424, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "tkill": 200},
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "bpf": 321},
    **{"perf_event_open": 298, "userfaultfd": 323, "mount": 165, "umount2": 166, "chroot": 161},
    **{"unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248, "request_key": 249},
    **{"shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "fanotify_init": 300},
    **{"setpriority": 141, "sched_setscheduler": 144, "chmod": 90, "fchmodat": 268, "chown": 92},
    **{"fchownat": 260, "utimensat": 280, "setxattr": 188, "truncate": 76, "setrlimit": 160},
}
# glibc then falls back to clone, whose flags a filter can see.
_UNKNOWN = {"clone3": 435, "openat2": 437}
_KILL_CALL, _TGKILL, _CLONE, _SOCKET, _SOCKETPAIR, _PRLIMIT = 62, 234, 56, 41, 53, 302

# --- Landlock
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
    if not _seccomp(sockets):
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


def _seccomp(sockets: bool) -> bool:
    """Install the filter on all threads; whether that worked."""
    if platform.machine() != "x86_64":
        return False
    code = b"".join(_filter(sockets, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    call = (_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program))
    return bool(_libc.syscall(*call) == 0)


def _filter(sockets: bool, process: int) -> Iterator[bytes]:
    refuse, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_EQUAL, _X86_64, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    yield _instruction(_AT_LEAST, _X32_CALLS, 0, 1)
    yield _instruction(_RETURN, refuse)
    refused = [(number, refuse) for number in _REFUSED.values()]
    for number, answer in [*refused, *((number, unknown) for number in _UNKNOWN.values())]:
        yield _instruction(_EQUAL, number, 0, 1)
        yield _instruction(_RETURN, answer)
    # New threads, but no new processes.
    yield from _only_if(_CLONE, 0, _HAS_BITS, _CLONE_THREAD, refuse)
    for number in (_SOCKET, _SOCKETPAIR):
        # 0xFFFF is no family.
        yield from _only_if(number, 0, _EQUAL, _AF_UNIX if sockets else 0xFFFF, refuse)
    for number in (_KILL_CALL, _TGKILL):
        yield from _only_if(number, 0, _EQUAL, process, refuse)
    # Limits may be asked for, and not be set: the third argument says to what.
    yield from _only_if(_PRLIMIT, 2, _EQUAL, 0, refuse)
    yield _instruction(_RETURN, _ALLOW)


def _only_if(number: int, argument: int, test: int, value: int, otherwise: int) -> Iterator[bytes]:
    """Allow a call only where the low half of an argument passes the test."""
    yield _instruction(_EQUAL, number, 0, 4)
    yield _instruction(_LOAD, _ARGUMENTS + 8 * argument)
    yield _instruction(test, value, 0, 1)
    yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_RETURN, otherwise)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


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
