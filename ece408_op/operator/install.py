"""Steps around MXNet's import: compatibility with current NumPy and Python, and registration."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import Ece408Error
from . import (
    autograd_state,
    cuda_libraries,
    fork_safety,
    lazy_imports,
    loading,
    mxnet_functions,
    native_handles,
    networks,
    python_calls,
    startup_hook,
    variables,
)
from .graphs import binding, graph_inference, native_views


@contextlib.contextmanager
def around_import() -> Iterator[None]:
    """Prepare the import of MXNet in the block, and call `register` after it. MXNet then finds the
    names it expects, its CUDA build the libraries that it links to, and the cached code of its
    operators' functions; rarely used modules are imported lazily."""
    cuda_libraries.preload()
    startup_hook.prepare()
    with mxnet_functions.kept(), lazy_imports.imported_when_used():
        yield
    autograd_state.watch(sys.modules["mxnet"].base)
    register()


def register() -> None:
    """Register the operator in the imported MXNet."""
    variables.reserve()
    importlib.import_module("ece408_op.operator.python_operator")
    _silence_reported_errors(importlib.import_module("mxnet.operator"))
    mxnet = importlib.import_module("mxnet")
    fork_safety.install(mxnet)
    python_calls.install(mxnet)
    importlib.import_module("ece408_op.operator.compiled_operator").install(mxnet)
    native_handles.install(mxnet)
    networks.install()
    graph_inference.install(mxnet)
    binding.install(mxnet)
    native_views.install(mxnet)
    loading.tell_imported(mxnet)


def _silence_reported_errors(mxnet_operator: Any) -> None:
    """Keep our errors off stdout.

    MXNet prints errors of a custom operator to stdout, which is for results, and then raises an
    error of its own without the text. `errors.remember` keeps ours for the caller; other operators'
    errors are printed as before.
    """

    def print_unless_ours(*values: object) -> None:
        if not isinstance(sys.exc_info()[1], Ece408Error):
            print(*values)

    mxnet_operator.print = print_unless_ours
