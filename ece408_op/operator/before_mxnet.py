"""Lets `import mxnet` come before `import ece408_op`.

The wheel has a copy of this file beside the package, and a .pth file by which every Python of the
installation runs it when it starts. So it imports next to nothing, and nothing of the package.
"""

from __future__ import annotations

import sys


def prepare() -> None:
    """Give MXNet 1.9 the names it expects of NumPy (before 1.24) and Python (before 3.12)."""
    if sys.version_info >= (3, 12):
        import setuptools  # noqa: F401  (provides distutils)
    import numpy

    numpy.__dict__.setdefault("bool", bool)


class _Finder:
    """Finds nothing, but prepares where `mxnet` is about to be imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mxnet":
            # Without contextlib, which not every program needs.
            try:  # noqa: SIM105
                prepare()
            except ImportError:
                # MXNet itself says what is missing.
                pass


def wait_for_mxnet() -> None:
    """Prepare when MXNet is imported in this process."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
