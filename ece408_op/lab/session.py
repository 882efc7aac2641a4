"""A kernel file in a process of its own, asked for one convolution after the other."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .. import errors, settings
from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error
from ..host import footprint
from ..problem import ConvProblem
from .arrays import File, Place, layout

# Seconds for a call, and for compiling.
CALL_SECONDS = 30.0
COMPILE_SECONDS = 300.0
# Of the memory that the machine has to spare.
_SHARE_OF_MEMORY = 0.5
_MOST_SCRATCH = 256 << 20
_MOST_THREADS = 512
_POLL_SECONDS = 0.02
_LAST_WORDS = 200
_IDLE_CALLS = 101
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
    """The process is no more: what ended it, in words. `by_memory` says that the kernel touched
    memory beyond its arrays."""

    def __init__(self, text: str, by_memory: bool = False) -> None:
        super().__init__(text)
        self.by_memory = by_memory


class Session:
    """A process for one file, or, without one, for this package's own CPU kernels; use it in
    `with`.

    A call may take `call_seconds`, the process `memory` bytes, half of what the machine has to
    spare unless told. `lacking` says what cannot be kept from the kernel on this machine. Entering
    raises `KernelCompileFailed` and other errors of this package, and `Ended`.
    """

    def __init__(
        self,
        file: KernelFile | None,
        call_seconds: float = CALL_SECONDS,
        memory: int | None = None,
    ) -> None:
        self._file = file
        self._call_seconds = call_seconds
        self._memory = memory or int(_SHARE_OF_MEMORY * footprint.available_bytes())
        self.lacking: list[str] = []

    def __enter__(self) -> Session:
        self._arrays = File()
        self._scratch = Path(tempfile.mkdtemp(prefix="ece408-lab-"))
        self._printed = open(self._scratch / ".printed", "w+b")
        read_requests, self._requests = os.pipe()
        self._replies, write_replies = os.pipe()
        given = (read_requests, write_replies, self._arrays.number)
        path = "" if self._file is None else str(self._file.path)
        command = [sys.executable, "-m", f"{__package__}.worker", path]
        self._process = subprocess.Popen(
            [*command, str(self._scratch), str(self._memory), *map(str, given)],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=given,
            env=_environment(self._scratch),
            start_new_session=True,
        )
        os.close(read_requests)
        os.close(write_replies)
        self._buffer = b""
        try:
            self.lacking = self._answer(COMPILE_SECONDS, "compiling it").get("lacking", [])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()
        for number in (self._requests, self._replies):
            os.close(number)
        self._arrays.close()
        self._printed.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def forward(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, margins: str = "closed"
    ) -> np.ndarray:
        """y, onto NaN, of float32 arrays in the problem's shapes.

        Raises what the kernel's backend raises, and `Ended`. With "open" margins memory around the
        arrays may be touched, and inputs be written, and `damage` says where they were.
        """
        return self.timed(problem, x, w, margins)[0].copy()

    def timed(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, margins: str = "closed"
    ) -> tuple[np.ndarray, float]:
        """As `forward`, and the seconds that the call took, by this process's clock. The array is
        overwritten by the next call."""
        shapes = (x.shape, w.shape, problem.y_shape)
        self._places = layout([4 * math.prod(shape) for shape in shapes])
        # The last one first, for the file's whole size.
        for place, shape, values in reversed(list(zip(self._places, shapes, (x, w, np.nan)))):
            self._arrays.guard(place)
            self._arrays.array(place, shape)[...] = values
        self._inputs = (x, w)
        places = [(place.offset, place.nbytes) for place in self._places]
        # A thread that an earlier call has left must not compute ahead: weights come at the end.
        weights = self._arrays.array(self._places[1], w.shape)
        weights[...] = np.nan
        self._ask({"problem": str(problem), "places": places, "margins": margins}, "preparing it")
        weights[...] = w
        begin = time.perf_counter()
        self._ask({"go": True}, "a call")
        seconds = time.perf_counter() - begin
        return self._arrays.array(self._places[2], problem.y_shape), seconds

    def idle_seconds(self) -> float:
        """Seconds that asking takes where there is nothing to do."""
        samples = []
        for _ in range(_IDLE_CALLS):
            begin = time.perf_counter()
            self._ask({"idle": True}, "no call")
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)

    def damage(self) -> list[str]:
        """What the last call changed beside its output."""
        found = []
        for role, place in zip("xwy", self._places):
            strays = self._arrays.strays(place)
            if strays:
                found.append(f"writes {_where(strays, place)} {role}")
        for role, place, array in zip("xw", self._places, self._inputs):
            if self._arrays.array(place, array.shape).tobytes() != array.tobytes():
                found.append(f"writes into its input {role}")
        return found

    def _ask(self, request: dict[str, Any], what: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        self._answer(self._call_seconds, what)

    def _answer(self, seconds: float, what: str) -> dict[str, Any]:
        answer = self._wait(seconds, what)
        if "error" not in answer:
            return answer
        kind = getattr(errors, str(answer["error"]), None)
        # The kernel may have written the line.
        if not (isinstance(kind, type) and issubclass(kind, Ece408Error)):
            kind = Ece408Error
        raise kind(str(answer.get("text")))

    def _wait(self, seconds: float, what: str) -> dict[str, Any]:
        """The next line of the process, which is watched meanwhile. Raises `Ended`."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], _POLL_SECONDS)
            if ready:
                part = os.read(self._replies, 1 << 16)
                if not part:
                    raise self._ended()
                self._buffer += part
            reason = self._excess()
            if time.monotonic() > end:
                reason = f"{what} takes more than {seconds:g} s"
            if reason:
                self._kill()
                raise Ended(reason)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._kill()
            raise Ended("writes to what is not its own output")
        return answer

    def _excess(self) -> str | None:
        """What the process takes too much of."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if int(fields["VmRSS"].split()[0]) << 10 > self._memory:
                return f"takes more than {self._memory >> 20} MiB of memory"
            if int(fields["Threads"]) > _MOST_THREADS:
                return f"starts more than {_MOST_THREADS} threads"
        with contextlib.suppress(OSError):
            size = sum(path.stat().st_size for path in self._scratch.rglob("*"))
            if size > _MOST_SCRATCH:
                return f"writes more than {_MOST_SCRATCH >> 20} MiB of files"
        return None

    def _ended(self) -> Ended:
        """Why the process has closed its replies."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
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
        """The last line that the process printed, if any."""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _LAST_WORDS))
        lines = self._printed.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"; it printed: {words[-1]}" if words else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def _where(strays: list[int], place: Place) -> str:
    before = [each for each in strays if each < 0]
    if before:
        return f"{-before[0]} bytes before"
    return f"{strays[-1] - place.nbytes + 1} bytes behind"


def _environment(scratch: Path) -> dict[str, str]:
    """This process's environment with its settings, but for those that choose a kernel."""
    chosen = ("ECE408_KERNEL", "ECE408_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    return {
        **environment,
        # Threads that are there before the sandbox are not all within it.
        "OPENBLAS_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
        "ECE408_CACHE": str(settings.cache()),
        "ECE408_THREADS": str(settings.threads()),
    }
