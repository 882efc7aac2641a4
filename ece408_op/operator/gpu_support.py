"""Checks whether MXNet's own operators can run on this machine's GPU; ours bring their own code.

MXNet 1.9.1 for CUDA has machine code for a few architectures and no PTX for newer ones. On those
some of its operators fail, and others silently skip work (FullyConnected omits its bias), so a
network on the GPU gives wrong results.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from typing import Any

from ..errors import NoUsableGpu
from ..host import fatbin, gpu
from .loading import load_mxnet

_STAGED = (
    "keep the network on mx.cpu(), where backend='cuda' (ECE408_BACKEND=cuda) computes the "
    "convolutions on the GPU through staged copies"
)


def reason_against() -> str | None:
    """Return why no network may run under `mx.gpu()` here, or `None` if it may.

    Raises `MXNetMissing`, and `NoUsableGpu` without a driver or a GPU.
    """
    mx = load_mxnet()
    if not mx.runtime.Features().is_enabled("CUDA"):
        return "this MXNet is built for the CPU only"
    # MXNet uses the first GPU by default, and a machine's GPUs are usually identical.
    device = gpu.find_driver().gpus[0]
    built_for = fatbin.architectures(mx.libinfo.find_lib_path()[0])
    if any(fatbin.runs_on(each, device.capability) for each in built_for):
        return None
    return (
        f"this MXNet has machine code for {', '.join(built_for) or 'no GPU'}, and GPU 0, "
        f"{device.name}, is {device.architecture}: MXNet's own layers fail there or give wrong "
        "results without an error"
    )


def refuse_networks(contexts: Iterable[Any]) -> None:
    """Raise `NoUsableGpu`, with a remedy, if MXNet cannot run networks on a context's GPU."""
    if any(context.device_type == "gpu" for context in contexts):
        reason = reason_against()
        if reason is not None:
            raise NoUsableGpu(f"no network can run under mx.gpu() here: {reason}; {_STAGED}")


def refuse_current_context() -> None:
    """Call `refuse_networks` for the current context, as in `with mx.gpu():`."""
    refuse_networks([load_mxnet().context.current_context()])


# Cached, because executors and operator calls check it.
@functools.cache
def has_random_states(index: int) -> bool:
    """Return whether MXNet has the random states on this GPU that it passes to each operator of a
    library.

    If MXNet has no code for the GPU, the kernel that seeds them fails. MXNet raises that error
    once, in the first operator that receives them: so one of MXNet's own runs first. Our operators
    do not use them. False for MXNet's CPU build, and if no GPU is found.
    """
    mx = load_mxnet()
    try:
        if not mx.runtime.Features().is_enabled("CUDA"):
            return False
        if reason_against() is None:
            return True
    except NoUsableGpu:
        return False
    # MXNet passes them to operators in turn.
    for _ in range(int(os.environ.get("MXNET_GPU_PARALLEL_RAND_COPY") or 4)):
        with contextlib.suppress(mx.MXNetError):
            mx.nd.random.uniform(shape=(1,), ctx=mx.gpu(index)).wait_to_read()
    return True
