"""A kernel file can only compute: everything else is refused."""

import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ece408_op
from ece408_op.backends import kernel_file
from ece408_op.lab.session import Ended, Session
from ece408_op.problem import ConvProblem

# An output with room for a number for each attempt.
PROBLEM = ConvProblem.parse("b1,c1,h20,w20,m1,k1")
HEAD = """
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
#include "cpu-new-forward.h"
void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M,
                      const int C, const int H, const int W, const int K) {
"""
# By name, with meaningless arguments: the filter answers before they are inspected.
REFUSED = """
    accept accept4 acct add_key adjtimex bind bpf capset chmod chown chroot clock_adjtime
    clock_settime clone3 connect delete_module epoll_pwait2 execve execveat fanotify_init fchmod
    fchmodat
    fchown fchownat fgetxattr finit_module flistxattr flock fremovexattr fsconfig fsetxattr fsmount
    fsopen fspick futimesat getpeername getsockname getsockopt getxattr init_module
    inotify_add_watch inotify_init inotify_init1 io_cancel io_destroy io_getevents io_setup
    io_submit io_uring_enter io_uring_register io_uring_setup ioperm iopl ioprio_get ioprio_set kcmp
    kexec_load keyctl landlock_add_rule landlock_create_ruleset lchown lgetxattr link linkat listen
    listxattr llistxattr lookup_dcookie lremovexattr lsetxattr memfd_create memfd_secret
    migrate_pages mknod mknodat modify_ldt mount mount_setattr move_mount move_pages
    mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv
    msgsnd name_to_handle_at open_by_handle_at open_tree openat2 perf_event_open personality
    pidfd_getfd pidfd_open pidfd_send_signal pivot_root process_madvise process_mrelease
    process_vm_readv process_vm_writev ptrace quotactl reboot recvfrom recvmmsg recvmsg
    remap_file_pages removexattr request_key rt_sigqueueinfo rt_tgsigqueueinfo sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler seccomp semctl semget semop semtimedop sendmmsg
    sendmsg sendto setdomainname setfsgid setfsuid setgid setgroups sethostname setns setpgid
    setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt settimeofday
    setuid setxattr shmat shmctl shmdt shmget shutdown signalfd signalfd4 socket socketpair splice
    statmount swapoff swapon symlink symlinkat sync sync_file_range syncfs sysfs syslog tee tkill
    timer_create truncate umount2 unshare userfaultfd ustat utime utimensat utimes vhangup vmsplice
"""
ALLOWED = """
    access clock_gettime close dup epoll_create1 eventfd2 fcntl:F_GETFD fstat getcwd
    getdents64 getegid geteuid getgid getpid getppid getrandom getrusage gettid gettimeofday getuid
    lseek membarrier mincore mmap mprotect munmap newfstatat nanosleep openat poll pread64
    prctl:PR_GET_NAME pwrite64 read readlinkat readv rseq rt_sigaction rt_sigprocmask
    sched_getaffinity sched_getparam sched_getscheduler sched_yield set_robust_list sigaltstack
    statfs statx sysinfo times uname unlinkat wait4 write writev
"""


def _computed(path, calls=1, **keywords):
    """Return a file's output in its last call."""
    x, w = (np.ones(shape, np.float32) for shape in (PROBLEM.x_shape, PROBLEM.w_shape))
    file = kernel_file.find(str(path))
    with Session(file, **keywords) as session:
        if session.lacking:
            pytest.skip("; ".join(session.lacking))
        for _ in range(calls):
            y = session.forward(PROBLEM, x, w).ravel()
            session.host_arrays.release()
    return y


@pytest.fixture
def tried(written):
    """Evaluate expressions of C++ in a kernel file; return the error number of each, or 0."""

    def tried(expressions, before=""):
        lines = [
            f"errno = 0; y[{i}] = (long)({each}) < 0 ? errno : 0;"
            for i, each in enumerate(expressions)
        ]
        path = written("tries.cc", "\n".join([HEAD, before, *lines, "}"]))
        y = _computed(path)
        return [int(each) for each in y[: len(expressions)]]

    return tried


def _call(name):
    """Return C code of a system call by number, with this first or second argument, if any, and
    otherwise with -1."""
    name, _, argument = name.partition(":")
    arguments = ["-1L"] * 6
    if argument:
        arguments[name != "prctl"] = argument
    # Calls that the C library's headers do not know yet are not made.
    return f"""
#ifdef SYS_{name}
syscall(SYS_{name}, {", ".join(arguments)})
#else
(errno = ENOSYS, -1)
#endif
"""


