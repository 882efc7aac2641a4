"""Where the kernel sources and the trained models lie.

They are folders at the top of the checkout, which a regular install copies into the package.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointMissing, KernelsMissing

_PACKAGE = Path(__file__).resolve().parents[1]


def kernels_dir() -> Path:
    """Folder with the sources of the kernels: `cpu/` and `cuda/`. Raises `KernelsMissing`."""
    folder = _find("kernels")
    if folder is None:
        raise KernelsMissing(f"no kernels folder in or beside {_PACKAGE}; run pip install again")
    return folder


def models_dir() -> Path:
    """Folder with the trained models' checkpoints. Raises `CheckpointMissing`."""
    folder = _find("models")
    if folder is None:
        raise CheckpointMissing(f"no models folder in or beside {_PACKAGE}; run pip install again")
    return folder


def cuda_folders() -> list[Path]:
    """Folders of the CUDA kernels' sources; headers in them are included by their names alone, also
    by a kernel file elsewhere."""
    return sorted(each for each in (kernels_dir() / "cuda").iterdir() if each.is_dir())


def results_dir() -> Path | None:
    """Folder of the checkout with what benchmarks wrote; an installed package has none."""
    folder = _PACKAGE.parent / "docs" / "results"
    return folder if folder.is_dir() else None


def _find(name: str) -> Path | None:
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    return None
