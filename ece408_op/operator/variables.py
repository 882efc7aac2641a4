"""Environment variables of MXNet that this package sets, and why."""

from __future__ import annotations

import contextlib
import os

from .. import settings
from ..errors import InvalidSetting


def set_environment(threads: int | None = None) -> None:
    """Set what MXNet reads from the environment when it is imported.

    Without `threads` it computes with as many threads as our kernels, unless the environment says
    otherwise: its default is half of the cores. Raises `InvalidSize` for a wrong setting.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads()))
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")


def accept_newer_cudnn() -> None:
    """Keep MXNet from warning in every process that cuDNN is 8.9; it works in place of 8.5."""
    os.environ.setdefault("MXNET_CUDNN_LIB_CHECKING", "0")


def run_operators_one_by_one() -> None:
    """Make MXNet's profiler record each operator instead of a network's whole run."""
    for mode in ("INFERENCE", "TRAIN"):
        os.environ.setdefault(f"MXNET_EXEC_BULK_EXEC_{mode}", "0")


def run_contexts_side_by_side() -> None:
    """Before MXNet computes, let its CPU contexts run our nodes at the same time, if the settings
    name several GPUs.

    A library's node takes temporary memory and a source of random numbers, of which MXNet has one
    for all CPU contexts. It takes turns with more of them, from which other random numbers come.
    """
    with contextlib.suppress(InvalidSetting):
        copies = 4 * len(settings.devices())
        for name in ("MXNET_EXEC_NUM_TEMP", "MXNET_CPU_PARALLEL_RAND_COPY"):
            if copies > 4:
                os.environ.setdefault(name, str(copies))


_MATCH_RANGE = "NNVM_EXEC_MATCH_RANGE"


def reserve() -> None:
    """Reserve the variable that `plan_memory_apart` sets, before MXNet computes.

    A new variable may move the environment in memory while MXNet's threads read it: oneDNN reads it
    in every operator. An existing one can be changed at any time. MXNet treats an empty value as
    unset.
    """
    os.environ.setdefault(_MATCH_RANGE, "")


def plan_memory_apart() -> None:
    """From now on, make MXNet plan memory without sharing it between arrays.

    An array in shared memory keeps the layout of its predecessor until it is computed. MXNet runs
    control flow as soon as it reaches it, and converts such an input immediately: 92% of the
    gradients of a random network were wrong. Copies between contexts may fail for the same reason.
    MXNet has no such option per network.
    """
    os.environ[_MATCH_RANGE] = "0"
