"""Loader of CUDA's libraries from pip's wheels, for MXNet's CUDA build.

MXNet requests them by soname and searches its own folder and the system's, but wheels install them
in nvidia/*/lib. The dynamic loader reuses a loaded library with the same soname, so this module
loads them first, in order of dependence.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
from pathlib import Path

from . import variables

# In order of dependence.
_LIBRARIES = (
    *("cuda_runtime/libcudart.so.11.0", "nvtx/libnvToolsExt.so.1", "cuda_nvrtc/libnvrtc.so.11.2"),
    *("cublas/libcublasLt.so.11", "cublas/libcublas.so.11", "cufft/libcufft.so.10"),
    *("curand/libcurand.so.10", "cusparse/libcusparse.so.11", "cusolver/libcusolver.so.11"),
    *("nccl/libnccl.so.2", "cudnn/libcudnn_ops_infer.so.8", "cudnn/libcudnn_ops_train.so.8"),
    *("cudnn/libcudnn_cnn_infer.so.8", "cudnn/libcudnn_cnn_train.so.8"),
    *("cudnn/libcudnn_adv_infer.so.8", "cudnn/libcudnn_adv_train.so.8", "cudnn/libcudnn.so.8"),
)
# CUDA versions for which MXNet builds exist.
_CUDA_VERSIONS = range(110, 120)
# References that keep the libraries loaded.
_loaded: list[ctypes.CDLL] = []


def preload() -> None:
    """Load the wheels' libraries if MXNet's CUDA build is installed; else do nothing.

    If a library is missing or does not load, MXNet searches the system for it and reports what it
    lacks.
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
    """Return the installed distribution of MXNet for CUDA, such as mxnet-cu117."""
    # Reading the metadata of all distributions takes 0.1 s.
    for version in _CUDA_VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(f"mxnet-cu{version}")
    return None
