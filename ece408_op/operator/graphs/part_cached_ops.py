"""What hybridized blocks run instead of a graph with parts for the GPU.

Under `autograd.record()` and in training mode that is the graph without parts, as it is where the
arrays are on MXNet's GPU, or a monitor listens to each node.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

from ..memory import make_plain
from ..owners import Owner
from . import graph_json, parts
from .graph_json import Graph

# Different arrays for the parameters, such as those of several contexts, for which a graph is kept.
_MOST_KEPT = 4


def install(mxnet: Any) -> None:
    """Have MXNet's CachedOps take their graphs from here."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """The class `plain`, which takes a graph with parts as well."""

    class CachedOp(plain):
        """A CachedOp; for a graph with parts it makes others."""

        def __init__(self, sym: Any, flags: Sequence[tuple[str, Any]] = ()) -> None:
            graph = parts.read(sym)
            self._parts: Any = None
            if graph is None:
                super().__init__(sym, flags)
                return
            whole = parts.put_back_symbol(sym)
            order = [sym.list_inputs().index(name) for name in whole.list_inputs()]
            super().__init__(whole, _indexed(flags, order))
            self._order = order
            self._parts = _PartsOp(plain, sym, graph, flags)
            self._is_monitored = False
            self.repeatable = None

        def __call__(self, *arrays: Any, **keywords: Any) -> Any:
            if self._parts is None:
                return super().__call__(*arrays, **keywords)
            from mxnet import autograd

            trains = autograd.is_recording() or autograd.is_training()
            if trains or self._is_monitored or arrays[0].context.device_type != "cpu":
                self._parts.is_plain = False
                return super().__call__(*(arrays[place] for place in self._order), **keywords)
            return self._parts(*arrays, **keywords)

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            self._is_monitored = bool(callback)
            super()._register_op_hook(callback, monitor_all)

    return CachedOp


def _indexed(flags: Sequence[tuple[str, Any]], order: list[int]) -> list[tuple[str, Any]]:
    """The flags, whose lists of inputs are for the inputs in another order."""
    return [
        (name, [order.index(place) for place in value] if name.endswith("_indices") else value)
        for name, value in flags
    ]


class _PartsOp:
    """Runs a graph with parts: a CachedOp with networks of its own for the arrays that the
    parameters are in, which it keeps, so that the networks can tell whether they have changed."""

    def __init__(
        self, plain: Any, symbol: Any, graph: Graph, flags: Sequence[tuple[str, Any]]
    ) -> None:
        self._plain = plain
        self._symbol = symbol
        # Without static memory MXNet would make the operator anew, with its JSON, for every call.
        given = {**dict(flags), "static_alloc": True, "static_shape": True}
        self._flags = list(given.items())
        names = symbol.list_inputs()
        data = set(given.get("data_indices", ()))
        self._others = [n for n in range(len(names)) if n not in data]
        self._names = [names[place] for place in self._others]
        is_known = "data_indices" in given
        self._graph = parts.with_data(graph, {names[n] for n in data}) if is_known else graph
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], tuple[list[Any], Any, Owner]] = {}
        # Whether MXNet can have left no parameter in a layout of oneDNN's.
        self.is_plain = True

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        held = [arrays[place] for place in self._others]
        key = tuple(map(id, held))
        with self._lock:
            made = self._made.pop(key, None)
            if made is None or not all(map(operator.is_, held, made[0])):
                made = self._make(held)
            elif not self.is_plain:
                make_plain(held)
            self.is_plain = True
            self._made[key] = made
            if len(self._made) > _MOST_KEPT:
                del self._made[next(iter(self._made))]
            return made[1](*arrays, **keywords)

    def _make(self, held: list[Any]) -> tuple[list[Any], Any, Owner]:
        make_plain(held)
        count = sum(map(graph_json.is_part, self._graph["nodes"]))
        owner = Owner("network", count)
        graph = parts.with_foreign(self._graph, dict(zip(self._names, held)))
        graph = parts.with_attributes(graph, lambda node, part: {parts.OWNER: owner.names[part]})
        return held, self._plain(graph_json.write(graph, self._symbol), self._flags), owner
