"""CUDA's libraries out of pip's wheels, loaded so that MXNet's CUDA build finds them.

MXNet asks for them by soname and looks beside itself and where the system has libraries, which is
not where wheels put them (nvidia/*/lib). What is loaded already is found by its soname, so they
are loaded first, each after those that it needs itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import re
from pathlib import Path

from . import variables

# In an order in which each finds what it needs.
_LIBRARIES = (
    *("cuda_runtime/libcudart.so.11.0", "nvtx/libnvToolsExt.so.1", "cuda_nvrtc/libnvrtc.so.11.2"),
    *("cublas/libcublasLt.so.11", "cublas/libcublas.so.11", "cufft/libcufft.so.10"),
    *("curand/libcurand.so.10", "cusparse/libcusparse.so.11", "cusolver/libcusolver.so.11"),
    *("nccl/libnccl.so.2", "cudnn/libcudnn_ops_infer.so.8", "cudnn/libcudnn_ops_train.so.8"),
    *("cudnn/libcudnn_cnn_infer.so.8", "cudnn/libcudnn_cnn_train.so.8"),
    *("cudnn/libcudnn_adv_infer.so.8", "cudnn/libcudnn_adv_train.so.8", "cudnn/libcudnn.so.8"),
)
# A library that this package loads for MXNet's sake must never be unloaded.
_loaded: list[ctypes.CDLL] = []


def preload() -> None:
    """Load the wheels' libraries if MXNet's CUDA build is installed; else do nothing.

    A library that no wheel has, or that does not load, is left for MXNet to find on the system,
    or to complain about.
    """
    mxnet = _cuda_build()
    if mxnet is None or _loaded:
        return
    variables.accept_newer_cudnn()
    folder = Path(str(mxnet.locate_file("nvidia")))
    for name in _LIBRARIES:
        component, soname = name.split("/")
        with contextlib.suppress(OSError):
            path = folder / component / "lib" / soname
            _loaded.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))


def _cuda_build() -> importlib.metadata.Distribution | None:
    """The installed distribution of MXNet that is built for CUDA, such as mxnet-cu117."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.fullmatch(r"mxnet[-_.]cu11\d", name, re.I):
            return distribution
    return None
