"""`ece408 launch`: runs a command in several processes that train one model through MXNet's
KVStore."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from ..errors import InvalidSetting
from ..jobs import job_plan, starters, supervisor
from . import arguments

# The scheduler listens once it has imported MXNet, which takes a minute from a slow network disk.
_CONNECT_S = 120.0

_EPILOG = """\
COMMAND runs as every worker, with the environment variables of MXNet's KVStore dist_sync and
dist_async (DMLC_*). Servers and the scheduler are started, too. When one of these processes dies,
all are ended, and its name, exit code and last line are printed. Other hosts need the package and
the working directory at the same paths.

examples:
  ece408 launch --workers 2 -- ece408 train 2019sp
  ece408 launch --hosts hosts.txt --workers 4 --servers 2 -- ece408 train 2019fa
  ece408 launch --workers 4 --print slurm -- ece408 train 2019sp > job.sh
"""


def add(commands: Any) -> None:
    """Add `ece408 launch`."""
    parser = arguments.add_command(
        commands,
        "launch",
        "run a command in several processes, here or on several machines, and watch them",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.option("--workers N", "processes that train (default: 2, or one per host)")
    parser.option("--servers N", "processes that sum gradients (default: 1, or one per host)")
    parser.option(
        "--hosts FILE",
        "start them over ssh on these hosts: on each line a name and, if other hosts cannot "
        "reach that name, an IP address",
    )
    parser.option(
        "--ssh COMMAND",
        "replacement for ssh, such as 'ssh -p 2222'; host name and command are appended",
        default=supervisor.SSH,
    )
    parser.option(
        "--port N", "the first of the ports to use, one for each process (default: free ones)"
    )
    parser.option(
        "--connect-timeout SECONDS",
        "end the job if a process cannot connect to the scheduler within this time (default: "
        "%(default)g)",
        type=float,
        default=_CONNECT_S,
    )
    parser.option(
        "--all-output",
        "show the output of every process, prefixed by its name, not only of worker 0",
    )
    parser.add_argument(
        "--print",
        choices=tuple(starters.STARTERS),
        help="run nothing, but print the input for this job starter",
    )
    parser.add_argument("what", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    command = options.what[1:] if options.what[:1] == ["--"] else options.what
    if not command:
        raise InvalidSetting(
            "there is no command to run; give one at the end, such as -- ece408 train 2019sp"
        )
    if command[0] == "ece408":
        # Independent of PATH on other hosts.
        command = [sys.executable, "-m", "ece408_op", *command[1:]]
    hosts = job_plan.read_hosts(options.hosts) if options.hosts is not None else []
    workers = len(hosts) or 2 if options.workers is None else options.workers
    servers = len(hosts) or 1 if options.servers is None else options.servers
    job_plan.check_counts(workers, servers)
    if not 0 < options.connect_timeout < math.inf:
        raise InvalidSetting(
            f"--connect-timeout {options.connect_timeout:g} is not a time; give seconds above 0"
        )
    if options.print is not None:
        print(starters.STARTERS[options.print](command, workers, servers, hosts, options.port))
        return
    members = job_plan.job(command, workers, servers, hosts, options.port)
    ssh = supervisor.ssh_command(options.ssh)
    print(_summary(members), file=sys.stderr)
    supervisor.run(members, ssh, options.all_output, options.connect_timeout)


def _summary(members: list[job_plan.Member]) -> str:
    """Return a line on what is started, and where."""
    roles = [member.role for member in members]
    counted = ", ".join(
        f"{roles.count(role)} {role}{'s' * (roles.count(role) > 1)}"
        for role in (job_plan.WORKER, job_plan.SERVER, job_plan.SCHEDULER)
    )
    root = members[0].environment
    where = f"{root['DMLC_PS_ROOT_URI']}:{root['DMLC_PS_ROOT_PORT']}"
    return (
        f"ece408: {counted} at {where}; the workers of a machine share its cores, unless "
        "ECE408_THREADS says otherwise"
    )