def _refused(names, errors):
    return {name for name, each in zip(names, errors) if each in (errno.EPERM, errno.ENOSYS)}


def test_system_calls_are_refused_but_for_those_that_a_kernel_needs(tried):
    refused, names = REFUSED.split(), [*REFUSED.split(), *ALLOWED.split()]
    assert len(refused) > 150
    assert _refused(names, tried([_call(name) for name in names])) == set(refused)


# Calls that are allowed for some arguments, with others.
ARGUMENTS = [
    ("fcntl(1, F_SETOWN, getppid())", False),
    ("fcntl(1, F_SETSIG, SIGKILL)", False),
    ("fcntl(1, F_SETLEASE, F_WRLCK)", False),
    ("fcntl(1, F_NOTIFY, 1)", False),
    ("fcntl(1, F_ADD_SEALS, 0)", False),
    ("fcntl(1, F_GETFL)", True),
    ("fcntl(1, F_DUPFD_CLOEXEC, 10)", True),
    ("prctl(PR_SET_PDEATHSIG, 0)", False),
    ("prctl(PR_SET_DUMPABLE, 1)", False),
    ("prctl(PR_SET_CHILD_SUBREAPER, 1)", False),
    ('prctl(PR_SET_NAME, "kernel")', True),
    ("(ioctl(1, FS_IOC_SETFLAGS, &zero))", False),
    ('ioctl(1, TIOCSTI, "x")', False),
    ("ioctl(1, FIONREAD, &zero) && errno == EPERM ? -1 : 0", True),
    ("madvise(page, 4096, MADV_REMOVE)", False),
    ("madvise(page, 4096, MADV_DONTNEED)", True),
    ("fallocate(1, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096)", False),
    ("sched_setaffinity(getppid(), sizeof all, &all)", False),
    ("sched_setaffinity(0, sizeof all, &all)", True),
    ("sched_setaffinity(getpid(), sizeof all, &all)", True),
    ("syscall(SYS_prlimit64, getppid(), RLIMIT_CPU, 0, &limit)", False),
    ("syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &limit, 0)", False),
    ("syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, high, 0)", False),
    ("syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, &limit)", True),
    ("kill(getppid(), 0)", False),
    ("kill(0, 0)", False),
    ("kill(-1, 0)", False),
    ("kill(getpid(), 0)", True),
    ("syscall(SYS_tgkill, getppid(), getppid(), 0)", False),
    ("syscall(SYS_tgkill, getpid(), getpid(), 0)", True),
    ("(fork() ?: (_exit(0), 0))", False),
    ("syscall(SYS_fork) ?: (_exit(0), 0)", False),
    ("syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) ?: (_exit(0), 0)", False),
    (
        "syscall(SYS_clone, CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_NEWNS, 0, 0, 0, 0)",
        False,
    ),
    ("syscall(SYS_futex, &zero, FUTEX_WAKE, 1, 0, 0, 0)", True),
    ("socket(AF_UNIX, SOCK_STREAM, 0)", False),
    ("socket(AF_INET, SOCK_DGRAM, 0)", False),
]
BEFORE = """
    static int zero = 0;
    static struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    // Its low half is 0.
    void *high = mmap((void *)0x500000000000, 4096, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    *(struct rlimit *)high = limit;
"""


def test_calls_are_allowed_by_their_arguments(tried):
    answers = tried([expression for expression, _ in ARGUMENTS], BEFORE)
    found = [(expression, each == 0) for (expression, _), each in zip(ARGUMENTS, answers)]
    assert found == ARGUMENTS


def test_no_file_but_its_own_and_the_systems_can_be_opened(tried, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "others.cc").write_text("// another one's")
    library = next(Path(ece408_op.__file__).parent.rglob("libece408_cpu.so"))
    paths = [
        *("/etc/passwd", "/tmp", "/dev/shm", "/dev/tty", "/dev/kmsg", "/root", "/home", "/boot"),
        *(
            f"/proc/{os.getpid()}/{name}"
            for name in ("environ", "maps", "cmdline", "mem", "status")
        ),
        *map(str, (tmp_path, tmp_path / "others.cc", library)),
    ]
    read = [f'open("{path}", O_RDONLY)' for path in paths if os.path.exists(path)]
    writable = ["/tmp/x", "/dev/shm/x", "/dev/null/x", str(tmp_path / "tries.cc"), "/usr/x"]
    written = [f'open("{path}", O_WRONLY | O_CREAT, 0600)' for path in writable]
    left = [
        *('open("/proc/self/maps", O_RDONLY)', 'open("/proc/cpuinfo", O_RDONLY)'),
        *('open("/dev/null", O_RDWR)', 'open("/dev/urandom", O_RDONLY)', 'chdir(getenv("TMPDIR"))'),
        *('open("own", O_RDWR | O_CREAT, 0600)', 'open("own", O_RDONLY)', 'unlink("own")'),
        'dlopen("libm.so.6", RTLD_NOW) ? 0 : -1',
    ]
    answers = tried([*read, *written, *left])
    assert set(answers[: len(read)]) == {errno.EACCES}
    assert set(answers[len(read) : -len(left)]) <= {errno.EACCES, errno.ENOTDIR}
    assert answers[-len(left) :] == [0] * len(left)
    assert (tmp_path / "tries.cc").read_text()


