"""Supervisor of a job: runs its processes, shows their output, and ends all when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ..errors import (
    Ece408Error,
    HostLost,
    InvalidSetting,
    SchedulerFailed,
    SchedulerUnreached,
    ServerFailed,
    WorkerFailed,
)
from . import agent
from .job_plan import SCHEDULER, SERVER, WORKER, Member

SSH = "ssh"
# Appended to the user's options, because ssh uses the first of several. It does not prompt, and
# reports an unreachable host within ten seconds.
_SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
)
_SSH_FAILED = 255
_FAILURES: dict[str, type[Ece408Error]] = {
    WORKER: WorkerFailed,
    SERVER: ServerFailed,
    SCHEDULER: SchedulerFailed,
}
_POLL_S = 0.1
_BEAT_S = 2.0
# If other hosts cannot be reached, their processes end by themselves after this time.
_SILENCE_S = 20.0
# Time for servers and the scheduler to end after the workers, and for all processes after a
# request: an agent's grace period and some more.
_LEAVE_S = 5.0
_END_S = agent._GRACE_S + 2.0
_MOST_OF_A_LINE = 300


class _Stream:
    """One of a process's two output streams, and its target, `None` to discard it."""

    def __init__(self, pipe: IO[bytes], target: IO[str] | None, prefix: str) -> None:
        self.pipe, self.last = pipe, ""
        self._target, self._prefix, self._rest = target, prefix, b""

    def read(self) -> bool:
        """Read available output; return whether there may be more."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._take(line.decode(errors="replace").rstrip("\r"))
        return bool(data)

    def _take(self, line: str) -> None:
        # Of a progress bar, which overwrites itself, only the final state.
        seen = line.rpartition("\r")[2].strip()
        self.last = seen or self.last
        if self._target is not None:
            print(self._prefix + line, file=self._target, flush=True)


class _Running:
    """A started member of a job: an agent beside it, which ssh starts on another host."""

    def __init__(
        self, member: Member, ssh: Sequence[str], shown: bool, prefix: str, connect_s: float
    ) -> None:
        self.member = member
        self._connect_s = connect_s
        self.is_remote = member.host.name is not None
        self.process = _start(member, ssh)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        targets = (sys.stdout, sys.stderr) if shown else (None, None)
        self.streams = [
            _Stream(pipe, target, prefix)
            for pipe, target in zip((self.process.stdout, self.process.stderr), targets)
        ]
        self._tell(json.dumps(_order(member, self.is_remote, connect_s)).encode() + b"\n")

    def _tell(self, data: bytes) -> None:
        # An agent that has ended cannot be notified.
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def beat(self) -> None:
        """Tell the agent that the job goes on."""
        if self.is_remote:
            self._tell(b"\n")

    def tell_to_end(self) -> None:
        """Make the agent end its process, and itself."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the agent, whose process is then killed, or ssh, whose end the agent notices."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def last_line(self) -> str:
        """Return the last line of its errors, else of its output."""
        output, errors = (each.last for each in self.streams)
        return (errors or output)[-_MOST_OF_A_LINE:]

    def failure(self) -> Ece408Error:
        """Return why it ended."""
        code, member = self.process.returncode, self.member
        line = self.last_line
        said = f"its last line: {line}" if line else "it printed nothing"
        if self.is_remote and code == _SSH_FAILED:
            return HostLost(
                f"{member} cannot be started, or is no longer heard of: ssh ended with exit code "
                f"{code}; {said}"
            )
        unreached = agent.unreached_line(*member.root, self._connect_s)
        if code == agent.UNREACHED and line == unreached:
            return SchedulerUnreached(
                f"{member} {line}; is a firewall between them, or is its address in --hosts wrong? "
                "--connect-timeout allows more time"
            )
        return _FAILURES[member.role](f"{member} {_ended(code)}; {said}")


def _ended(code: int) -> str:
    """Describe an exit code, which follows the shell's convention."""
    number = -code if code < 0 else code - 128
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with exit code {code}"


