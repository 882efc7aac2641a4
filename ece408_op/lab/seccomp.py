"""Seccomp filter of processes that run untrusted code: system calls that are not listed fail.

A filter is a classic BPF program that sees a call's number and arguments
(Documentation/userspace-api/seccomp_filter.rst). Numbers are those of x86-64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS = 317, 1, 1
_X86_64, _X32_CALLS = 0xC000003E, 0x40000000
# Calls from here on came with Linux 5.1; callers have a fallback. glibc has one for clone3, too,
# whose flags a filter cannot see.
_FIRST_NEW = 424

# Allowed with any arguments. Landlock restricts their effect on files.
_MEMORY = {
    **{"mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26},
    **{"mincore": 27, "mlock": 149, "munlock": 150, "membarrier": 324, "mlock2": 325},
    **{"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    **{"pkey_mprotect": 329, "pkey_alloc": 330, "pkey_free": 331},
}
_FILES = {
    **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8},
    **{"pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22},
    **{"dup": 32, "dup2": 33, "sendfile": 40, "fsync": 74, "fdatasync": 75, "ftruncate": 77},
    **{"getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83},
    **{"rmdir": 84, "creat": 85, "unlink": 87, "readlink": 89, "umask": 95, "statfs": 137},
    **{"fstatfs": 138, "getdents64": 217, "fadvise64": 221, "openat": 257, "mkdirat": 258},
    **{"newfstatat": 262, "unlinkat": 263, "renameat": 264, "readlinkat": 267, "faccessat": 269},
    **{"dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "renameat2": 316},
    **{"copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332, "close_range": 436},
    **{"faccessat2": 439},
}
_WAITING = {
    **{"poll": 7, "select": 23, "sched_yield": 24, "pause": 34, "nanosleep": 35, "futex": 202},
    **{"epoll_create": 213, "epoll_wait": 232, "epoll_ctl": 233, "clock_nanosleep": 230},
    **{"pselect6": 270, "ppoll": 271, "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290},
    **{"epoll_create1": 291, "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287},
    **{"getitimer": 36, "alarm": 37, "setitimer": 38, "wait4": 61, "waitid": 247},
    **{"restart_syscall": 219},
}
_ITSELF = {
    **{"rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127},
    **{"rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "exit": 60},
    **{"exit_group": 231, "arch_prctl": 158, "set_tid_address": 218, "set_robust_list": 273},
    **{"rseq": 334, "getpid": 39, "getppid": 110, "gettid": 186, "getpgrp": 111, "getpgid": 121},
    **{"getsid": 124, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108},
    **{"getgroups": 115, "getresuid": 118, "getresgid": 120, "capget": 125},
}
_ASKING = {
    **{"uname": 63, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99},
    **{"times": 100, "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145},
    **{"sched_get_priority_max": 146, "sched_get_priority_min": 147, "time": 201},
    **{"sched_rr_get_interval": 148, "sched_getaffinity": 204, "clock_gettime": 228},
    **{"clock_getres": 229, "getcpu": 309, "sched_getattr": 315, "getrandom": 318},
}
_ALWAYS = {**_MEMORY, **_FILES, **_WAITING, **_ITSELF, **_ASKING}
# For local sockets.
_SOCKETS = {
    **{"connect": 42, "accept": 43, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47},
    **{"shutdown": 48, "bind": 49, "listen": 50, "getsockname": 51, "getpeername": 52},
    **{"setsockopt": 54, "getsockopt": 55, "accept4": 288},
}
_PROGRAMS = {"fork": 57, "vfork": 58, "execve": 59}


@dataclass(frozen=True)
class _Word:
    """A condition on the 32-bit word of this number (two per argument): its bits in `mask` equal
    one of these values."""

    number: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


# A call is allowed if all conditions of one of the alternatives hold.
_Ways = Sequence[Sequence[_Word]]

_AF_UNIX = 1
# Flags of glibc's threads and musl's; other flags could create namespaces, another parent, or a
# traced process.
_THREADS = (0x3D0F00, 0x7D0F00)
_NO_PROCESS_HAS = 0x7E02A000
# All advice except that which changes what other processes see, or poisons a page.
_ADVICE = (*range(5), 8, *range(10, 18), *range(20, 24), 25)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ.
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
# F_GETLK, F_SETLK, F_SETLKW, and the same for open files: NVIDIA's tools lock their own files.
_GPU_FCNTL = (5, 6, 7, 36, 37, 38)
# PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ,
# PR_GET_TIMERSLACK, PR_GET_NO_NEW_PRIVS, PR_SET_VMA.
_PRCTL = (2, 3, 15, 16, 21, 23, 30, 39, 0x53564D41)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
# NVIDIA's drivers use ioctl type "F", or 0.
_GPU_IOCTL = _Word(2, (0x4600, 0x0000), 0xFF00)


def install(sockets: bool = False, programs: bool = False) -> bool:
    """Refuse all other calls to this process, irrevocably; return whether that worked.

    With `sockets`, local sockets and the ioctls of NVIDIA's drivers are allowed; with `programs` it
    can start programs.
    """
    if platform.machine() != "x86_64":
        return False
    code = b"".join(_program(sockets, programs, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    call = (_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program))
    return bool(ctypes.CDLL(None).syscall(*call) == 0)


def _conditional(sockets: bool, programs: bool, process: int) -> dict[int, _Ways]:
    """Return the calls that are allowed with some arguments, by number."""
    own = _Word(0, (0, process))
    ways: dict[int, _Ways] = {
        28: [[_Word(4, _ADVICE)]],  # madvise
        72: [[_Word(2, (*_FCNTL, *(_GPU_FCNTL if sockets else ())))]],
        157: [[_Word(0, _PRCTL)]],
        16: [[_Word(2, _IOCTL)], *([[_GPU_IOCTL]] if sockets else [])],
        # New threads, but no new processes.
        56: [[_Word(0, _THREADS)]],  # clone
        # Signals to itself.
        62: [[_Word(0, (process,))]],  # kill
        234: [[_Word(0, (process,))]],  # tgkill
        203: [[own]],  # sched_setaffinity
        # Reading limits is allowed, not setting them: the address of new ones must be 0.
        302: [[own, _Word(4, (0,)), _Word(5, (0,))]],  # prlimit64
        # Allocation is allowed, but no punching of holes.
        285: [[_Word(2, (0,))]],  # fallocate
    }
    if programs:
        ways[56] = [[_Word(0, (0,), _NO_PROCESS_HAS)]]
    if sockets:
        ways[41] = ways[53] = [[_Word(0, (_AF_UNIX,))]]  # socket, socketpair
    return ways


def _program(sockets: bool, programs: bool, process: int) -> Iterator[bytes]:
    refuse = _instruction(_RETURN, _REFUSE | errno.EPERM)
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_EQUAL, _X86_64, 1, 0)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    yield _instruction(_AT_LEAST, _X32_CALLS, 0, 1)
    yield refuse
    more = {**(_SOCKETS if sockets else {}), **(_PROGRAMS if programs else {})}
    for number in {**_ALWAYS, **more}.values():
        yield _instruction(_EQUAL, number, 0, 1)
        yield _instruction(_RETURN, _ALLOW)
    for number, ways in _conditional(sockets, programs, process).items():
        block = [each for way in ways for each in _way(way)]
        yield _instruction(_EQUAL, number, 1, 0)
        yield _instruction(_JUMP, len(block) + 1)
        yield from block
        yield refuse
    yield _instruction(_AT_LEAST, _FIRST_NEW, 0, 1)
    yield _instruction(_RETURN, _REFUSE | errno.ENOSYS)
    yield refuse


def _way(words: Sequence[_Word]) -> list[bytes]:
    """Return instructions that allow the call if all conditions hold, and else continue after
    them."""
    code = [_instruction(_RETURN, _ALLOW)]
    for word in reversed(words):
        values = word.values
        tests = [_instruction(_EQUAL, each, len(values) - i) for i, each in enumerate(values)]
        masked = [_instruction(_AND, word.mask)] if word.mask != 0xFFFFFFFF else []
        load = [_instruction(_LOAD, _ARGUMENTS + 4 * word.number), *masked]
        code = [*load, *tests, _instruction(_JUMP, len(code)), *code]
    return code


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)
