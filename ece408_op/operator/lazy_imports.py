"""Modules that MXNet imports for what few programs use: they are imported when that is used.

They take more than half of the time of MXNet's own import.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# For its test helpers and quantization, for sparse arrays, and for downloads.
_MODULES = ("scipy.stats", "scipy.sparse", "requests")


@contextlib.contextmanager
def imported_when_used() -> Iterator[None]:
    """Have MXNet, imported in the block, import these modules at the first use of each, and
    compare versions without setuptools."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_distutils_of_python())
        for name in _MODULES:
            stack.enter_context(_imported_when_used(name))
        yield


@contextlib.contextmanager
def _distutils_of_python() -> Iterator[None]:
    """Give MXNet, which compares versions by `distutils`, Python's own, where there is one: a hook
    of setuptools gives its copy of it, with all of setuptools, in a sixth of a second."""
    finders = enumerate(sys.meta_path)
    hooks = [(n, each) for n, each in finders if type(each).__module__ == "_distutils_hack"]
    if not hooks or sys.version_info >= (3, 12) or "distutils" in sys.modules:
        yield
        return
    for _, hook in hooks:
        sys.meta_path.remove(hook)
    try:
        with warnings.catch_warnings():
            # That Python 3.12 has no distutils.
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("distutils.version")
    finally:
        for n, hook in hooks:
            sys.meta_path.insert(n, hook)
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
