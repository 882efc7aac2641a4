"""Views for MXNet's summaries, plots and ONNX export: its own Convolution in place of our
operator."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from . import graph_json


def install(mxnet: Any) -> None:
    """Make MXNet count our operator's parameters in summaries, and export it to ONNX as Conv."""
    for name in ("print_summary", "plot_network"):
        setattr(mxnet.visualization, name, _of_native(getattr(mxnet.visualization, name)))
    graph_class = importlib.import_module("mxnet.onnx.mx2onnx._export_onnx").MXNetGraph
    export = graph_class.create_onnx_graph_proto

    @functools.wraps(export)
    def create_onnx_graph_proto(self: Any, sym: Any, *arguments: Any, **keywords: Any) -> Any:
        return export(self, _native(sym), *arguments, **keywords)

    graph_class.create_onnx_graph_proto = create_onnx_graph_proto


def _of_native(function: Any) -> Any:
    @functools.wraps(function)
    def seeing_native(symbol: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(_native(symbol), *arguments, **keywords)

    return seeing_native


def _native(symbol: Any) -> Any:
    """Return the symbol with MXNet's Convolution for our operator."""
    if not hasattr(symbol, "tojson"):
        return symbol
    graph = graph_json.read(symbol)
    return symbol if graph is None else graph_json.write(graph_json.with_native(graph), symbol)
