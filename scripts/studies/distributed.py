"""Jobs that train a model over several processes: started, robbed of a process, and resumed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.errors import InvalidSetting

from . import kept_training

TERM = "2019sp"
ADDRESSES = ("10.99.0.1", "10.99.0.2")
_PROGRAM = Path(kept_training.__file__)
_LIMIT_S = 1800


@dataclass
class Place:
    """Where jobs run: what comes before the launcher's command line, what the launcher is given,
    and what takes the second of two machines off the network."""

    name: str
    before: Sequence[str] = ()
    options: Sequence[str] = ()
    cut: Sequence[str] = ()


@dataclass
class Run:
    """A job, or a single process: how it ended, how long it took, and what it said last; after it
    was harmed also how long it took to end, and then until none of its processes was left."""

    code: int
    seconds: float
    said: str
    ended_after: float | None = None
    gone_after: float = 0.0
    kept: list[dict[str, np.ndarray]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return float(self.kept[0]["accuracy"])

    @property
    def losses(self) -> np.ndarray:
        """Of each step, of all workers' images."""
        return np.mean([each["losses"] for each in self.kept], axis=0)

    @property
    def are_equal(self) -> bool:
        """Whether all workers have the same parameters to the bit."""
        first, *others = map(kept_training.parameters, self.kept)
        return all(
            value.tobytes() == other[name].tobytes()
            for other in others
            for name, value in first.items()
        )


@dataclass
class Counts:
    """Workers and servers of a job, epochs, and the images of a step."""

    workers: int
    servers: int
    epochs: int
    batch: int


def train(
    folder: Path, counts: Counts, place: Place | None, harm: Callable[[Path], None] | None = None
) -> Run:
    """Train in a folder, alone or, with a place, as a job, or go on there; once `harm` returns, the
    end is timed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("rank*.npz"):
        path.unlink()
    command = [sys.executable, str(_PROGRAM), str(folder), TERM, "--output", str(folder / "model")]
    command += ["--epochs", str(counts.epochs), "--batch-size", str(counts.batch)]
    if place is not None:
        launch = [sys.executable, "-m", "ece408_op", "launch", "--workers", str(counts.workers)]
        launch += ["--servers", str(counts.servers), *place.options, "--"]
        command = [*place.before, *launch, *command]
    started = time.monotonic()
    with subprocess.Popen(
        command,
        env={**os.environ, **environment(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        harmed: list[float] = []

        def do_harm() -> None:
            if harm is not None:
                harm(folder)
                harmed.append(time.monotonic())

        threading.Thread(target=do_harm, daemon=True).start()
        _, errors = process.communicate(timeout=_LIMIT_S)
    ended = time.monotonic()
    lines = errors.splitlines()
    print(*lines, sep="\n", file=sys.stderr)
    _wait_for(lambda: not list(processes(folder)))
    return Run(
        process.returncode,
        ended - started,
        lines[-1] if lines else "",
        ended - harmed[0] if harmed else None,
        time.monotonic() - ended,
        kept_training.read(folder),
    )


def environment(folder: Path) -> dict[str, str]:
    """What a job's processes have in their environment; the data is found as ever."""
    data = os.environ.get("ECE408_DATA") or str(Path.home() / ".cache/ece408_op/fashion-mnist")
    return {"ECE408_CACHE": str(folder), "ECE408_DATA": data}


def processes(folder: Path, *wanted: str) -> Iterator[int]:
    """The processes that were started for the job of a folder, with these words in their
    environment, too."""
    words = {f"ECE408_CACHE={folder}", *wanted}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found = (each / "environ").read_bytes().decode(errors="replace").split("\0")
            if words <= set(found):
                yield int(each.name)


def killing(role: str, epoch: int) -> Callable[[Path], None]:
    """Kills the last process of a role in the epoch after this one."""

    def kill(folder: Path) -> None:
        _wait_for_epoch(folder, epoch)
        found = sorted(processes(folder, f"DMLC_ROLE={role}"), key=_port)
        os.kill(found[-1], signal.SIGKILL)

    return kill


def cutting(place: Place, epoch: int) -> Callable[[Path], None]:
    """Takes the second machine off the network in the epoch after this one."""

    def cut(folder: Path) -> None:
        _wait_for_epoch(folder, epoch)
        _ip(*place.cut, "down")

    return cut


