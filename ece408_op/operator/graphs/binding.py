"""Chooses what MXNet runs instead of a graph with our operator, or with parts for the GPU: in
executors, in CachedOps, and in the partitions of `Symbol.optimize_for`."""

from __future__ import annotations

import functools
from typing import Any

from . import (
    block_calls,
    cached_ops,
    executors,
    graph_json,
    guards,
    part_cached_ops,
    part_executors,
    partition,
)


def install(mxnet: Any) -> None:
    """Have MXNet take graphs of ours from here. What users hold, save and export never changes."""
    symbol_class = mxnet.symbol.symbol.Symbol
    symbol_class.optimize_for = _partitioning(symbol_class.optimize_for)
    executors.install(mxnet)
    cached_ops.install(mxnet)
    partition.install(mxnet)
    part_executors.install(mxnet)
    part_cached_ops.install(mxnet)
    block_calls.install(mxnet)


def _partitioning(method: Any) -> Any:
    """`Symbol.optimize_for`, after which no guards can be added."""

    @functools.wraps(method)
    def optimize_for(self: Any, *arguments: Any, **keywords: Any) -> Any:
        graph = graph_json.read(self)
        if graph is not None and not graph_json.is_partitioned(graph):
            self = guards.guarded_symbol(graph, self, of_data="clip")
        return method(self, *arguments, **keywords)

    return optimize_for
