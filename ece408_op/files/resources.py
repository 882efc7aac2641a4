"""Folders of the kernel sources and the trained models.

They are at the top of the checkout; a regular install copies them into the package.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..errors import CheckpointMissing, InvalidSetting, KernelsMissing

_PACKAGE = Path(__file__).resolve().parents[1]


def imported(module: str, who: str, extra: str) -> Any:
    """Return a module of a library that is optional for `who`. Raises `InvalidSetting` with the
    extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidSetting(
            f"{who}, which does not import ({error}); pip install 'ece408_op[{extra}]'"
        ) from error


def kernels_dir() -> Path:
    """Return the folder with the kernels' sources: `cpu/` and `cuda/`. Raises `KernelsMissing`."""
    folder = _find("kernels")
    if folder is None:
        raise KernelsMissing(f"no kernels folder in or beside {_PACKAGE}; run pip install again")
    return folder


def models_dir() -> Path:
    """Return the folder with the trained models' checkpoints. Raises `CheckpointMissing`."""
    folder = _find("models")
    if folder is None:
        raise CheckpointMissing(f"no models folder in or beside {_PACKAGE}; run pip install again")
    return folder


def cuda_folders() -> list[Path]:
    """Return the folders of the CUDA sources; their headers are included by name alone, also by
    kernel files elsewhere."""
    return sorted(each for each in (kernels_dir() / "cuda").iterdir() if each.is_dir())


def _find(name: str) -> Path | None:
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    return None
