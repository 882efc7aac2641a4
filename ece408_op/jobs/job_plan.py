"""Plan of a job: its processes, their hosts, and MXNet's environment variables."""

from __future__ import annotations

import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidSetting, InvalidSize

SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"
LOOPBACK = "127.0.0.1"
# The command of a server or the scheduler.
SERVING = (sys.executable, "-m", "ece408_op.operator.parameter_server")
# Variables of this environment that processes on other hosts receive.
_PASSED_ON = re.compile(r"(DMLC|ECE408|MXNET|NNVM|OMP|PS|CUDA)_\w+|PYTHONPATH")
# Above the well-known ports, and below Linux's range of ephemeral ports.
_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class Host:
    """A machine: its name for ssh (`None` for this one), and the IP address at which others reach
    it."""

    name: str | None
    address: str


THIS = Host(None, LOOPBACK)


@dataclass(frozen=True)
class Member:
    """A process of a job: its role, its number within the role, its machine, command and
    environment, and the number of workers on its machine."""

    role: str
    number: int
    host: Host
    command: tuple[str, ...]
    environment: Mapping[str, str]
    workers_here: int

    @property
    def root(self) -> tuple[str, str]:
        """The address and port of the job's scheduler."""
        return self.environment["DMLC_PS_ROOT_URI"], self.environment["DMLC_PS_ROOT_PORT"]

    def __str__(self) -> str:
        role = "the scheduler" if self.role == SCHEDULER else f"{self.role} {self.number}"
        return role if self.host.name is None else f"{role} on {self.host.name}"


def check_counts(workers: int, servers: int) -> None:
    """Raise `InvalidSize` for an invalid number of processes."""
    for count, what in ((workers, "workers"), (servers, "servers")):
        if count < 1:
            raise InvalidSize(f"{count} is not a number of {what}; give 1 or more")
    if workers + servers >= len(_PORTS) // 2:
        raise InvalidSize(f"{workers} workers and {servers} servers are more than there are ports")


def read_hosts(path: Path) -> list[Host]:
    """Read a file of hosts: on each line a name for ssh and, if others cannot reach that name, its
    IP address; # starts a comment.

    Raises `InvalidSetting` for a file that is unreadable or has another form, and for names without
    an address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the hosts of {path} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 2 or (words and words[0].startswith("-")):
            raise InvalidSetting(
                f"{path}:{number}: {line.strip()!r} is not a host; write its name for ssh and, if "
                "need be, its IP address"
            )
        if words:
            hosts.append(Host(words[0], _address(words[-1].rpartition("@")[2])))
    if not hosts:
        raise InvalidSetting(f"{path} names no host; write the name of one on each line")
    for host in hosts if len(hosts) > 1 else ():
        if host.address.startswith("127."):
            raise InvalidSetting(
                f"{host.name} has the address {host.address} here, where other hosts cannot reach "
                f"it; write another one behind its name in {path}"
            )
    return hosts


def _address(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InvalidSetting(f"{name} has no IP address here: {error.strerror}") from error


def job(
    command: Sequence[str], workers: int, servers: int, hosts: Sequence[Host], port: int | None
) -> list[Member]:
    """Return the processes of a job, the scheduler first and the workers, which run `command`,
    last.

    Without hosts all run on this machine. Workers and servers are spread evenly over hosts; the
    scheduler is on the first one. Ports are consecutive from `port`, or free ones.

    Raises `InvalidSize` and `InvalidSetting`.
    """
    check_counts(workers, servers)
    places = list(hosts) or [THIS]
    ports = _ports(1 + servers + workers, port, on_this_machine=not hosts)
    root = {"DMLC_PS_ROOT_URI": places[0].address, "DMLC_PS_ROOT_PORT": str(ports[0])}
    counts = {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}
    common = {**(_passed_on() if hosts else os.environ), **root, **counts}
    # MXNet ranks processes by address, in descending order, and on a host by port.
    by_rank = sorted(places, key=lambda host: host.address, reverse=True)
    on = {SCHEDULER: places[:1], SERVER: spread(by_rank, servers), WORKER: spread(by_rank, workers)}
    members: list[Member] = []
    for role, hosts_of_role in on.items():
        for number, host in enumerate(hosts_of_role):
            own = {
                "DMLC_ROLE": role,
                "DMLC_NODE_HOST": host.address,
                # MXNet chooses another one if this is in use.
                "PORT": str(ports[len(members)]),
            }
            run = tuple(command) if role == WORKER else SERVING
            here = on[WORKER].count(host)
            members.append(Member(role, number, host, run, {**common, **own}, here))
    return members


def spread(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return a host for each of `count` processes, grouped by host."""
    used = hosts[:count]
    if not used:
        return []
    return [used[number * len(used) // count] for number in range(count)]


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}


def _ports(count: int, first: int | None, on_this_machine: bool) -> list[int]:
    """Return ports in ascending order."""
    if first is not None:
        if not 1024 <= first <= 65536 - count:
            raise InvalidSetting(
                f"--port {first} is not the first of {count} ports; give one from 1024 to "
                f"{65536 - count}"
            )
        return list(range(first, first + count))
    if not on_this_machine:
        start = random.choice(_PORTS[:-count])
        return list(range(start, start + count))
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return sorted(each.getsockname()[1] for each in sockets)
