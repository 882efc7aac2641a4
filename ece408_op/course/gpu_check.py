"""Decides whether and how the GPU milestones can run here; if not, says why and what to do."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from .. import settings
from ..errors import NoUsableGpu
from ..host import gpu
from ..host.gpu import OLDEST_CAPABILITY, find_nvcc
from ..operator import gpu_support

_INSTEAD = "m1.1 and m2.1 run on the CPU"


@dataclass(frozen=True)
class Way:
    """Where a GPU milestone's network runs: on the GPU as a whole, or only its convolutions.

    `explanation` is a sentence about it for the user.
    """

    network_on_gpu: bool
    explanation: str


def choose_way(own_operator: bool) -> Way:
    """The way that works: zero-copy under MXNet's `gpu()` where MXNet can run there, else staged.

    Raises `NoUsableGpu`, saying what to do, if something is missing that a GPU milestone needs: a
    GPU with its driver, for our operator PyCUDA and nvcc, for MXNet's own a build of MXNet with
    code for this GPU.
    """
    gpus = gpu.find_driver().gpus
    _require_gpus(gpus)
    if own_operator:
        require_our_kernels()
    reason = gpu_support.reason_against()
    if reason is None:
        return Way(True, f"zero-copy: the whole network runs on {gpus[settings.devices()[0]].name}")
    if not own_operator:
        raise NoUsableGpu(f"{reason}; {_remedy(reason)}")
    used = ", ".join(dict.fromkeys(gpus[index].name for index in settings.devices()))
    return Way(False, f"staged: convolutions run on {used}, the rest on the CPU, for {reason}")


def _remedy(reason: str) -> str:
    if "CPU only" in reason:
        return (
            "uninstall mxnet and pip install 'ece408_op[cu117]', or stay with the CPU: " + _INSTEAD
        )
    return f"m3.1 and m4.1 run our kernels on this GPU, {_INSTEAD}"


def require_our_kernels() -> None:
    """Raise `NoUsableGpu` unless the GPUs to be used, PyCUDA and nvcc can run our CUDA kernels."""
    gpus = gpu.find_driver().gpus
    _require_gpus(gpus)
    for index in settings.devices():
        _require_capability(gpus[index].capability)
    if importlib.util.find_spec("pycuda") is None:
        raise NoUsableGpu("PyCUDA is not installed; pip install 'ece408_op[cuda]'")
    if find_nvcc() is None:
        raise NoUsableGpu("nvcc is not found; install the CUDA toolkit, or set CUDA_HOME to it")


def _require_gpus(gpus: Sequence[gpu.Gpu]) -> None:
    """Raise `NoUsableGpu` unless those to be used are there."""
    for index in settings.devices():
        if index >= len(gpus):
            raise NoUsableGpu(
                f"there is no GPU {index} (--gpu, ECE408_DEVICES); there are {len(gpus)}, "
                "numbered from 0"
            )


def _require_capability(capability: tuple[int, int]) -> None:
    if capability < OLDEST_CAPABILITY:
        found, oldest = (".".join(map(str, pair)) for pair in (capability, OLDEST_CAPABILITY))
        raise NoUsableGpu(
            f"the GPU has compute capability {found}, the CUDA kernels need {oldest}; {_INSTEAD}"
        )
