"""Imports MXNet when it is first needed, and then runs the actions that waited for it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..errors import MXNetMissing

# What MXNet imports for its test helpers and quantization, for sparse arrays, and for downloads,
# which takes more than half of its own import's time.
_RARELY_USED = ("scipy.stats", "scipy.sparse", "requests")


def load_mxnet() -> Any:
    """The `mxnet` module, with `ece408_conv` registered.

    Raises `MXNetMissing` when it is not installed or does not import.
    """
    try:
        if "mxnet" in sys.modules:
            return importlib.import_module("mxnet")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_distutils_of_python())
            for name in _RARELY_USED:
                stack.enter_context(_imported_when_used(name))
            return importlib.import_module("mxnet")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mxnet"
        problem = "MXNet is not installed" if missing else f"MXNet does not import ({error})"
        raise MXNetMissing(
            f"{problem} for {sys.executable}; install it with: pip install 'ece408_op[cpu]'"
        ) from error
    except (AttributeError, OSError) as error:
        raise MXNetMissing(
            f"MXNet does not import ({error}); it needs NumPy 1.x up to 1.26 and its own "
            "libraries: pip install --force-reinstall 'ece408_op[cpu]' (its CUDA build also needs "
            "NVIDIA's driver, and the libraries that 'ece408_op[cu117]' brings)"
        ) from error


@contextlib.contextmanager
def _distutils_of_python() -> Iterator[None]:
    """Give MXNet, which compares versions by `distutils`, Python's own, where there is one: a hook
    of setuptools gives its copy of it, with all of setuptools, in a sixth of a second."""
    hooks = [each for each in sys.meta_path if type(each).__module__ == "_distutils_hack"]
    if not hooks or sys.version_info >= (3, 12) or "distutils" in sys.modules:
        yield
        return
    sys.meta_path[:] = [each for each in sys.meta_path if each not in hooks]
    try:
        with warnings.catch_warnings():
            # That Python 3.12 has no distutils.
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("distutils.version")
    finally:
        sys.meta_path[:0] = hooks
    try:
        yield
    finally:
        # Everybody else gets setuptools' copy.
        for name in [each for each in sys.modules if each.split(".")[0] == "distutils"]:
            del sys.modules[name]


class _Proxy(ModuleType):
    """Imports the module of its name when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _imported_when_used(name: str) -> Iterator[None]:
    """Give who imports a module within the block a proxy of it."""
    if name in sys.modules:
        yield
        return
    parent = name.rpartition(".")[0]
    proxy = sys.modules[name] = _Proxy(name)
    try:
        yield
    finally:
        # Everybody else gets the module itself.
        if sys.modules.get(name) is proxy:
            del sys.modules[name]
        vars(sys.modules.get(parent, proxy)).pop(name.rpartition(".")[2], None)


def when_imported(action: Callable[[Any], object]) -> None:
    """Call `action` with the `mxnet` module: now if it is imported, else as soon as it is."""
    module = sys.modules.get("mxnet")
    if module is not None:
        action(module)
    else:
        _when_imported.append(action)


_when_imported: list[Callable[[Any], object]] = []


def tell_imported(mxnet: Any) -> None:
    """Run the actions that waited for MXNet."""
    while _when_imported:
        _when_imported.pop()(mxnet)
