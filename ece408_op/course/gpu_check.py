"""Checks whether and how the GPU milestones can run here; if not, says why and what to do."""

from __future__ import annotations

import contextlib
import importlib
import threading
from dataclasses import dataclass

from .. import settings
from ..errors import NoUsableGpu
from ..host import gpu
from ..operator import gpu_support
from ..operator.loading import load_mxnet

_OF_WHOLE_NETWORKS = "ece408_op.network"
_INSTEAD = "m1.1 and m2.1 run on the CPU"
_CLOCK = "Op Time is a convolution's kernels alone, by the GPU's clock"


@dataclass(frozen=True)
class Way:
    """How a GPU milestone's network runs: on the GPU as a whole, with or without MXNet, or only its
    convolutions.

    `explanation` is a sentence about it for the user.
    """

    network_on_gpu: bool
    explanation: str
    without_mxnet: bool = False


def choose_way(own_operator: bool, whole: bool = False) -> Way:
    """Choose how to run: zero-copy under MXNet's `gpu()` if MXNet supports the GPU, else staged,
    or, if the `whole` network is to be on the GPU, by our kernels only.

    Raises `NoUsableGpu`, with a remedy, if a requirement is missing: a GPU with its driver, for our
    operator PyCUDA and nvcc, for MXNet's own a build of MXNet with code for this GPU.
    """
    if gpu.start_ahead(settings.devices()):
        if whole:
            _import_beside(_OF_WHOLE_NETWORKS)
        load_mxnet()  # which takes about as long
    gpus = gpu.require_gpus(settings.devices())
    if own_operator:
        gpu.require_our_kernels(settings.devices())
    reason = gpu_support.reason_against()
    if reason is None:
        return Way(True, f"zero-copy: the whole network runs on {gpus[settings.devices()[0]].name}")
    if not own_operator:
        raise NoUsableGpu(f"{reason}; {_remedy(reason)}")
    used = ", ".join(dict.fromkeys(gpus[index].name for index in settings.devices()))
    if whole:
        explanation = f"the whole network runs on {used} by our kernels, for {reason}; {_CLOCK}"
        return Way(False, explanation, without_mxnet=True)
    return Way(False, f"staged: convolutions run on {used}, the rest on the CPU, for {reason}")


def _import_beside(module: str) -> None:
    """Import a module on another thread while this one waits for files; errors reappear where the
    module is used."""

    def work() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    threading.Thread(target=work).start()


def _remedy(reason: str) -> str:
    if "CPU only" in reason:
        return (
            "uninstall mxnet and pip install 'ece408_op[cu117]', or stay with the CPU: " + _INSTEAD
        )
    return f"m3.1 and m4.1 run our kernels on this GPU, {_INSTEAD}"
