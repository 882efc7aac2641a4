"""Lazy imports of modules that MXNet imports but few programs use.

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
    """In the block, which imports MXNet, make these modules lazy, and let MXNet compare versions
    without setuptools."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_distutils_of_python())
        for name in _MODULES:
            stack.enter_context(_imported_when_used(name))
        yield


@contextlib.contextmanager
def _distutils_of_python() -> Iterator[None]:
    """Give MXNet, which compares versions with `distutils`, Python's own copy, if it exists:
    setuptools' hook would provide its copy, and import all of setuptools, in 1/6 s."""
    finders = enumerate(sys.meta_path)
    hooks = [(n, each) for n, each in finders if type(each).__module__ == "_distutils_hack"]
    if not hooks or sys.version_info >= (3, 12) or "distutils" in sys.modules:
        yield
        return
    for _, hook in hooks:
        sys.meta_path.remove(hook)
    try:
        with warnings.catch_warnings():
            # It says that Python 3.12 has no distutils.
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("distutils.version")
    finally:
        for n, hook in hooks:
            sys.meta_path.insert(n, hook)
    try:
        yield
    finally:
        # Other importers get setuptools' copy.
        for name in [each for each in sys.modules if each.split(".")[0] == "distutils"]:
            del sys.modules[name]


class _Proxy(ModuleType):
    """A module that is imported at the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _imported_when_used(name: str) -> Iterator[None]:
    """Give importers within the block a proxy of a module."""
    if name in sys.modules:
        yield
        return
    parent = name.rpartition(".")[0]
    proxy = sys.modules[name] = _Proxy(name)
    try:
        yield
    finally:
        # Other importers get the module itself.
        if sys.modules.get(name) is proxy:
            del sys.modules[name]
        vars(sys.modules.get(parent, proxy)).pop(name.rpartition(".")[2], None)
