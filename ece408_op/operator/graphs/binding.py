"""Replacement of graphs with our operator, or with parts for the GPU, when MXNet binds them: in
executors, in CachedOps, and in `Symbol.optimize_for`."""

from __future__ import annotations

import functools
from typing import Any

from . import (
    cached_ops,
    executors,
    graph_json,
    guards,
    partition,
)


def install(mxnet: Any) -> None:
    """Make MXNet bind our graphs through this module. Users' symbols never change."""
    symbol_class = mxnet.symbol.symbol.Symbol
    symbol_class.optimize_for = _partitioning(symbol_class.optimize_for)
    executors.install(mxnet)
    cached_ops.install(mxnet)
    partition.install(mxnet)


def _partitioning(method: Any) -> Any:
    """Wrap `Symbol.optimize_for`: guards cannot be added to its result, so add them before."""

    @functools.wraps(method)
    def optimize_for(self: Any, *arguments: Any, **keywords: Any) -> Any:
        graph = graph_json.read(self)
        if graph is not None and not graph_json.is_partitioned(graph):
            self = guards.guarded_symbol(graph, self, of_data="clip")
        return method(self, *arguments, **keywords)

    return optimize_for
