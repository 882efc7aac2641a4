"""What happens when MXNet is imported: compatibility with today's NumPy and Python, registration.

`register_with_mxnet` adds a finder to Python's import system that prepares MXNet and registers
`ece408_conv` whenever MXNet is imported, by the user's script or by this package. Help texts and
checks of an installation need no MXNet and do not wait for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..errors import Ece408Error
from . import (
    before_mxnet,
    cuda_libraries,
    fork_safety,
    loading,
    mxnet_functions,
    networks,
    python_calls,
    recorded,
    variables,
)
from .graphs import binding, graph_inference, native_views


def register_with_mxnet() -> None:
    """Register the operator now if MXNet is loaded, else when it is imported."""
    if sys.modules.get("mxnet") is not None:
        _register()
    else:
        sys.meta_path.insert(0, _MXNetFinder())


class _MXNetFinder(MetaPathFinder):
    """Finds `mxnet` as Python would, and has its loader prepare and register."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mxnet":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _PreparingLoader(spec.loader)
        return spec


class _PreparingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _prepare()
        with mxnet_functions.kept():
            self._loader.exec_module(module)
        recorded.watch(module.base)
        _register()


def _prepare() -> None:
    """Give MXNet the names it expects, and its CUDA build the libraries that it is linked to."""
    cuda_libraries.preload()
    before_mxnet.prepare()


def _register() -> None:
    variables.reserve()
    importlib.import_module("ece408_op.operator.python_operator")
    _silence_reported_errors(importlib.import_module("mxnet.operator"))
    mxnet = importlib.import_module("mxnet")
    fork_safety.install(mxnet)
    python_calls.install(mxnet)
    importlib.import_module("ece408_op.operator.compiled_operator").install(mxnet)
    networks.install()
    graph_inference.install(mxnet)
    binding.install(mxnet)
    native_views.install(mxnet)
    loading.tell_imported(mxnet)


def _silence_reported_errors(mxnet_operator: Any) -> None:
    """Keep errors of ours off stdout.

    MXNet prints whatever a custom operator raises to stdout, which is for results, and then
    raises an error of its own without the text. Ours are kept by `errors.remember` for the
    caller; other operators' errors are printed as before.
    """

    def print_unless_ours(*values: object) -> None:
        if not isinstance(sys.exc_info()[1], Ece408Error):
            print(*values)

    mxnet_operator.print = print_unless_ours
