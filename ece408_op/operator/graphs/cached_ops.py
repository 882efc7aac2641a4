"""CachedOps, which hybridized Gluon blocks run, on graphs with our operator.

They run the graph with guards (see `guards`). On the CPU they run the compiled operator instead:
outside `autograd.record()` in parts of one node each, within it with gradients. On a GPU they run
the compiled operator outside `autograd.record()`.

A graph with parts for our GPU backend is put back together, and in inference on CPU arrays cut
again for these.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import threading
from collections.abc import Collection, Sequence
from typing import Any

from ...errors import Ece408Error
from .. import (
    array_memory,
    arrays_on_gpu,
    autograd_state,
    compiled_operator,
    parts_at_work,
)
from ..parts_at_work import DirectCalls, Parts
from . import (
    compiled_graphs,
    graph_inference,
    graph_json,
    guards,
    partition,
    parts,
    training_parts,
)
from .graph_json import Graph

Flags = Sequence[tuple[str, Any]]

# Maximum number of data sizes whose parts on the GPU are known.
_MOST_SIZES = 64


def install(mxnet: Any) -> None:
    """Make MXNet's CachedOps use this module."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """Return a subclass of MXNet's CachedOp that accepts symbols with our operator."""

    class CachedOp(plain):
        """A CachedOp that runs the guarded or the compiled form of our graphs."""

        def __init__(self, sym: Any, flags: Flags = ()) -> None:
            self._ours: Any = None
            self._on_gpu: _OnGpu | None = None
            whole = parts.put_back_symbol(sym)
            if whole is not sym:
                self._order = list(map(sym.list_inputs().index, whole.list_inputs()))
                flags = _indexed(flags, self._order)
                self._on_gpu, sym = _OnGpu(plain, whole, flags), whole
            graph = graph_json.read(sym)
            # A partitioned graph already has guards.
            if graph is None or graph_json.is_partitioned(graph):
                super().__init__(sym, flags)
                return
            if graph_json.has_control_flow(graph):
                # With it MXNet's own operators near control flow are often wrong, too.
                flags = [flag for flag in flags if flag[0] != "static_shape"]
            with compiled_graphs.ONE_AT_A_TIME:
                super().__init__(guards.guarded_symbol(graph, sym), flags)
            if graph_inference.has_open_sources(graph):
                self._ours = _ByShapes(plain, sym, graph, flags)
            else:
                self._ours = DualCachedOp(plain, super(), sym, graph, flags)

        def __call__(self, *arrays: Any, **keywords: Any) -> Any:
            if self._on_gpu is not None:
                arrays = tuple(arrays[number] for number in self._order)
                found = self._on_gpu(arrays, keywords)
                if found is not None:
                    return found
            if self._ours is not None:
                return self._ours(*arrays, **keywords)
            arrays_on_gpu.show(arrays)
            return super().__call__(*arrays, **keywords)

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            if self._on_gpu is not None:
                self._on_gpu.is_monitored = bool(callback)
            if self._ours is None:
                super()._register_op_hook(callback, monitor_all)
            else:
                self._ours.register_hook(callback, monitor_all)

    return CachedOp


def _indexed(flags: Flags, order: list[int]) -> Flags:
    """Return the flags with lists of inputs renumbered for another order."""
    return [
        (name, [order.index(place) for place in value] if name.endswith("_indices") else value)
        for name, value in flags
    ]


class DualCachedOp:
    """A CachedOp of one of our graphs. It runs compiled graphs on the CPU (with gradients within
    `autograd.record()`) and on a GPU outside `autograd.record()`; it runs the guarded graph if
    compilation fails, under a monitor, and in other modes.

    Compiled graphs are created at first use; with static memory each has its own memory.
    """

    def __init__(
        self, plain: Any, guarded: Any, symbol: Any, graph: Graph, flags: Flags, on: str = "cpu"
    ) -> None:
        """Parts that train run `on` a machine."""
        self._plain, self._on = plain, on
        self._guarded = guarded
        self._symbol, self._graph = symbol, graph
        self._names = symbol.list_inputs()
        states = set(symbol.list_auxiliary_states())
        # Inputs that may have gradients, but had none at the last check.
        self._without = [n for n, name in enumerate(self._names) if name not in states]
        self._data = {self._names[number] for number in dict(flags).get("data_indices", ())}
        self._flags = [flag for flag in flags if flag[0] not in ("data_indices", "param_indices")]
        self._adds = autograd_state.may_add()
        self._states = [n for n, name in enumerate(self._names) if name in states]
        # By (on a GPU, for training, how parts run); `None` if compilation failed.
        self._compiled: dict[tuple[bool, bool, str], CompiledOp | None] = {}
        self._last: CompiledOp | None = None
        self._is_monitored = False
        taken = compiled_graphs.weights(graph) - self._data
        self._weights = [n for n, name in enumerate(self._names) if name in taken]

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        found = self.compiled(arrays, keywords)
        if found is None:
            arrays_on_gpu.show(arrays)
            return self._guarded.__call__(*arrays, **keywords)
        return found

    def compiled(self, arrays: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Return the results of a compiled graph, or `None` if the guarded one has to run."""
        from mxnet import autograd

        records = autograd.is_recording()
        # In other modes a normalisation moves averages without gradients, or has gradients without
        # them.
        usual = records == autograd.is_training() and not self._is_monitored
        compiled, context = None, arrays[0].context
        on_gpu = usual and not records and compiled_operator.runs_on_gpu(context)
        if on_gpu or (usual and context.device_type == "cpu"):
            compiled = self._compiled_for(arrays, records, on_gpu)
        if compiled is not self._last:
            # Static graphs do not declare to MXNet that they write moving averages.
            array_memory.wait_for_uses(arrays[n] for n in self._states)
            self._last = compiled
        if compiled is None:
            return None
        compiled.prepare(arrays)
        # MXNet raises an array's error only once, so it must not be caught here.
        compiled.hold(arrays)
        found = None if keywords else compiled.directly(arrays)
        if found is not None:
            return found
        try:
            return compiled.call(*arrays, **keywords)
        except compiled_graphs.failures():
            return None

    def register_hook(self, callback: Any, monitor_all: bool) -> None:
        """Make a monitor's callback see all nodes but guards."""
        self._is_monitored = bool(callback)
        heard = guards.unheard(callback) if callback else callback
        self._guarded._register_op_hook(heard, monitor_all)

    def _compiled_for(self, arrays: Sequence[Any], trains: bool, on_gpu: bool) -> CompiledOp | None:
        """Return the compiled operator, if any; compile it at first use, and again when other
        gradients are wanted."""
        if trains:
            without = [n for n in self._without if not autograd_state.has_gradient(arrays[n])]
            if len(without) < len(self._without) or self._adds != autograd_state.may_add():
                self._without, self._adds = without, autograd_state.may_add()
                self._compiled = {key: op for key, op in self._compiled.items() if not key[1]}
        key = on_gpu, trains, "" if on_gpu else parts_at_work.mode()
        if key not in self._compiled:
            found = None
            arrays_on_gpu.show(arrays)
            with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
                found = self._compile(arrays, trains, on_gpu)
            self._compiled[key] = found
            if found is not None and not on_gpu:
                array_memory.make_plain([arrays[n] for n in self._weights])
        return self._compiled[key]

    def _compile(self, arrays: Sequence[Any], trains: bool, on_gpu: bool) -> CompiledOp | None:
        inputs = dict(zip(self._names, arrays))
        shapes = {name: array.shape for name, array in inputs.items()}
        opened = None
        if trains:
            without = {self._names[number] for number in self._without}
            wanted = set(self._names) - without - set(self._symbol.list_auxiliary_states())
            # It is unknown which gradients are to be added.
            added = wanted if self._adds else ()
            found, opened = training_parts.compiled(
                *(self._symbol, self._graph, inputs, wanted, added, self._data or None),
                on=self._on,
            )
            if self._on == "gpu" and not (opened and opened.numbers):
                return None
        elif on_gpu:
            found = compiled_graphs.compiled(self._symbol, self._graph, shapes)
        else:
            found, opened = partition.with_parts(
                self._symbol, self._graph, inputs, self._data or None
            )
        if found is None:
            return None
        return CompiledOp(self._plain, found, self._names, self._data, self._flags, opened)