def join(place: Place) -> None:
    """Have the second machine on the network again."""
    _ip(*place.cut, "up")


def _wait_for_epoch(folder: Path, epoch: int) -> None:
    """Wait until the job of a folder is well within the epoch after this one."""
    state = folder / "training" / f"{TERM}-baseline" / f"epoch-{epoch:04d}.npz"
    _wait_for(lambda: state.exists() and bool(list(processes(folder, "DMLC_ROLE=worker"))))
    # A job that goes on has to start, on few cores.
    time.sleep(30)


def _port(process: int) -> int:
    text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    return int(text.partition("\0PORT=")[2].partition("\0")[0])


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a job did not come so far")
        time.sleep(0.1)


@contextlib.contextmanager
def two_machines(sshd: str | None) -> Iterator[Place]:
    """Two network namespaces, joined by a pair of interfaces, that jobs are started in by ssh to
    both from the first one: by `sshd`, a program, or without one by a stand-in for ssh.

    Raises `InvalidSetting` where this user cannot make them.
    """
    names = [f"ece408-{os.getpid()}-{number}" for number in (1, 2)]
    with tempfile.TemporaryDirectory(prefix="ece408-hosts-") as temporary:
        folder = Path(temporary)
        with contextlib.ExitStack() as stack:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            _ip(
                "link",
                "add",
                "v1",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "v2",
                "netns",
                names[1],
            )
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"{ADDRESSES[number - 1]}/24", "dev", f"v{number}")
                for interface in ("lo", f"v{number}"):
                    _ip("-n", name, "link", "set", interface, "up")
            hosts = folder / "hosts"
            hosts.write_text("".join(f"{address}\n" for address in ADDRESSES))
            if sshd is None:
                ssh = _stand_in(folder, names)
            else:
                ssh = stack.enter_context(_real(folder, names, sshd))
            yield Place(
                "two namespaces, " + ("a stand-in for ssh" if sshd is None else "ssh"),
                ["ip", "netns", "exec", names[0]],
                ["--hosts", str(hosts), "--ssh", ssh],
                # The stand-in does not go by the network, and would not notice.
                ["-n", names[1], "link", "set", "v2"] if sshd else [],
            )


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise InvalidSetting(
            f"ip {' '.join(arguments)}: {result.stderr.strip()}; namespaces take root, or leave "
            "them out: --loopback-only"
        )


def _stand_in(folder: Path, names: Sequence[str]) -> str:
    """A command that takes a host and a command, as ssh does, and has an environment as empty."""
    path = folder / "enter"
    cases = "".join(f"{a}) name={n};;\n" for a, n in zip(ADDRESSES, names))
    clean = f"env -i HOME={shlex.quote(str(Path.home()))} PATH=/usr/bin:/bin"
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexec ip netns exec $name {clean} sh -c "$2"\n'
    )
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def _real(folder: Path, names: Sequence[str], sshd: str) -> Iterator[str]:
    """OpenSSH's server in both namespaces, with keys of their own; the client's command."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    (folder / "config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    key = (folder / "host.pub").read_text().split()[:2]
    known = "".join(f"{address} {' '.join(key)}\n" for address in ADDRESSES)
    (folder / "known").write_text(known)
    # A user and a folder that the server asks for, for it alone.
    (folder / "passwd").write_text(
        Path("/etc/passwd").read_text() + "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    )
    script = (
        f"mount --bind {folder}/passwd /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd "
        f"&& exec {shlex.quote(sshd)} -D -e -f {folder}/config"
    )
    servers = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", script],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name in names
    ]
    time.sleep(1)
    try:
        yield f"ssh -F none -i {folder}/user -o UserKnownHostsFile={folder}/known"
    finally:
        for each in servers:
            each.terminate()
            each.wait()


def record(run: Run, /, **more: Any) -> dict[str, Any]:
    """A run for JSON."""
    found: dict[str, Any] = {"exit code": run.code, "seconds": round(run.seconds, 1)}
    if run.ended_after is not None:
        found.update({"ended after, s": round(run.ended_after, 1), "said": run.said})
    return {**found, "none left after, s": round(run.gone_after, 1), **more}
