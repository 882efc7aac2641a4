"""Calls of compiled graphs without their small parameters, of which sequences hold copies.

MXNet takes 1 to 2 us per array in a call. For the 267 parameters of mobilenetv2_1.0 that is a sixth
of the time of one image.

A graph with sequences has two more forms. The holding form computes the graph and copies small
parameters. The held form does not take them. It is called as long as they are the same arrays with
unchanged write counts, which one C function checks. If the graph is a single sequence, that
function also calls it (see `direct_calls`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Callable

from .. import array_memory, compiled_operator
from ..loading import load_mxnet
from ..native_handles import Owner, are_foreign, library
from . import graph_json, groups
from .direct_calls import DirectCalls, mxnet_functions
from .graph_json import Graph, Node
from .permuted_cached_op import Flags, OrderedOp, handles_of

# An unused input of the held form. Waiting for its uses waits for all calls.
_UNREAD = f"unread_{compiled_operator.KEY}"
# Up to this size parameters are also compared, for writes that MXNet does not count
# (array_versions.h).
_MOST_FLOATS = 1 << 14
# Calls with all parameters before one that holds: the initial number, and the maximum after
# repeated changes of parameters.
_FEWEST, _MOST = 4, 1024

Call = Callable[[], Any]


class HeldCalls:
    """The two forms of a compiled symbol; `names` are its inputs in call order. Those in `data`
    change in each call; others are held if their number of elements, in `floats` by name, is
    small."""

    def __init__(
        self,
        plain: Any,
        symbol: Any,
        names: Sequence[str],
        data: Collection[str],
        flags: Flags,
        floats: Mapping[str, int],
    ) -> None:
        self._plain, self._symbol, self._names = plain, symbol, names
        self._data, self._flags = data, flags
        self._small = {n for n, size in floats.items() if size <= _MOST_FLOATS and n not in data}
        self._taken = _taken_by_sequences(json.loads(graph_json.text(symbol)), self._small)
        self._owner = Owner("held", len(self._taken))
        self._lock = threading.Lock()
        self._unread = load_mxnet().nd.zeros(1, ctx=load_mxnet().cpu())
        self._parameters: Sequence[Any] = ()
        # Inputs of the held form; handles of the held parameters.
        self._given: Sequence[Any] = ()
        self._handles: list[Any] = []
        self._direct: DirectCalls | None = None
        # Shapes of the data for which the held form is valid.
        self._shapes: list[tuple[int, ...]] | None = None
        self._calls, self._pause = 0, _FEWEST
        self._left: float = _FEWEST

    @classmethod
    def of(cls, plain: Any, symbol: Any, *given: Any) -> HeldCalls | None:
        """Return `None` if the graph has no sequence, or MXNet's write counts cannot be read."""
        has_sequence = f'"{compiled_operator.SEQUENCE}"' in graph_json.text(symbol)
        return cls(plain, symbol, *given) if has_sequence and _counts_writes() else None

    @contextlib.contextmanager
    def chosen(
        self, parameters: Sequence[Any], data: Mapping[int, Any], otherwise: Call
    ) -> Iterator[Call]:
        """Provide the form to call with `parameters` in their positions, and `data` in the others;
        `otherwise` calls the graph itself. Raises the errors of writes to parameters.

        `parameters` must be the same object as long as its arrays are the same.
        """
        # Another thread may be calling, or may have been when the process was forked.
        if not self._lock.acquire(blocking=False):
            yield otherwise
            return
        try:
            yield self._choose(parameters, data, otherwise)
        finally:
            self._lock.release()

    def directly(
        self, parameters: Sequence[Any], data: Sequence[Any], compared: Sequence[Any]
    ) -> list[Any] | None:
        """Return the held form's result without MXNet's CachedOp; `None` if that is impossible.

        `parameters` are `chosen`'s, with `data` in the other positions; the lists in `compared`
        must begin with the objects in it. Raises the errors of writes to parameters and data.
        """
        direct = self._direct
        if direct is None or not self._lock.acquire(False):
            return None
        try:
            if direct is not self._direct or parameters is not self._parameters:
                return None
            results = direct(data, compared)
            self._calls += results is not None
            return results
        finally:
            self._lock.release()

    def _choose(self, parameters: Sequence[Any], data: Mapping[int, Any], otherwise: Call) -> Call:
        if parameters is not self._parameters:
            self._end()
            self._parameters = parameters
        shapes = [each.shape for each in data.values()]
        if shapes == self._shapes:
            if self._are_current():
                self._calls += 1
                return functools.partial(self._held_op.repeat, self._given, data)
            self._end()
        self._left -= 1
        if self._left > 0 or are_foreign([each for each in parameters if each is not None]):
            return otherwise
        return functools.partial(self._hold, data, shapes)

    def _are_current(self) -> bool:
        check = library().ece408_held_are_current
        for owner, handles in zip(self._owner.names, self._handles):
            status = check(owner.encode(), handles, mxnet_functions())
            if status < 0:
                load_mxnet().base.check_call(status)
            if not status:
                return False
        return True

    def _end(self) -> None:
        """Handle changed parameters; wait for calls of the held form."""
        if self._shapes is not None:
            array_memory.wait_for_uses([self._unread])
            self._shapes = self._direct = None

    def _hold(self, data: Mapping[int, Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        """Call the holding form, and wait until it has copied the parameters."""
        self._end()
        self._left = math.inf  # if this fails
        arrays = [data.get(place, each) for place, each in enumerate(self._parameters)]
        results = self._holding_op(*arrays)
        results = results if isinstance(results, list) else [results]
        for each in results:
            each.wait_to_read()
        self._given = [*self._parameters, self._unread]
        named = dict(zip([*self._names, _UNREAD], [*arrays, self._unread]))
        self._handles = [handles_of([named[n] for n in taken]) for taken in self._taken]
        if len(self._handles) == 1:
            places = [self._names[place] for place in data]
            self._direct = DirectCalls.of(self._graph(_held), named, places, self._handles[0])
        self._shapes = shapes
        has_paid = self._calls >= self._pause
        self._pause = _FEWEST if has_paid else min(2 * self._pause, _MOST)
        self._calls, self._left = 0, self._pause
        return results

    @functools.cached_property
    def _holding_op(self) -> OrderedOp:
        # Without static memory: it is seldom called.
        return self._op(_holding, [flag for flag in self._flags if "static" not in flag[0]])

    @functools.cached_property
    def _held_op(self) -> OrderedOp:
        return self._op(_held, self._flags)

    def _op(self, form: Callable[..., Graph], flags: Flags) -> OrderedOp:
        symbol = graph_json.write(self._graph(form), self._symbol)
        return OrderedOp(self._plain, symbol, [*self._names, _UNREAD], self._data, flags)

    def _graph(self, form: Callable[..., Graph]) -> Graph:
        return form(json.loads(graph_json.text(self._symbol)), self._small, self._owner.names)


def _sequences(graph: Graph) -> list[Node]:
    return [node for node in graph["nodes"] if node["op"] == compiled_operator.SEQUENCE]


def _places(graph: Graph, node: Node, names: Collection[str]) -> list[int]:
    """Return which of a sequence's inputs are variables of these names."""
    sources = [graph["nodes"][entry[0]] for entry in node["inputs"]]
    return [
        place
        for place, source in enumerate(sources)
        if source["op"] == "null" and source["name"] in names
    ]


def _taken_by_sequences(graph: Graph, small: Collection[str]) -> list[list[str]]:
    """Return the names of the small parameters of each sequence that has any."""
    taken = [
        [graph["nodes"][node["inputs"][place][0]]["name"] for place in _places(graph, node, small)]
        for node in _sequences(graph)
    ]
    return [names for names in taken if names]


def _holding(graph: Graph, small: Collection[str], owners: Sequence[str]) -> Graph:
    """Return the graph, changed in place, with sequences that hold their small parameters."""
    rest = iter(owners)
    for node in _sequences(graph):
        places = _places(graph, node, small)
        if places:
            node["attrs"]["holds"] = " ".join(map(str, (next(rest), *places)))
    return graph


def _held(graph: Graph, small: Collection[str], owners: Sequence[str]) -> Graph:
    """Return the graph with sequences that do not take their small parameters."""
    every = dict(enumerate(_holding(graph, small, owners)["nodes"]))
    unread = len(every)
    for node in _sequences(graph):
        if "holds" not in node["attrs"]:
            continue
        left_out = set(_places(graph, node, small))
        inputs = [entry for n, entry in enumerate(node["inputs"]) if n not in left_out]
        node["inputs"] = [*inputs, [unread, 0, 0]]
        outputs = node["attrs"]["counts"].split()[1]
        node["attrs"].update(held="1", counts=f"{len(node['inputs'])} {outputs}")
    every[unread] = {"op": "null", "name": _UNREAD, "inputs": []}
    used = {entry[0] for node in every.values() for entry in node["inputs"]}
    used.update(head[0] for head in graph["heads"])
    left = {n: node for n, node in every.items() if n in used or node["op"] != "null"}
    return groups.in_order(graph, left)


@functools.lru_cache(maxsize=1)
def _counts_writes() -> bool:
    """Return whether MXNet counts writes at the offset that its headers imply. They know two
    layouts: with oneDNN and without."""
    mxnet = load_mxnet()
    function = library().ece408_held_writes
    function.restype = ctypes.c_uint64
    array = mxnet.nd.zeros(1)
    counts = []
    for value in range(3):
        array[:] = value
        array.wait_to_read()
        counts.append(function(array.handle))
    return counts == list(range(counts[0], counts[0] + 3))
