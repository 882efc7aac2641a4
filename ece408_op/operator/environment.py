"""Machine and versions, as recorded with measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MXNetMissing, NoUsableGpu
from ..host.gpu import find_driver
from ..version import __version__
from .loading import load_mxnet


def machine() -> dict[str, Any]:
    """Return CPU model, usable cores, GPUs, and versions; MXNet's is `None` if it does not
    import."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpu_names(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mxnet": _mxnet_version(),
        "ece408_op": __version__,
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name from the kernel, or its architecture."""
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu_names() -> list[str]:
    try:
        return [gpu.name for gpu in find_driver().gpus]
    except NoUsableGpu:
        return []


def _mxnet_version() -> str | None:
    try:
        return str(load_mxnet().__version__)
    except MXNetMissing:
        return None
