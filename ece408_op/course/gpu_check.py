"""Whether the GPU milestones can run here, and if not, why and what to do."""

from __future__ import annotations

import importlib.util

from .. import dispatch
from ..errors import NoUsableGpu
from ..gpu import OLDEST_CAPABILITY, find_driver, find_nvcc
from ..mxnet_import import load_mxnet

_INSTEAD = "m1.1 and m2.1 run on the CPU"


def require(own_operator: bool) -> None:
    """Raise `NoUsableGpu`, with the way out, unless what a GPU milestone needs is there.

    That is a GPU with its driver, and for our operator PyCUDA and nvcc, for MXNet's own a build
    of MXNet for CUDA.
    """
    gpus = find_driver().gpus
    if own_operator:
        _require_our_kernels(max(gpu.capability for gpu in gpus))
    elif not load_mxnet().runtime.Features().is_enabled("CUDA"):
        raise NoUsableGpu(
            "this MXNet is built for the CPU only; uninstall mxnet and pip install "
            f"'ece408_op[cu117]', or stay with the CPU: {_INSTEAD}"
        )


def _require_our_kernels(capability: tuple[int, int]) -> None:
    if capability < OLDEST_CAPABILITY:
        found, oldest = (".".join(map(str, pair)) for pair in (capability, OLDEST_CAPABILITY))
        raise NoUsableGpu(
            f"the GPU has compute capability {found}, the CUDA kernels need {oldest}; {_INSTEAD}"
        )
    if importlib.util.find_spec("pycuda") is None:
        raise NoUsableGpu("PyCUDA is not installed; pip install 'ece408_op[cuda]'")
    if find_nvcc() is None:
        raise NoUsableGpu("nvcc is not found; install the CUDA toolkit, or set CUDA_HOME to it")
    if "cuda" not in dispatch.backend_names():
        raise NoUsableGpu(f"this version has no CUDA kernels; {_INSTEAD}")
