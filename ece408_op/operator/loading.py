"""Import of MXNet at first use, and callbacks that run after it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ..errors import MXNetMissing


def load_mxnet() -> Any:
    """Return the `mxnet` module, with `ece408_conv` registered.

    Raises `MXNetMissing` when it is not installed or does not import.
    """
    try:
        return importlib.import_module("mxnet")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mxnet"
        problem = "MXNet is not installed" if missing else f"MXNet does not import ({error})"
        remedy = "install it with: pip install 'ece408_op[cpu]'"
        if sys.version_info >= (3, 13):
            remedy = "it needs Python 3.9 to 3.12; make a virtual environment with one of these"
        raise MXNetMissing(f"{problem} for {sys.executable}; {remedy}") from error
    except (AttributeError, OSError) as error:
        if "libarmpl" in str(error):
            raise MXNetMissing(
                f"MXNet does not import ({error}); its wheel for aarch64 needs Arm Performance "
                "Libraries on LD_LIBRARY_PATH; ece408_op.load_network runs networks without MXNet"
            ) from error
        raise MXNetMissing(
            f"MXNet does not import ({error}); it needs NumPy 1.x up to 1.26 and its own "
            "libraries: pip install --force-reinstall 'ece408_op[cpu]' (its CUDA build also needs "
            "NVIDIA's driver, and the libraries that 'ece408_op[cu117]' brings)"
        ) from error


def when_imported(action: Callable[[Any], object]) -> None:
    """Call `action` with the `mxnet` module, now if it is imported, else right after its import."""
    module = sys.modules.get("mxnet")
    if module is not None:
        action(module)
    else:
        _when_imported.append(action)


_when_imported: list[Callable[[Any], object]] = []


def tell_imported(mxnet: Any) -> None:
    """Run the waiting actions."""
    while _when_imported:
        _when_imported.pop()(mxnet)
