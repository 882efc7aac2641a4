"""Sandbox for untrusted kernels: no access to files, network and other processes.

It needs no root privileges: a seccomp filter allows few system calls (`seccomp`), Landlock
restricts files (Documentation/userspace-api/landlock.rst), and resource limits bound the rest
(getrlimit(2)).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files.resources import kernels_dir
from . import seccomp

# A path, and the accesses allowed to it and everything below.
Rule = tuple[Path, int]

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

# Landlock's system calls and access flags.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
READ = _READ_FILE | _READ_DIR
READ_AND_RUN = READ | _EXECUTE
_DEVICE = READ | _WRITE_FILE | _TRUNCATE | _IOCTL
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
# All accesses of the first version; later ones added more. Version 6 also restricts signals and
# abstract socket names to the process.
_FIRST = (1 << 13) - 1
_BY_VERSION = ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL))
_SCOPED = 3

EVERYTHING = _FIRST | sum(bit for _, bit in _BY_VERSION)

_PACKAGE = Path(__file__).parents[1]
# System files that libraries read; none contains personal data.
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_KERNEL_SYSTEM = (
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
    *("/proc/sys/vm/overcommit_memory", "/sys/devices/system/cpu", "/sys/devices/system/node"),
)
_GPU_SYSTEM = ("/proc", "/sys", "/etc/nvidia", "/run", "/opt")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Linux capability constants; CAP_DAC_READ_SEARCH allows reading other users' files.
_CAPABILITIES_3, _READ_SEARCH = 0x20080522, 1 << 2


@dataclass(frozen=True)
class Limits:
    """Limits of one process: bytes of address space and number of open files (0: unlimited), CPU
    seconds of all cores together, and bytes of a file that it writes. Deleted files occupy memory
    or disk as long as they are open. (Linux's limit on threads counts all of the user's; `Session`
    counts this process's.)"""

    memory: int
    seconds: int = 600
    file_bytes: int = 64 << 20
    open_files: int = 64


def end_with_parent() -> None:
    """End this process when the thread that started it ends, even if this process is stopped."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def isolate(
    scratch: Path, limits: Limits, kernel: Path, gpu: bool = False, observed: bool = False
) -> list[str]:
    """Irrevocably give up all files but `scratch`, the kernel's own file and what libraries read,
    other processes, the network, and resources beyond the limits. Return one line for each
    protection that this machine lacks.

    With `gpu`, its devices stay accessible, and local sockets, which CUDA's driver uses; if
    `observed`, also sockets to the observing tool.
    """
    python = [Path(each) for each in (sys.prefix, sys.base_prefix)]
    python += [Path(each) for each in sys.path if each.endswith("-packages")]
    system = [Path(each) for each in (*SYSTEM, *_KERNEL_SYSTEM, *(_GPU_SYSTEM if gpu else ()))]
    rules = readable([*system, *python, _PACKAGE, kernels_dir(), kernel])
    if gpu:
        rules += [(path, _DEVICE) for path in Path("/dev").glob("nvidia*")]
    return confine([(scratch, EVERYTHING), *rules], limits, sockets=gpu, scoped=not observed)


def confine(
    rules: list[Rule],
    limits: Limits,
    sockets: bool = False,
    programs: bool = False,
    scoped: bool = True,
) -> list[str]:
    """Restrict files to the rules and plain devices, and the rest as `isolate`; with `programs`
    this process can start programs, and unless `scoped` it can reach abstract socket names."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(limits)
    lacking = []
    if not _landlock([*rules, *((Path(each), _DEVICE) for each in _DEVICES)], scoped):
        lacking.append("files can be read and written: this kernel has no Landlock")
    _drop_capabilities()
    if not seccomp.install(sockets, programs):
        lacking.append("network and processes are open: seccomp does not work here")
    return lacking


def readable(paths: Iterable[Path], accesses: int = READ) -> list[Rule]:
    """Return rules for read access to these paths, except this package's own kernels, which files
    must not call."""
    hidden = [each.resolve() for each in _PACKAGE.rglob("*.so")]
    return [(path, accesses) for each in paths for path in _without(each.resolve(), hidden)]


def _limit(limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits.seconds,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    if limits.memory:
        wanted[resource.RLIMIT_AS] = limits.memory
    if limits.open_files:
        wanted[resource.RLIMIT_NOFILE] = limits.open_files
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_capabilities() -> None:
    """Drop root's capabilities except reading files that Landlock allows."""
    header = struct.pack("Ii", _CAPABILITIES_3, 0)
    held = ctypes.create_string_buffer(24)
    if _libc.capget(header, held) == 0:
        permitted = struct.unpack("6I", held.raw)[1] & _READ_SEARCH
        _libc.capset(header, struct.pack("6I", permitted, permitted, 0, 0, 0, 0))


def _without(path: Path, hidden: list[Path]) -> Iterator[Path]:
    """Yield the path or, if something hidden is below it, everything below it except that."""
    if not any(path == each or path in each.parents for each in hidden):
        yield path
    elif path.is_dir():
        for each in path.iterdir():
            if not each.is_symlink():
                yield from _without(each, hidden)


def _landlock(rules: list[Rule], scoped: bool) -> bool:
    """Restrict files to the rules and, if `scoped`, signals and abstract socket names to this
    process; return whether that worked."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    handled = _FIRST | sum(bit for since, bit in _BY_VERSION if version >= since)
    scopes = struct.pack("QQ", 0, _SCOPED) if scoped and version >= 6 else b""
    attributes = struct.pack("Q", handled) + scopes
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        if not all(_allow(ruleset, path, allowed & handled) for path, allowed in rules):
            return False
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, allowed: int) -> bool:
    """Add a rule for an existing path; return whether that worked."""
    try:
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            allowed &= _OF_FILES
        rule = struct.pack("=Qi", allowed, number)
        return bool(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0) == 0)
    finally:
        os.close(number)
