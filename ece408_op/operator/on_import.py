"""Import hook that prepares MXNet and registers `ece408_conv` whenever MXNet is imported, by the
user's script or by this package.

Help texts and installation checks do not wait for MXNet, and importing this package does not wait
for modules that only MXNet needs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_mxnet() -> None:
    """Register the operator now if MXNet is loaded, else when it is imported."""
    if sys.modules.get("mxnet") is not None:
        from . import install

        install.register()
    else:
        sys.meta_path.insert(0, _MXNetFinder())


class _MXNetFinder(MetaPathFinder):
    """Finds `mxnet` as Python would, and wraps its loader."""

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
        from . import install

        with install.around_import():
            self._loader.exec_module(module)
