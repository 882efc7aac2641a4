"""Session: a kernel in an isolated process that computes convolutions on request."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors, settings
from ..backends import kernel_file
from ..backends.cuda.runtime import device
from ..backends.emulator.emulator_backend import Emulated
from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error, printable
from ..host import footprint, this_python
from ..problem import ConvProblem
from . import compile_sandbox
from .guarded_arrays import HostArrays
from .guarded_gpu_arrays import Block

# Time limits for a call, and for compiling.
CALL_SECONDS = 30.0
COMPILE_SECONDS = 300.0
# Fraction of the machine's available memory.
_FRACTION_OF_MEMORY = 0.5
_MOST_SCRATCH = 256 << 20
_MOST_FILES = 1000
_SCRATCH = "ece408-lab-"
_MOST_THREADS = 512
# Text for a file that also makes other files fail.
OF_GPU_MEMORY = "of the GPU's free memory"
_POLL_SECONDS = 0.02
# Waking a sleeping process takes 0.1 to 0.3 ms.
_AWAKE_SECONDS = 0.1
_LAST_WORDS = 200
_LONGEST_ERROR = 2000
_IDLE_CALLS = 101
# Environment variables to pass on: paths of compilers and libraries, language, and settings.
_VARIABLES = ("PATH", "CXX", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ")
_PREFIXES = ("ECE408_", "CUDA_", "NVCC_", "NVIDIA_", "OMP_", "GOMP_")
_CHOOSING = ("ECE408_KERNEL", "ECE408_BACKEND")
_LONGEST_ANSWER = 1 << 20
_SIGNALS = {
    signal.SIGSEGV: "reads or writes memory that is not its own",
    signal.SIGBUS: "reads or writes memory that is not its own",
    signal.SIGFPE: "divides a whole number by zero",
    signal.SIGILL: "has an instruction that this processor lacks",
    signal.SIGABRT: "aborts",
    signal.SIGXCPU: "computes for too long",
    signal.SIGSYS: "calls what the system refuses",
}


class Ended(Exception):
    """The process has ended, for the reason in the text. `by_memory`: the kernel accessed memory
    beyond its arrays; `by_time`: it took too long."""

    def __init__(self, text: str, by_memory: bool = False, by_time: bool = False) -> None:
        super().__init__(text)
        self.by_memory, self.by_time = by_memory, by_time


class Session:
    """A process for one kernel file, for a CUDA kernel of this package by name, or for the
    package's own choice on "cpu" or "cuda". Use it in `with`.

    The process runs only during requests; between them it is stopped (SIGSTOP), so it cannot
    compute before a call begins or after it has ended. A call may take `call_seconds`, the process
    `memory` bytes (default: half of the available memory). `tool` is the command of a program that
    starts and observes the process; arrays are then on the host, and the process is not stopped.
    With `emulated` a CUDA file runs in the emulator, and `findings` returns its memory errors.
    `lacking` lists protections that this machine lacks. Entering raises `KernelCompileFailed` and
    other errors of this package, such as `NoUsableGpu`, and `Ended`.
    """

    def __init__(
        self,
        kernel: KernelFile | str,
        call_seconds: float = CALL_SECONDS,
        memory: int | None = None,
        tool: Sequence[str] = (),
        emulated: Emulated | None = None,
    ) -> None:
        self.kernel, self._tool = kernel, tool
        self._emulated = emulated
        self._mode = "emulated" if emulated else "observed" if tool else ""
        self._call_seconds = call_seconds
        self._memory = memory or int(_FRACTION_OF_MEMORY * footprint.available_bytes())
        self.lacking: list[str] = []
        on_gpu = kernel.device == "cuda" if isinstance(kernel, KernelFile) else kernel != "cpu"
        on_gpu = on_gpu and not emulated
        self.form = kernel.form if isinstance(kernel, KernelFile) else "declared"
        # CUDA files since 2020 copy by themselves.
        self.by_method = on_gpu and self.form == "course_2020"
        self._gpu = device.get(settings.devices()[0]) if on_gpu else None
        self._gpu_free = 0
        self.is_ours = isinstance(kernel, str)
        # Number of consecutive calls after which work was still going on.
        self.late = 0
        self.idle = 0.0

    def __enter__(self) -> Session:
        self.host_arrays = HostArrays()
        self._arrays: Any = self.host_arrays
        if self._gpu is not None and not self.by_method and not self._tool:
            self._arrays = Block(self._gpu)
        self.scratch, self._lock = _new_scratch()
        self._printed = open(self.scratch / ".printed", "w+b")
        read_requests, self._requests = os.pipe()
        self._replies, write_replies = os.pipe()
        given = (read_requests, write_replies, self.host_arrays.number)
        kernel = self.kernel if isinstance(self.kernel, str) else str(self.kernel.path)
        command = [*self._tool, *this_python.running(f"{__package__}.worker"), kernel]
        command += [str(self.scratch), str(self._memory), *map(str, given)]
        self._process = subprocess.Popen(
            [*command, self._mode],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=given,
            env=_environment(self.scratch),
            start_new_session=True,
        )
        os.close(read_requests)
        os.close(write_replies)
        self._buffer = b""
        self._left = False
        try:
            self.lacking = self._answer(COMPILE_SECONDS, "compiling it").get("lacking", [])
            self._rest()
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_for_tool(self, seconds: float) -> None:
        """Let the process end by itself within this time, so that a tool can write its results."""
        os.close(self._requests)
        self._requests = os.open(os.devnull, os.O_WRONLY)
        self._wait_for_end(seconds)

    def __exit__(self, *_: object) -> None:
        if self._left:
            return
        self._left = True
        self._kill()
        for number in (self._requests, self._replies):
            os.close(number)
        if self._arrays is not self.host_arrays:
            self._arrays.close()
        self.host_arrays.close()
        self._printed.close()
        _remove(self.scratch)
        os.close(self._lock)

    def forward(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, margins: str = "closed"
    ) -> np.ndarray:
        """Compute y, initially NaN, from float32 arrays in the problem's shapes.

        Raises what the kernel's backend raises, and `Ended`. With "open" margins memory around the
        arrays may be accessed and inputs written; `damage` describes such writes.
        """
        return self.timed(problem, x, w, margins)[0].copy()

    def timed(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, margins: str = "closed"
    ) -> tuple[np.ndarray, float]:
        """As `forward`; also return the seconds of the call by this process's clock. The next call
        overwrites the array."""
        self.prepare(problem, self._arrays.place(problem, margins=margins), fills=True)
        # The process is stopped: none of its threads computes ahead.
        self._arrays.fill(x, w)
        seconds = self.go()
        self.watch()
        return self._arrays.output(), seconds

    def damage(self) -> list[str]:
        """Describe the last call's changes, except to its output."""
        found: list[str] = self._arrays.damage()
        return found

    def prepare(self, problem: ConvProblem, arrays: dict[str, Any], fills: bool = False) -> None:
        """Prepare the process for calls on arrays, described by `HostArrays` or `Block`. With
        `fills`, memory that a CUDA file allocates is filled with NaN, which adds to the time of its
        calls. Raises what `forward` raises."""
        self._gpu_free = self._free_gpu_bytes()
        request = {"problem": str(problem), "fills": fills, **arrays}
        if self._emulated is not None:
            # That process cannot compile.
            library = self.scratch / ".library"
            with kernel_file.guarding(compile_sandbox.guard(self.scratch)):
                library.write_bytes(self._emulated.content(problem))
            request["library"] = str(library)
            request["emulation"] = dataclasses.astuple(self._emulated.emulation)
        self._request(request, "preparing it")

    def go(self) -> float:
        """Compute each set of arrays; return the seconds."""
        return self._seconds({"go": True}, "a call")

    def method(self, name: str) -> float:
        """Call one method of a file since 2020 on the host's arrays and its own, "prolog",
        "compute" or "epilog"; return the seconds."""
        return self._seconds({"method": name}, "a call")

    def findings(self) -> list[dict[str, Any]]:
        """Return the emulator's findings since the last call, as `emulator.findings.take` does."""
        found: list[dict[str, Any]] = self._request({"findings": True}, "no call").get(
            "findings", []
        )
        return found

    def counts(self) -> dict[str, Any]:
        """Return the warps' counts since the last call, as `emulator.counts.take` does."""
        found: dict[str, Any] = self._request({"counts": True}, "no call").get("counts", {})
        return found

    @functools.cached_property
    def has_prolog(self) -> bool:
        """Return whether the file has separate copy methods, by a request to the process. Raises
        what `forward` raises."""
        if not self.by_method:
            return False
        return bool(self._request({"has_prolog": True}, "loading it").get("has_prolog"))

    def wake(self) -> None:
        """Make the GPU switch to the process, so that no call pays for that."""
        self._request({"wake": True}, "no call")

    def measure_idle(self) -> None:
        """Set `idle` to the seconds of a request without work."""
        self.idle = statistics.median(self.go_idle() for _ in range(_IDLE_CALLS))

    def go_idle(self) -> float:
        """As `go`, but without any call."""
        return self._seconds({"idle": True}, "no call")

    def _seconds(self, request: dict[str, Any], what: str) -> float:
        """Return the seconds from the request until the process is stopped again."""
        # On the CPU the call may need the core on which this process would busy-wait.
        awake = _AWAKE_SECONDS if self._gpu is not None else 0.0
        begin = time.perf_counter()
        self._request(request, what, awake)
        return time.perf_counter() - begin

    def _request(self, request: dict[str, Any], what: str, awake: float = 0.0) -> dict[str, Any]:
        # An answer before the request cannot know the request.
        if self._buffer or select.select([self._replies], [], [], 0)[0]:
            self._refuse_early()
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, json.dumps(request).encode() + b"\n")
            return self._answer(self._call_seconds, what, awake)
        finally:
            self._rest()

    def _answer(self, seconds: float, what: str, awake: float = 0.0) -> dict[str, Any]:
        answer = self._wait(seconds, what, awake)
        if "error" not in answer:
            return answer
        kind = getattr(errors, str(answer["error"]), None)
        # The kernel may have forged the line.
        if not (isinstance(kind, type) and issubclass(kind, Ece408Error)):
            kind = Ece408Error
        # The next call gets a new process.
        raise kind(printable(str(answer.get("text"))[:_LONGEST_ERROR]).replace(device.RESTART, ""))

    def _wait(self, seconds: float, what: str, awake: float) -> dict[str, Any]:
        """Return the process's next line; busy-wait for `awake` seconds, then monitor the process.
        Raises `Ended`."""
        begin = time.monotonic()
        end = begin + seconds
        while not select.select([self._replies], [], [], 0)[0]:
            if time.monotonic() > begin + awake:
                break
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], _POLL_SECONDS)
            if ready:
                part = os.read(self._replies, 1 << 16)
                if not part:
                    raise self._ended()
                self._buffer += part
                if len(self._buffer) > _LONGEST_ANSWER:
                    self._kill()
                    raise Ended("writes to what is not its own output")
                # Monitoring would add to the call's time.
                continue
            self.watch()
            if time.monotonic() > end:
                self._kill()
                raise Ended(f"{what} takes more than {seconds:g} s", by_time=True)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._kill()
            raise Ended("writes to what is not its own output")
        return answer

    def _refuse_early(self) -> None:
        if not self._buffer and not os.read(self._replies, 1 << 16):
            raise self._ended()
        self._kill()
        raise Ended("answers before it is asked")

    def _excess(self) -> str | None:
        """Return which limit the process exceeds, if any."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            family = _family(self._process.pid)
            taken = sum(int(each["VmRSS"].split()[0]) << 10 for each in family)
            if taken + self.host_arrays.excess() > self._memory:
                return f"takes more than {self._memory >> 20} MiB of memory"
            if sum(int(each["Threads"]) for each in family) > _MOST_THREADS:
                return f"starts more than {_MOST_THREADS} threads"
        number, size = _content(self.scratch)
        if number > _MOST_FILES:
            return f"makes more than {_MOST_FILES} files"
        if size > _MOST_SCRATCH:
            return f"writes more than {_MOST_SCRATCH >> 20} MiB of files"
        if self._gpu_free - self._free_gpu_bytes() > _FRACTION_OF_MEMORY * self._gpu_free:
            return f"takes more than {_FRACTION_OF_MEMORY:.0%} {OF_GPU_MEMORY}"
        return None

    def _free_gpu_bytes(self) -> int:
        if self._gpu is None:
            return 0
        with self._gpu.active():
            return self._gpu.free_bytes()

    def watch(self) -> None:
        """Raise `Ended` if the process exceeds a limit."""
        reason = self._excess()
        if reason:
            self._kill()
            raise Ended(reason)

    def _ended(self) -> Ended:
        """Return why the process has closed its replies."""
        code = self._wait_for_end(5)
        if code is None:
            self._kill()
            return Ended("closes what is not its own")
        words = self._last_words()
        if code >= 0:
            return Ended(f"ends the process with exit code {code}{words}")
        number = signal.Signals(-code)
        text = _SIGNALS.get(number, "is ended")
        by_memory = number in (signal.SIGSEGV, signal.SIGBUS)
        return Ended(f"{text} ({number.name}){words}", by_memory)

    def _last_words(self) -> str:
        """Return the last line that the process printed, if any."""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _LAST_WORDS))
        lines = self._printed.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"; it printed: {printable(words[-1])}" if words else ""

    def _rest(self) -> None:
        """Stop the process, and wait until all of its threads have stopped; not under a tool."""
        if self._tool or self._process.returncode is not None:
            return
        self._signal(signal.SIGSTOP)
        changed = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if changed is not None and changed.si_code == os.CLD_STOPPED:
            # The next stop must be waited for, too.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def _signal(self, number: signal.Signals) -> None:
        # After a wait its number may belong to another process.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _wait_for_end(self, seconds: float) -> int | None:
        """Return the exit code of the process, which is to end within this time, or `None`; its
        children end with it."""
        if self._process.returncode is not None:
            return self._process.returncode
        end = time.monotonic() + seconds
        # Until it is waited for, its number is that of its group.
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self._process.pid, options) is None:
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)
        self._kill()
        return self._process.returncode

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


def _family(pid: int) -> list[dict[str, str]]:
    """Return /proc's data on a process and all its descendants, such as a compiler."""
    found = []
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        found.append(dict(line.split(":", 1) for line in status.splitlines() if ":" in line))
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _new_scratch() -> tuple[Path, int]:
    """Create a folder, and a descriptor that locks it against sweeping. Sweep the folders of killed
    processes first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            _sweep(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        # Another process may sweep it before it is locked.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, lock
            os.close(lock)


def _sweep(folder: Path) -> None:
    """Remove a folder of this user's that no process has locked."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        # Deeply nested folders exceed Python's recursion.
        subprocess.run(["rm", "-rf", str(folder)], capture_output=True)


def _content(folder: Path) -> tuple[int, int]:
    """Return the number and bytes of a folder's entries, up to the limits."""
    number, size = 0, 0
    folders = [str(folder)]
    while folders and number <= _MOST_FILES:
        # Entries that vanish meanwhile count as 0.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for each in entries:
                number += 1
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.path)
                else:
                    with contextlib.suppress(OSError):
                        size += each.stat(follow_symlinks=False).st_size
    return number, size


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment of a process: only needed variables of this one, which may contain
    secrets, and its settings, except those that choose a kernel."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or (name.startswith(_PREFIXES) and name not in _CHOOSING)
    }
    return {
        **environment,
        # Threads created before the sandbox would be outside it.
        "OPENBLAS_NUM_THREADS": "1",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "ECE408_CACHE": str(settings.cache()),
        "ECE408_DEVICES": ",".join(map(str, settings.devices())),
        "ECE408_THREADS": str(settings.threads()),
    }
