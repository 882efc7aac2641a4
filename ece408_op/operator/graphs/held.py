"""Calls of compiled graphs that are not given their small parameters: sequences hold copies.

MXNet takes one to two microseconds for each array that a call is given. For the 267 parameters of
mobilenetv2_1.0 that is a sixth of the time that one image takes.

A graph with sequences is there in two more forms. A call of the holding form does what the graph
does, and copies small parameters. The held form does not take them. It is called while they are the
same arrays with as many writes, which one function in C asks of all of them. If it is a sequence
and nothing else, that function calls it as well (see `direct_calls`).
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

# An input of the held form that nobody reads. Who waits for its uses waits for every call.
_UNREAD = f"unread_{compiled_operator.KEY}"
# As many are also compared where MXNet's count of writes says nothing (array_versions.h).
_MOST_FLOATS = 1 << 14
# Calls with all parameters before one that holds: at first, and at most after parameters have
# changed time and again.
_FEWEST, _MOST = 4, 1024

Call = Callable[[], Any]


class HeldCalls:
    """The two forms of a compiled symbol, whose inputs have these `names` in the order of calls.
    `data` names those that are others in each call; others are held if there are `floats` of
    them, by names, and these are few."""

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
        # What the held form is given; the handles of what it is not.
        self._given: Sequence[Any] = ()
        self._handles: list[Any] = []
        self._direct: DirectCalls | None = None
        # Of the data that the held form may be called with.
        self._shapes: list[tuple[int, ...]] | None = None
        self._calls, self._pause = 0, _FEWEST
        self._left: float = _FEWEST

    @classmethod
    def of(cls, plain: Any, symbol: Any, *given: Any) -> HeldCalls | None:
        """`None` if the graph has no sequence, or MXNet's counts of writes cannot be read."""
        has_sequence = f'"{compiled_operator.SEQUENCE}"' in graph_json.text(symbol)
        return cls(plain, symbol, *given) if has_sequence and _counts_writes() else None

    @contextlib.contextmanager
    def chosen(
        self, parameters: Sequence[Any], data: Mapping[int, Any], otherwise: Call
    ) -> Iterator[Call]:
        """What to call with `parameters`, each at its place, and `data` at the others: a form, or
        `otherwise`, which is the graph itself. Raises the errors of writes to parameters.

        `parameters` is the same object as long as its arrays are the same.
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
        """What the held form gives, past MXNet's CachedOp; `None` if that cannot be.

        `parameters` are `chosen`'s, with `data` at the other places; `compared` are lists that
        must begin with these objects. Raises the errors of writes to parameters and data.
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
        """Parameters have changed. Waits for calls of the held form."""
        if self._shapes is not None:
            array_memory.wait_for_uses([self._unread])
            self._shapes = self._direct = None

    def _hold(self, data: Mapping[int, Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        """Call the form that holds, and wait until it has."""
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
        # Without memory of its own for what is computed: it is seldom called.
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
    """Which of a sequence's inputs are variables of these names."""
    sources = [graph["nodes"][entry[0]] for entry in node["inputs"]]
    return [
        place
        for place, source in enumerate(sources)
        if source["op"] == "null" and source["name"] in names
    ]


def _taken_by_sequences(graph: Graph, small: Collection[str]) -> list[list[str]]:
    """Of each sequence with small parameters the names of these."""
    taken = [
        [graph["nodes"][node["inputs"][place][0]]["name"] for place in _places(graph, node, small)]
        for node in _sequences(graph)
    ]
    return [names for names in taken if names]


def _holding(graph: Graph, small: Collection[str], owners: Sequence[str]) -> Graph:
    """The graph, changed in place, whose sequences hold their small parameters."""
    rest = iter(owners)
    for node in _sequences(graph):
        places = _places(graph, node, small)
        if places:
            node["attrs"]["holds"] = " ".join(map(str, (next(rest), *places)))
    return graph


def _held(graph: Graph, small: Collection[str], owners: Sequence[str]) -> Graph:
    """The graph whose sequences are not given their small parameters."""
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
    """Whether MXNet counts writes where the headers that it came with say. They know two layouts:
    with oneDNN and without."""
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