class CompiledOp:
    """A CachedOp of a compiled graph, whose inputs are in an order of its own, and its parts. It
    holds the arrays of its last call that parts take as parameters. Call `hold` before each
    call."""

    def __init__(
        self,
        plain: Any,
        symbol: Any,
        names: Sequence[str],
        data: Collection[str],
        flags: Flags,
        opened: Parts | None,
    ) -> None:
        own = symbol.list_inputs()
        self._order = [names.index(name) for name in own]
        is_data = [name in data for name in own]
        indices = [
            (key, [place for place, each in enumerate(is_data) if each == wanted])
            for key, wanted in (("data_indices", True), ("param_indices", False))
        ]
        self._new_op = functools.partial(plain, symbol, [*indices, *flags])
        self._op = self._new_op()
        self._parts = opened
        on_gpu = _read_by_gpu(symbol) if opened and opened.train_on_gpu else set()
        self._on_host = [names.index(name) for name in own if name not in on_gpu]
        self._on_gpu = [names.index(name) for name in own if name in on_gpu]
        kept = opened.parameters if opened else ()
        self._kept = {name: names.index(name) for name in kept}
        self._given: list[Any] | None = None
        # While one thread calls MXNet's CachedOp, another one could find its graph without shapes.
        self._lock = threading.RLock()
        is_whole = opened is not None and opened.whole is not None and opened.most_bytes > 0
        is_np = self._op.is_np_sym
        self._direct = DirectCalls(opened, names, is_np) if opened and is_whole else None
        # The number of calls since the last direct one.
        self._misses = 0

    def prepare(self, given: Sequence[Any]) -> None:
        """Bring parameters that stay on a GPU up to date if a call reads them on the CPU."""
        arrays_on_gpu.show(given[number] for number in self._on_host)
        arrays_on_gpu.hide(given[number] for number in self._on_gpu)

    def directly(self, given: Sequence[Any]) -> Any:
        """Call it without MXNet's CachedOp if possible; else return `None`. Raises the errors of
        writes to the arrays."""
        if self._direct is None:
            return None
        found = self._direct(given)
        self._misses = 0 if found else self._misses + 1
        if self._misses & (self._misses - 1) == 0 < self._misses:
            # Of arrays in oneDNN's layouts MXNet passes copies, whose changes are unknown. The
            # conversion counts as a write, so it is tried less and less often.
            array_memory.make_plain(self._given or ())
        return found[0] if found and len(found) == 1 else found

    def call(self, *given: Any, **keywords: Any) -> Any:
        """Call MXNet's CachedOp. Raises `MXNetError`, or why Python made no program for a part."""
        from mxnet import MXNetError

        with self._lock:
            try:
                return self._op(*(given[number] for number in self._order), **keywords)
            except MXNetError as error:
                # It would not infer the same shapes again.
                self._op = self._new_op()
                refusal = self._parts.taken_refusal() if self._parts else None
                raise refusal or error from None

    def hold(self, given: Sequence[Any]) -> list[Any]:
        """Hold the parameters of the next call, and return them. If they differ, wait for the last
        call, which may still read its own."""
        kept = [given[number] for number in self._kept.values()]
        if self._are_held(kept):
            return kept
        with self._lock:
            # Another thread may have done it meanwhile. One that sees them as held may call.
            if self._are_held(kept):
                return kept
            if self._parts is not None:
                array_memory.wait_for_uses(self._given or ())
                self._parts.forget(dict(zip(self._kept, kept)))
                if self._direct is not None:
                    self._direct.hold(given)
            self._given = kept
            return kept

    def _are_held(self, arrays: Sequence[Any]) -> bool:
        given = self._given
        return given is not None and _are_same(arrays, given)


