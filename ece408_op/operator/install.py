"""Steps around MXNet's import: compatibility with current NumPy and Python, and registration."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

from . import (
    autograd_state,
    checkpoint,
    cuda_libraries,
    fork_safety,
    lazy_imports,
    loading,
    mxnet_functions,
    native_handles,
    parts_at_work,
    python_calls,
    startup_hook,
    variables,
)
from .graphs import cached_ops, executors, graph_inference, native_views, partition


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
    variables.run_contexts_side_by_side()
    importlib.import_module("ece408_op.operator.python_operator")
    mxnet = importlib.import_module("mxnet")
    fork_safety.install(mxnet)
    python_calls.install(mxnet)
    importlib.import_module("ece408_op.operator.compiled_operator").install(mxnet)
    native_handles.install(mxnet)
    parts_at_work.install()
    for module in (graph_inference, executors, cached_ops, partition, native_views, checkpoint):
        module.install(mxnet)
    loading.tell_imported(mxnet)
