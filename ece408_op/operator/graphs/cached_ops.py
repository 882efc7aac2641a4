"""CachedOps, which hybridized Gluon blocks run, on graphs with our operator.

They run the graph with guards (see `guards`). On the CPU they run the compiled operator instead:
outside `autograd.record()` in parts of one node each, within it with gradients. On a GPU they run
the compiled operator outside `autograd.record()`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .. import array_memory, autograd_state, compiled_operator, parts_at_work
from ..parts_at_work import DirectCalls, Parts
from . import compiled_graphs, graph_inference, graph_json, guards, partition, training_graphs
from .graph_json import Graph

Flags = Sequence[tuple[str, Any]]


def install(mxnet: Any) -> None:
    """Make MXNet's CachedOps use this module."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """Return a subclass of MXNet's CachedOp that accepts symbols with our operator."""

    class CachedOp(plain):
        """A CachedOp that runs the guarded or the compiled form of our graphs."""

        def __init__(self, sym: Any, flags: Flags = ()) -> None:
            graph = graph_json.read(sym)
            self._ours: Any = None
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
            call = super().__call__ if self._ours is None else self._ours
            return call(*arrays, **keywords)

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            if self._ours is None:
                super()._register_op_hook(callback, monitor_all)
            else:
                self._ours.register_hook(callback, monitor_all)

    return CachedOp


class DualCachedOp:
    """A CachedOp of one of our graphs. It runs compiled graphs on the CPU (with gradients within
    `autograd.record()`) and on a GPU outside `autograd.record()`; it runs the guarded graph if
    compilation fails, under a monitor, and in other modes.

    Compiled graphs are created at first use; with static memory each has its own memory.
    """

    def __init__(self, plain: Any, guarded: Any, symbol: Any, graph: Graph, flags: Flags) -> None:
        self._plain = plain
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
            return self._guarded.__call__(*arrays, **keywords)
        # MXNet raises an array's error only once, so it must not be caught here.
        compiled.hold(arrays)
        found = None if keywords else compiled.directly(arrays)
        if found is not None:
            return found
        try:
            return compiled.call(*arrays, **keywords)
        except compiled_graphs.failures():
            return self._guarded.__call__(*arrays, **keywords)

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
                self._compiled.pop((False, True, ""), None)
        key = on_gpu, trains, "" if on_gpu or trains else parts_at_work.mode()
        if key not in self._compiled:
            found = None
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
            only_float32 = all(array.dtype == np.float32 for array in arrays)
            without = {self._names[number] for number in self._without}
            wanted = set(self._names) - without - set(self._symbol.list_auxiliary_states())
            # It is unknown which gradients are to be added.
            added = wanted if self._adds else ()
            found = training_graphs.compiled(
                self._symbol, self._graph, shapes, wanted, added, only_float32
            )
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
        kept = opened.parameters if opened else ()
        self._kept = {name: names.index(name) for name in kept}
        self._given: list[Any] | None = None
        # While one thread calls MXNet's CachedOp, another one could find its graph without shapes.
        self._lock = threading.RLock()
        is_whole = opened is not None and opened.whole is not None and not self._op.is_np_sym
        self._direct = DirectCalls(opened, names) if opened and is_whole else None
        # The number of calls since the last direct one.
        self._misses = 0

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

    def hold(self, given: Sequence[Any]) -> None:
        """Hold the parameters of the next call. If they differ, wait for the last call, which may
        still read its own."""
        kept = [given[number] for number in self._kept.values()]
        if self._are_held(kept):
            return
        with self._lock:
            # Another thread may have done it meanwhile. One that sees them as held may call.
            if self._are_held(kept):
                return
            if self._parts is not None:
                array_memory.wait_for_uses(self._given or ())
                self._parts.forget(dict(zip(self._kept, kept)))
                if self._direct is not None:
                    self._direct.hold(given)
            self._given = kept

    def _are_held(self, arrays: Sequence[Any]) -> bool:
        given = self._given
        return given is not None and all(map(operator.is_, arrays, given))


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