def _read_by_gpu(symbol: Any) -> set[str]:
    """Return the inputs that only parts read."""
    graph: Graph = json.loads(graph_json.text(symbol))
    nodes = graph["nodes"]
    others = {h[0] for h in graph["heads"]} | {
        entry[0] for node in nodes if node["op"] != parts_at_work.NAME for entry in node["inputs"]
    }
    return {n["name"] for k, n in enumerate(nodes) if n["op"] == "null" and k not in others}


def _are_same(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(arrays) == len(others) and all(map(operator.is_, arrays, others))


class _OnGpu:
    """Calls of a graph with parts on the GPU, by a CachedOp for each partition, which may depend on
    the sizes of data. They are not direct: a GPU may take so long that the caller wants to continue
    meanwhile."""

    def __init__(self, plain: Any, symbol: Any, flags: Flags) -> None:
        self._plain, self._symbol = plain, symbol
        self._names = symbol.list_inputs()
        data = dict(flags).get("data_indices")
        self._data = None if data is None else {self._names[number] for number in data}
        self._sized = range(len(self._names)) if data is None else data
        self._flags = [flag for flag in flags if flag[0] not in ("data_indices", "param_indices")]
        self.is_monitored = False
        # By sizes and types of data, and by the nodes of their parts; `None` without parts.
        self._by_sizes: dict[Any, CompiledOp | None] = {}
        self._every: dict[Any, CompiledOp | None] = {}
        # The parameters of the last call, if no other graph has run since.
        self._last: list[Any] = []
        graph = json.loads(graph_json.text(symbol))
        self._trained = DualCachedOp(plain, None, symbol, graph, flags, "gpu")

    def __call__(self, arrays: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Return the outputs, or `None` if the whole graph has to compute them."""
        from mxnet import autograd

        records, found = autograd.is_recording(), None
        usual = records == autograd.is_training() and not self.is_monitored
        if usual and arrays[0].context.device_type == "cpu":
            if records:
                self._forget()
                return self._trained.compiled(arrays, keywords)
            found = self._partitioned(arrays)
        if found is not None:
            arrays_on_gpu.show(arrays)
            held = found.hold(arrays)
            if not _are_same(held, self._last):
                array_memory.make_plain(held)
            self._last = held
            with contextlib.suppress(Ece408Error):
                return found.call(*arrays, **keywords)
        self._forget()
        return None

    def _forget(self) -> None:
        """Wait for the last call: another graph may write moving averages without declaring that
        to MXNet."""
        array_memory.wait_for_uses(self._last)
        self._last = []

    def _partitioned(self, arrays: Sequence[Any]) -> CompiledOp | None:
        key = tuple((arrays[number].shape, arrays[number].dtype) for number in self._sized)
        known = self._by_sizes
        if key not in known:
            with compiled_graphs.ONE_AT_A_TIME:
                if len(self._by_sizes) >= _MOST_SIZES:
                    self._by_sizes, self._every = {}, {}
                known = self._by_sizes
                known[key] = self._chosen(key, dict(zip(self._names, arrays)))
        return known[key]

    def _chosen(self, sizes: Any, inputs: dict[str, Any]) -> CompiledOp | None:
        symbol = partition.with_known_sources(self._symbol, inputs)
        choice = partition.choose_for(symbol, inputs, self._data)
        nodes = (tuple(map(tuple, choice.groups)), symbol is self._symbol or sizes)
        if nodes not in self._every:
            found, opened = None, None
            with contextlib.suppress(*compiled_graphs.failures()):
                found, opened = partition.in_parts(choice, inputs, Parts(most_bytes=0))
            self._every[nodes] = (
                CompiledOp(self._plain, found, self._names, self._data or (), self._flags, opened)
                if found is not None and opened is not None
                else None
            )
        return self._every[nodes]


class _ByShapes:
    """One CachedOp per shape of the inputs, for graphs with sources that depend on it."""

    def __init__(self, plain: Any, symbol: Any, graph: Graph, flags: Flags) -> None:
        self._plain = plain
        self._symbol = symbol
        self._graph = graph
        self._flags = flags
        self._hook: tuple[Any, bool] = (None, False)
        self._made: dict[tuple[Any, ...], DualCachedOp] = {}

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        shapes = tuple(tuple(array.shape) for array in arrays)
        if shapes not in self._made:
            self._made[shapes] = self._make(shapes)
        return self._made[shapes](*arrays, **keywords)

    def register_hook(self, callback: Any, monitor_all: bool) -> None:
        self._hook = (callback, monitor_all)
        for each in self._made.values():
            each.register_hook(callback, monitor_all)

    def _make(self, shapes: tuple[Any, ...]) -> DualCachedOp:
        known = dict(zip(self._symbol.list_inputs(), shapes))
        with compiled_graphs.ONE_AT_A_TIME:
            graph = graph_inference.with_known_sources(self._symbol, self._graph, known)
            symbol = graph_json.write(graph, self._symbol)
            guarded = self._plain(guards.guarded_symbol(graph, symbol), self._flags)
        made = DualCachedOp(self._plain, guarded, symbol, graph, self._flags)
        if self._hook[0]:
            made.register_hook(*self._hook)
        return made
