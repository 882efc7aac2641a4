"""CachedOps, which hybridized blocks run, on graphs with parts for the GPU.

Under `autograd.record()`, in training mode, with arrays on MXNet's GPU and under a monitor they run
the graph without parts.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..array_memory import make_plain
from ..native_handles import Owner
from . import graph_json, partition, parts

# Maximum number of parameter sets, such as those of several contexts, with their own graph.
_MOST_KEPT = 4
# Maximum number of data sizes whose parts are known.
_MOST_SIZES = 64


def install(mxnet: Any) -> None:
    """Make MXNet's CachedOps use this module."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """Return a subclass of `plain` that accepts graphs with parts."""

    class CachedOp(plain):
        """A CachedOp that runs graphs with parts by other CachedOps."""

        def __init__(self, sym: Any, flags: Sequence[tuple[str, Any]] = ()) -> None:
            self._parts: Any = None
            if parts.read(sym) is None:
                super().__init__(sym, flags)
                return
            whole = parts.put_back_symbol(sym)
            order = [sym.list_inputs().index(name) for name in whole.list_inputs()]
            super().__init__(whole, _indexed(flags, order))
            self._order = order
            self._parts = _PartsOp(plain, sym, flags)
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
    """Return the flags with lists of inputs renumbered for another order."""
    return [
        (name, [order.index(place) for place in value] if name.endswith("_indices") else value)
        for name, value in flags
    ]


@dataclass
class _Kept:
    """One set of parameter arrays: the operators by sizes and types of data, and all of them by the
    nodes of their parts."""

    arrays: list[Any]
    for_data: dict[Any, _Partitioned] = field(default_factory=dict)
    every: dict[Any, _Partitioned] = field(default_factory=dict)


@dataclass(frozen=True)
class _Partitioned:
    """A CachedOp of a graph with parts, the positions of its inputs in the call, and the owner of
    its networks."""

    op: Any
    order: list[int]
    owner: Owner


class _PartsOp:
    """Runs a graph with the parts that suit a call's arrays: one CachedOp, with its own networks,
    per set of parameter arrays, which it keeps so that the networks can detect changes."""

    def __init__(self, plain: Any, symbol: Any, flags: Sequence[tuple[str, Any]]) -> None:
        self._plain = plain
        self._whole = parts.put_back_symbol(symbol)
        self._machine = parts.machine(symbol)
        # Without static memory MXNet would recreate the operator, and parse its JSON, in every
        # call.
        given = {**dict(flags), "static_alloc": True, "static_shape": True}
        self._flags = list(given.items())
        self._names = symbol.list_inputs()
        self._data = list(given.get("data_indices", ()))
        self._is_known = "data_indices" in given
        self._others = [n for n in range(len(self._names)) if n not in set(self._data)]
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, ...], _Kept] = {}
        # Whether certainly no parameter is in oneDNN's layout.
        self.is_plain = True

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        held = [arrays[place] for place in self._others]
        key = tuple(map(id, held))
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None or not all(map(operator.is_, held, kept.arrays)):
                kept = _Kept(held)
                self.is_plain = False
            if not self.is_plain:
                make_plain(held)
            self.is_plain = True
            self._kept[key] = kept
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._partitioned(kept, arrays)
            return found.op(*(arrays[place] for place in found.order), **keywords)

    def _partitioned(self, kept: _Kept, arrays: Sequence[Any]) -> _Partitioned:
        key = tuple((arrays[place].shape, arrays[place].dtype) for place in self._data)
        if key not in kept.for_data:
            if len(kept.for_data) == _MOST_SIZES:
                kept.for_data.clear()
                kept.every.clear()
            data = [self._names[place] for place in self._data] if self._is_known else None
            choice = partition.choose_for(self._whole, dict(zip(self._names, arrays)), data)
            nodes = tuple(map(tuple, choice.groups))
            if nodes not in kept.every:
                kept.every[nodes] = self._made(choice, kept.arrays)
            kept.for_data[key] = kept.every[nodes]
        return kept.for_data[key]

    def _made(self, choice: partition.Choice, held: list[Any]) -> _Partitioned:
        symbol = parts.placed(choice.symbol(), self._machine)
        graph = parts.read(symbol)
        owner = Owner(len(choice.groups))
        if graph is not None:
            names = [self._names[place] for place in self._others]
            graph = parts.with_foreign(graph, dict(zip(names, held)))
            graph = parts.with_attributes(
                graph, lambda node, part: {parts.OWNER: owner.names[part]}
            )
            symbol = graph_json.write(graph, symbol)
        places = {name: place for place, name in enumerate(self._names)}
        order = [places[name] for name in symbol.list_inputs()]
        return _Partitioned(self._plain(symbol, _indexed(self._flags, order)), order, owner)