def test_the_packages_kernels_cannot_be_called(tried):
    library = next(Path(ece408_op.__file__).parent.rglob("libece408_cpu.so"))
    found = [
        f'dlopen("{library}", RTLD_NOW) ? 0 : -1',
        'dlopen("libece408_cpu.so", RTLD_NOW | RTLD_NOLOAD) ? 0 : -1',
        'dlsym(RTLD_DEFAULT, "ece408_forward_f32") ? 0 : -1',
    ]
    assert 0 not in tried([f"({each}) && (errno = 1) ? -1 : 0" for each in found])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has what is given up here")
def test_root_gives_up_its_capabilities(tried):
    asked = "syscall(SYS_capget, header, held) || (held[1] & ~4U) ? (errno = 1, -1) : 0"
    assert tried([asked], "unsigned header[2] = {0x20080522, 0}, held[6];") == [0]


def test_shared_memory_keeps_its_size(tmp_path):
    """If it were truncated, the parent process would be ended by SIGBUS."""
    path = tmp_path / "cuts.cc"
    cuts = (
        "for (int i = 3; i < 1024; i++) { if (ftruncate(i, 0)) {} if (ftruncate(i, 1L << 50)) {} }"
    )
    path.write_text("".join([HEAD, cuts, "for (int i = 0; i < B * H * W; i++) y[i] = i; }"]))
    np.testing.assert_array_equal(_computed(path, calls=2), np.arange(400))


def test_memory_behind_the_arrays_counts(tmp_path):
    path = tmp_path / "fills.cc"
    # Written, and unmapped: Linux no longer counts it as the process's own.
    fills = """
        const long size = 32L << 20;
        struct stat found;
        for (int i = 3; i < 1024; i++) {
            if (fstat(i, &found) || found.st_size < 2L << 30) continue;
            for (long k = 1; k < 64; k++) {
                void *part = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, i,
                                  k * size);
                if (part != MAP_FAILED) munmap(part, size);
            }
        }
        for (;;) {}
    }"""
    path.write_text(HEAD + fills)
    with pytest.raises(Ended, match="takes more than 512 MiB of memory"):
        _computed(path, call_seconds=9, memory=512 << 20)


KILLED = """
import os, sys
from pathlib import Path
from ece408_op.lab.session import Session
with Session("cpu") as session:
    print(session._process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_neither_process_nor_folder(number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asking = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = os.pidfd_open(int(asking.stdout.readline()))
    left = list(tmp_path.glob("ece408-lab-*"))
    with Session("cpu") as session:
        # That of a live process is not removed.
        assert session.scratch not in left
        assert all(each.is_dir() for each in left)
    asking.send_signal(number)
    asking.communicate()
    assert asking.returncode == -number
    # It is readable once the process has ended.
    assert select.select([child], [], [], 60)[0]
    os.close(child)
    with Session("cpu"):
        assert len(left) == 1
        assert not left[0].exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folders_within_folders_end_the_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "nests.cc"
    nests = """
        if (chdir(getenv("TMPDIR"))) {}
        for (int i = 0; i < 3000; i++) if (mkdir("d", 0700) || chdir("d")) break;
        y[0] = 1; }"""
    path.write_text(HEAD + nests)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(Ended, match="makes more than 1000 files"):
        _computed(path)
    assert not list((tmp_path / "temporary").iterdir())


def test_the_environment_is_a_small_one(tried, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = [
        'getenv("MY_TOKEN") ? 0 : -1',
        'getenv("PATH") ? 0 : -1',
        'strcmp(getenv("HOME"), getenv("TMPDIR")) ? -1 : 0',
    ]
    assert tried([f"(errno = 1, {each})" for each in asked]) == [1, 0, 0]
