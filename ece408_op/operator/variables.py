"""The environment variables that MXNet reads: what this package sets, and why."""

from __future__ import annotations

import os

from .. import settings


def set_environment(threads: int | None = None) -> None:
    """Set what MXNet reads from the environment when it is imported.

    Without `threads` it computes with as many threads as our kernels, unless the environment says
    otherwise: its own default is half of the cores. Raises `InvalidSize` for a wrong setting.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads()))
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")


def accept_newer_cudnn() -> None:
    """Have MXNet not warn in every process that cuDNN is 8.9, which works in place of 8.5."""
    os.environ.setdefault("MXNET_CUDNN_LIB_CHECKING", "0")


def run_operators_one_by_one() -> None:
    """Have MXNet's profiler see each operator; else a network's run, and are recorded, as one."""
    for mode in ("INFERENCE", "TRAIN"):
        os.environ.setdefault(f"MXNET_EXEC_BULK_EXEC_{mode}", "0")


_MATCH_RANGE = "NNVM_EXEC_MATCH_RANGE"


def reserve() -> None:
    """Make room for the variable that `plan_memory_apart` sets, before MXNet computes.

    A new variable may move the environment in memory, while MXNet's threads read it: oneDNN does
    so in every operator. One that is there can be changed at any time. MXNet takes an empty one
    as if there were none.
    """
    os.environ.setdefault(_MATCH_RANGE, "")


def plan_memory_apart() -> None:
    """Have MXNet plan memory without sharing it between arrays, from now on.

    An array in shared memory has the layout of the one before it until it is computed. MXNet runs
    control flow as soon as it is reached, and converts such an input at once: of a random network's
    gradients 92 in 100 were wrong. Copies between contexts may fail for the same reason. There is
    no such option for one network.
    """
    os.environ[_MATCH_RANGE] = "0"
