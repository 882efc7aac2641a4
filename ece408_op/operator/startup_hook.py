"""Startup hook that lets `import mxnet` come before `import ece408_op`.

The wheel has a copy of this file beside the package, and a .pth file by which every Python of the
installation runs it at startup. So it imports next to nothing, and nothing of the package.
"""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Provide the names that MXNet 1.9 expects of NumPy (before 1.24) and Python (before 3.12), and
    end a job's worker when its program fails."""
    if sys.version_info >= (3, 12):
        import setuptools  # noqa: F401  (provides distutils)
    import numpy

    numpy.__dict__.setdefault("bool", bool)
    if os.environ.get("DMLC_ROLE") == "worker" and not isinstance(sys.excepthook, _EndOfWorker):
        sys.excepthook = _EndOfWorker(sys.excepthook)


class _EndOfWorker:
    """Ends the process after an error has been printed. MXNet would wait at exit for all other
    workers, which wait for this one."""

    def __init__(self, tell: object) -> None:
        self._tell = tell

    def __call__(self, *error: object) -> None:
        self._tell(*error)  # type: ignore[operator]
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(1)


class _Finder:
    """Finds nothing, but prepares when `mxnet` is about to be imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mxnet":
            # Without contextlib, which not every program needs.
            try:  # noqa: SIM105
                prepare()
            except ImportError:
                # MXNet itself reports what is missing.
                pass


def wait_for_mxnet() -> None:
    """Prepare when MXNet is imported in this process."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
