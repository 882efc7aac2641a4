"""Input for job starters: Slurm, MPI and Kubernetes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from .job_plan import LOOPBACK, SCHEDULER, SERVER, SERVING, WORKER, Host, spread

_DEFAULT_PORT = 29408
_Starter = Callable[[Sequence[str], int, int, Sequence[Host], "int | None"], str]


def _roles(
    command: Sequence[str], workers: int, servers: int
) -> list[tuple[str, int, Sequence[str]]]:
    """Return each role's number of processes and command."""
    return [(SCHEDULER, 1, SERVING), (SERVER, servers, SERVING), (WORKER, workers, command)]


def slurm(
    command: Sequence[str], workers: int, servers: int, hosts: Sequence[Host], port: int | None
) -> str:
    """Return a script for sbatch; Slurm chooses the hosts. Its first task is the scheduler."""
    serve, work = shlex.join(SERVING), shlex.join(command)
    task = f"""\
if [ "$SLURM_PROCID" -eq 0 ]; then DMLC_ROLE={SCHEDULER} exec {serve}
elif [ "$SLURM_PROCID" -le {servers} ]; then DMLC_ROLE={SERVER} exec {serve}
else DMLC_ROLE={WORKER} exec {work}
fi"""
    return f"""\
#!/bin/bash
#SBATCH --ntasks={1 + servers + workers}
# A task that fails ends all. With more than one core for a task, add --cpus-per-task.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export DMLC_PS_ROOT_URI=$(getent ahostsv4 "$first" | awk 'NR == 1 {{ print $1 }}')
export DMLC_PS_ROOT_PORT={port or _DEFAULT_PORT}
export DMLC_NUM_WORKER={workers} DMLC_NUM_SERVER={servers}
export OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}
srun --kill-on-bad-exit=1 --label sh -c {shlex.quote(task)}"""


def mpi(
    command: Sequence[str], workers: int, servers: int, hosts: Sequence[Host], port: int | None
) -> str:
    """Return a command line for Open MPI's mpirun, which ends all when one fails. Processes use no
    MPI."""
    common = {
        "DMLC_PS_ROOT_URI": hosts[0].address if hosts else LOOPBACK,
        "DMLC_PS_ROOT_PORT": str(port or _DEFAULT_PORT),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    if not hosts:
        common["DMLC_NODE_HOST"] = LOOPBACK
    parts = []
    for role, count, run in _roles(command, workers, servers):
        own = [f"{name}={value}" for name, value in {**common, "DMLC_ROLE": role}.items()]
        names = [host.name or host.address for host in spread(hosts, count)]
        place = ["-host", ",".join(f"{each}:{names.count(each)}" for each in dict.fromkeys(names))]
        parts.append(shlex.join(["-np", str(count), *(place if names else []), "env", *own, *run]))
    return "mpirun " + " \\\n  : ".join(parts)


def kubernetes(
    command: Sequence[str], workers: int, servers: int, hosts: Sequence[Host], port: int | None
) -> str:
    """Return a list for `kubectl create -f -`, as JSON: a service with the scheduler's address, and
    a job for each role. IMAGE stands for an image with this package."""
    name, root_port = "ece408", port or _DEFAULT_PORT
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-{SCHEDULER}"},
        "spec": {
            "clusterIP": "None",
            "selector": {"job": name, "role": SCHEDULER},
            "ports": [{"port": root_port}],
        },
    }
    common = {
        "DMLC_PS_ROOT_URI": f"{name}-{SCHEDULER}",
        "DMLC_PS_ROOT_PORT": str(root_port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        # The scheduler listens on all addresses, not only its service's.
        "DMLC_USE_KUBERNETES": "1",
    }
    jobs = [
        _kubernetes_job(name, role, count, run, common)
        for role, count, run in _roles(command, workers, servers)
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, *jobs]}, indent=2)


def _kubernetes_job(
    name: str, role: str, count: int, command: Sequence[str], environment: dict[str, str]
) -> dict[str, Any]:
    own = {**environment, "DMLC_ROLE": role}
    container = {
        "name": role,
        "image": "IMAGE",
        "command": list(command),
        "env": [{"name": each, "value": value} for each, value in own.items()],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{role}"},
        "spec": {
            "completions": count,
            "parallelism": count,
            # A restarted process cannot join a running job.
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": {"job": name, "role": role}},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            },
        },
    }


STARTERS: dict[str, _Starter] = {"slurm": slurm, "mpi": mpi, "kubernetes": kubernetes}
