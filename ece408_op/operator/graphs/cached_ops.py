"""What MXNet's CachedOps, which hybridized Gluon blocks run, take instead of a graph with our node.

They get it with guards (see `guards`). On the CPU, outside `autograd.record()`, they get the
compiled operator, with what follows convolutions fused into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiled_graphs, graph_inference, graph_json, guards
from .graph_json import Graph


def install(mxnet: Any) -> None:
    """Have MXNet's CachedOps take their graphs from here."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """MXNet's CachedOp, which takes a symbol with our operator as well."""

    class CachedOp(plain):
        """A CachedOp; for a graph of ours it runs the guarded or the compiled form."""

        def __init__(self, sym: Any, flags: Sequence[tuple[str, Any]] = ()) -> None:
            graph = graph_json.read(sym)
            self._ours: Any = None
            # One that is partitioned has been guarded before.
            if graph is None or graph_json.is_partitioned(graph):
                super().__init__(sym, flags)
                return
            if graph_json.has_control_flow(graph):
                # With it MXNet's own operators beside control flow are often wrong as well.
                flags = [flag for flag in flags if flag[0] != "static_shape"]
            super().__init__(guards.guarded_symbol(graph, sym), flags)
            if graph_inference.has_open_sources(graph):
                self._ours = _ByShapes(plain, sym, graph, flags)
            else:
                self._ours = _DualCachedOp(plain, super(), sym, graph, flags)

        def __call__(self, *arrays: Any, **keywords: Any) -> Any:
            call = super().__call__ if self._ours is None else self._ours
            return call(*arrays, **keywords)

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            if self._ours is None:
                super()._register_op_hook(callback, monitor_all)
            else:
                self._ours.register_hook(callback, monitor_all)

    return CachedOp


class _DualCachedOp:
    """A CachedOp of a graph of ours: compiled outside `autograd.record()` on the CPU, else guarded.

    The compiled one is made at its first use; with static memory it has its own memory.
    """

    def __init__(
        self, plain: Any, guarded: Any, symbol: Any, graph: Graph, flags: Sequence[tuple[str, Any]]
    ) -> None:
        self._plain = plain
        self._guarded = guarded
        # None once the compiled one has been tried, whether it could be made or not.
        self._to_compile: tuple[Any, Graph] | None = (symbol, graph)
        self._names = symbol.list_inputs()
        self._data = {self._names[number] for number in dict(flags).get("data_indices", ())}
        self._flags = [flag for flag in flags if flag[0] not in ("data_indices", "param_indices")]
        self._compiled: Any = None
        self._order: list[int] = []
        self._is_monitored = False

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        from mxnet import autograd

        # Under train_mode a normalisation takes the batch's own averages, and adds to its others.
        plain = not (self._is_monitored or autograd.is_recording() or autograd.is_training())
        if not plain or arrays[0].context.device_type != "cpu" or not self._can_compile(arrays):
            return self._guarded.__call__(*arrays, **keywords)
        try:
            return self._compiled(*(arrays[number] for number in self._order), **keywords)
        except compiled_graphs.failures():
            return self._guarded.__call__(*arrays, **keywords)

    def register_hook(self, callback: Any, monitor_all: bool) -> None:
        """Have a monitor's callback see all nodes but guards."""
        self._is_monitored = bool(callback)
        heard = guards.unheard(callback) if callback else callback
        self._guarded._register_op_hook(heard, monitor_all)

    def _can_compile(self, arrays: tuple[Any, ...]) -> bool:
        """Whether there is a compiled operator; tries to make it the first time."""
        if self._to_compile is not None:
            (symbol, graph), self._to_compile = self._to_compile, None
            with contextlib.suppress(*compiled_graphs.failures()):
                self._compiled = self._compile(symbol, graph, arrays)
        return self._compiled is not None

    def _compile(self, symbol: Any, graph: Graph, arrays: tuple[Any, ...]) -> Any:
        inputs = dict(zip(self._names, arrays))
        floats = all(array.dtype == np.float32 for array in arrays)
        shapes = {name: array.shape for name, array in inputs.items()}
        compiled = compiled_graphs.compiled(symbol, graph, shapes, fuse=floats)
        if compiled is None:
            return None
        parameters = {name: array for name, array in inputs.items() if name not in self._data}
        guards.make_plain(compiled_graphs.weights(graph), parameters)
        names = compiled.list_inputs()
        self._order = [self._names.index(name) for name in names]
        data = [number for number, name in enumerate(names) if name in self._data]
        others = [number for number, name in enumerate(names) if name not in self._data]
        indices = [("data_indices", data), ("param_indices", others)]
        return self._plain(compiled, [*indices, *self._flags])


class _ByShapes:
    """A CachedOp for each shape of the inputs, which a graph's sources depend on."""

    def __init__(
        self, plain: Any, symbol: Any, graph: Graph, flags: Sequence[tuple[str, Any]]
    ) -> None:
        self._plain = plain
        self._symbol = symbol
        self._graph = graph
        self._flags = flags
        self._hook: tuple[Any, bool] = (None, False)
        self._made: dict[tuple[Any, ...], _DualCachedOp] = {}

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        shapes = tuple(tuple(array.shape) for array in arrays)
        if shapes not in self._made:
            self._made[shapes] = self._make(shapes)
        return self._made[shapes](*arrays, **keywords)

    def register_hook(self, callback: Any, monitor_all: bool) -> None:
        self._hook = (callback, monitor_all)
        for each in self._made.values():
            each.register_hook(callback, monitor_all)

    def _make(self, shapes: tuple[Any, ...]) -> _DualCachedOp:
        known = dict(zip(self._symbol.list_inputs(), shapes))
        graph = graph_inference.with_known_sources(self._symbol, self._graph, known)
        symbol = graph_json.write(graph, self._symbol)
        guarded = self._plain(guards.guarded_symbol(graph, symbol), self._flags)
        made = _DualCachedOp(self._plain, guarded, symbol, graph, self._flags)
        if self._hook[0]:
            made.register_hook(*self._hook)
        return made