def ssh_command(text: str) -> list[str]:
    """Split the command of `--ssh`; host and command are appended to it. Raises
    `InvalidSetting`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidSetting(f"--ssh {text!r} is not a command: {error}") from error
    if not words:
        raise InvalidSetting("--ssh takes a command, such as 'ssh -p 2222'")
    if Path(words[0]).name == "ssh":
        words += [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return words


def _start(member: Member, ssh: Sequence[str]) -> subprocess.Popen[bytes]:
    beside = [sys.executable, str(Path(agent.__file__).resolve())]
    if member.host.name is not None:
        # Everything else goes through the agent's input, which needs no quoting.
        beside = [*ssh, member.host.name, f"exec {shlex.join(beside)}"]
    try:
        return subprocess.Popen(
            beside,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for this process only, which then ends the others.
            start_new_session=True,
        )
    except OSError as error:
        raise InvalidSetting(f"{beside[0]} does not run: {error.strerror}") from error


def _order(member: Member, is_remote: bool, connect_s: float) -> dict[str, object]:
    return {
        "command": member.command,
        "environment": dict(member.environment),
        "directory": os.getcwd(),
        "sharers": member.workers_here if member.role == WORKER else None,
        "silence": _SILENCE_S if is_remote else None,
        "scheduler": None if member.role == SCHEDULER else (*member.root, connect_s),
    }


def run(members: Sequence[Member], ssh: Sequence[str], show_all: bool, connect_s: float) -> None:
    """Run a job until all workers, and then the servers and the scheduler, have ended.

    Shows the output of worker 0 or, with a prefix, of all. In all cases no process of the job
    remains.

    Raises `WorkerFailed`, `ServerFailed` or `SchedulerFailed` as soon as a process ends with an
    exit code other than 0, `SchedulerUnreached` when a machine cannot connect to the scheduler for
    `connect_s` seconds, `HostLost` when ssh fails, and `InvalidSetting` when it does not run.
    """
    running: list[_Running] = []
    with selectors.DefaultSelector() as selector:
        try:
            for member in members:
                prefix = f"{member}: " if show_all else ""
                shown = show_all or (member.role, member.number) == (WORKER, 0)
                each = _Running(member, ssh, shown, prefix, connect_s)
                running.append(each)
                for stream in each.streams:
                    os.set_blocking(stream.pipe.fileno(), False)
                    selector.register(stream.pipe, selectors.EVENT_READ, stream)
            with _beating(running):
                _supervise(running, selector)
        finally:
            _end(running, selector)


@contextlib.contextmanager
def _beating(running: Sequence[_Running]) -> Iterator[None]:
    """Tell agents on other hosts that the job goes on, even while output is blocked."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            for each in running:
                each.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _supervise(running: Sequence[_Running], selector: selectors.BaseSelector) -> None:
    workers = [each for each in running if each.member.role == WORKER]
    leave_by = float("inf")
    while time.monotonic() < leave_by:
        _show(selector)
        ended = [each for each in running if each.process.poll() is not None]
        failed = [each for each in ended if each.process.returncode]
        if failed:
            _show_rest(selector)
            raise failed[0].failure()
        if len(ended) == len(running):
            break
        if leave_by == float("inf") and all(each in ended for each in workers):
            leave_by = time.monotonic() + _LEAVE_S
    _show_rest(selector)


def _show(selector: selectors.BaseSelector, wait: float = _POLL_S) -> bool:
    """Show new output, after at most `wait` seconds; return whether there was any."""
    if not selector.get_map():
        time.sleep(wait)
        return False
    ready = selector.select(wait)
    for key, _ in ready:
        if not key.data.read():
            selector.unregister(key.fileobj)
    return bool(ready)


def _show_rest(selector: selectors.BaseSelector) -> None:
    """Show what pipes still contain; other processes may continue to print."""
    end = time.monotonic() + 1.0
    while _show(selector, 0.0) and time.monotonic() < end:
        pass


def _end(running: Sequence[_Running], selector: selectors.BaseSelector) -> None:
    """End the remaining processes, first by a request."""
    for each in running:
        each.tell_to_end()
    try:
        end_by = time.monotonic() + _END_S
        while time.monotonic() < end_by and any(each.process.poll() is None for each in running):
            # A process may block until its output is read.
            _show(selector)
    finally:
        for each in running:
            each.kill()
            for stream in each.streams:
                stream.pipe.close()
