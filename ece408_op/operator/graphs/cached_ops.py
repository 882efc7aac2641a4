"""CachedOps, which hybridized Gluon blocks run, on graphs with our operator.

They run the graph with guards (see `guards`). On the CPU they run the compiled operator instead:
outside `autograd.record()` in parts of one node each, within it with gradients. On a GPU they run
the compiled operator outside `autograd.record()`. A graph with parts for our GPU backend is cut for
the CPU arrays of each inference.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import threading
from collections.abc import Collection, Sequence
from typing import Any

from ... import settings
from .. import array_memory, arrays_on_gpu, autograd_state, compiled_operator, parts_at_work
from ..parts_at_work import DirectCalls, Parts
from . import compiled_graphs, graph_inference, graph_json, guards, partition, training_parts
from .graph_json import Graph

Flags = Sequence[tuple[str, Any]]
# Shapes and types of arrays.
Sizes = tuple[tuple[tuple[int, ...], Any], ...]

# Maximum number of forms of a graph that are known.
_MOST_FORMS = 64


def install(mxnet: Any) -> None:
    """Make MXNet's CachedOps use this module."""
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)


def _cached_op_class(plain: Any) -> Any:
    """Return a subclass of MXNet's CachedOp that accepts symbols with our operator."""

    class CachedOp(plain):
        """A CachedOp that runs the guarded or the compiled form of our graphs."""

        def __init__(self, sym: Any, flags: Flags = ()) -> None:
            self._ours: DualCachedOp | None = None
            graph = graph_json.read(sym)
            if graph is None:
                super().__init__(sym, flags)
                return
            if graph_json.has_control_flow(graph):
                # With it MXNet's own operators near control flow are often wrong, too.
                flags = [flag for flag in flags if flag[0] != "static_shape"]
            with compiled_graphs.ONE_AT_A_TIME:
                super().__init__(guards.guarded_symbol(graph, sym), flags)
            self._ours = DualCachedOp(plain, super(), sym, graph, flags)

        def __call__(self, *arrays: Any, **keywords: Any) -> Any:
            if self._ours is not None:
                return self._ours(*arrays, **keywords)
            arrays_on_gpu.show(arrays)
            return super().__call__(*arrays, **keywords)

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            if self._ours is None:
                super()._register_op_hook(callback, monitor_all)
            else:
                self._ours.register_hook(callback, monitor_all)

    return CachedOp


class DualCachedOp:
    """A CachedOp of one of our graphs. It runs the guarded graph if compilation fails, under a
    monitor, and in other modes of autograd.

    Compiled graphs are created at first use; with static memory each has its own memory. Parts on
    the GPU, and nodes without inputs, may depend on the sizes of arrays. Each context has its own:
    MXNet does not tell a node which one it is in.
    """

    def __init__(self, plain: Any, guarded: Any, symbol: Any, graph: Graph, flags: Flags) -> None:
        self._plain, self._all_flags = plain, flags
        self._symbol, self._graph = symbol, graph
        self._names = symbol.list_inputs()
        states = set(symbol.list_auxiliary_states())
        data = dict(flags).get("data_indices")
        self._data = {self._names[number] for number in data or ()}
        # Inputs that may have gradients, and those of them that are known to be parameters.
        self._inputs = tuple(n for n, name in enumerate(self._names) if name not in states)
        self._parameters = [n for n in self._inputs if data is not None and n not in data]
        # By context: the parameters of the last recorded call, and the inputs without gradients.
        self._recorded: dict[Any, tuple[list[Any], tuple[int, ...]]] = {}
        self._flags = [flag for flag in flags if flag[0] not in ("data_indices", "param_indices")]
        self._states = [n for n, name in enumerate(self._names) if name in states]
        # By (on a GPU, gradients, context and how parts run, sizes); `None` if compilation failed.
        self._compiled: dict[tuple[bool, Any, Any, Sizes], CompiledOp | None] = {}
        self._by_cuts: dict[Any, CompiledOp | None] = {}
        self._last: dict[Any, CompiledOp | None] = {}  # by context
        self._hook: tuple[Any, bool] = (None, False)
        taken = compiled_graphs.weights(graph) - self._data
        self._weights = [n for n, name in enumerate(self._names) if name in taken]
        self._is_open = graph_inference.has_open_sources(graph)
        self._is_marked = graph_json.is_marked(graph)
        self._sized = range(len(self._names)) if self._is_open or data is None else data
        # By sizes, if the graph depends on them.
        self._guarded: dict[Sizes, Any] = {} if self._is_open else {(): guarded}

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        from mxnet import autograd

        records = autograd.is_recording()
        # In other modes a normalisation moves averages without gradients, or has gradients without
        # them.
        usual = records == autograd.is_training() and not self._hook[0]
        compiled, context = None, arrays[0].context
        on_gpu = usual and not records and compiled_operator.runs_on_gpu(context)
        if on_gpu or (usual and context.device_type == "cpu"):
            compiled = self._compiled_for(arrays, records, on_gpu)
        if compiled is not self._last.get(context):
            arrays_on_gpu.show(arrays)
            # Static graphs do not declare to MXNet that they write moving averages.
            array_memory.wait_for_uses(arrays[n] for n in self._states)
            if compiled is not None and not on_gpu:
                array_memory.make_plain([arrays[n] for n in self._weights])
            self._last[context] = compiled
        if compiled is None:
            return self._guarded_call(arrays, keywords)
        compiled.prepare(arrays)
        # MXNet raises an array's error only once, so it must not be caught here.
        compiled.hold(arrays)
        found = None if keywords else compiled.directly(arrays)
        if found is not None:
            return found
        try:
            return compiled.call(*arrays, **keywords)
        except compiled_graphs.failures():
            return self._guarded_call(arrays, keywords)

    def register_hook(self, callback: Any, monitor_all: bool) -> None:
        """Make a monitor's callback see all nodes but guards."""
        self._hook = (guards.unheard(callback) if callback else callback), monitor_all
        for guarded in self._guarded.values():
            guarded._register_op_hook(*self._hook)

    def _sizes(self, arrays: Sequence[Any], are_needed: bool) -> Sizes:
        numbers = self._sized if are_needed else ()
        return tuple((arrays[number].shape, arrays[number].dtype) for number in numbers)

    def _guarded_call(self, arrays: Sequence[Any], keywords: dict[str, Any]) -> Any:
        arrays_on_gpu.show(arrays)
        return self._guarded_for(arrays).__call__(*arrays, **keywords)

    def _guarded_for(self, arrays: Sequence[Any]) -> Any:
        sizes = self._sizes(arrays, self._is_open)
        if sizes not in self._guarded:
            with compiled_graphs.ONE_AT_A_TIME:
                guarded = guards.guarded_symbol(self._graph_for(arrays), self._symbol)
                self._guarded[sizes] = self._plain(guarded, self._all_flags)
            if self._hook[0]:
                self._guarded[sizes]._register_op_hook(*self._hook)
        return self._guarded[sizes]

    def _graph_for(self, arrays: Sequence[Any]) -> Graph:
        shapes = {name: array.shape for name, array in zip(self._names, arrays)}
        return graph_inference.with_known_sources(self._symbol, self._graph, shapes)

    def _compiled_for(self, arrays: Sequence[Any], trains: bool, on_gpu: bool) -> CompiledOp | None:
        """Return the compiled operator, if any; compile it at first use."""
        gradients = (self._without(arrays), autograd_state.may_add()) if trains else None
        cuts = self._is_marked and not (trains or on_gpu)
        sizes = self._sizes(arrays, self._is_open or cuts)
        devices = settings.devices() if trains else ()
        how = ("",) if on_gpu else (parts_at_work.mode(), settings.backend(), devices)
        key = on_gpu, gradients, (arrays[0].context, *how), sizes
        known = self._compiled
        if key not in known:
            if len(known) >= _MOST_FORMS:
                known = self._compiled = {}
                self._by_cuts = {}
            found = None
            arrays_on_gpu.show(arrays)
            with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
                found = self._compile(arrays, gradients, on_gpu)
            known[key] = found
        return known[key]

    def _without(self, arrays: Sequence[Any]) -> tuple[int, ...]:
        """Return the inputs without gradients."""
        parameters = [arrays[number] for number in self._parameters]
        before, without = self._recorded.get(arrays[0].context, (None, ()))
        # A parameter that loses its gradient, or gets another one, gets another array.
        if not _are_same(parameters, before):
            without = self._inputs
            for (_, gradients, *_), compiled in self._compiled.items():
                if gradients is not None and compiled is not None:
                    compiled.renew()
        without = tuple(n for n in without if not autograd_state.has_gradient(arrays[n]))
        self._recorded[arrays[0].context] = parameters, without
        return without

    def _compile(self, arrays: Sequence[Any], gradients: Any, on_gpu: bool) -> CompiledOp | None:
        inputs = dict(zip(self._names, arrays))
        graph, data = self._graph_for(arrays), self._data or None
        if on_gpu:
            shapes = {name: array.shape for name, array in inputs.items()}
            return self._op_of(compiled_graphs.compiled(self._symbol, graph, shapes), None)
        if gradients is not None:
            without, may_add = gradients
            wanted = {self._names[number] for number in {*self._inputs} - {*without}}
            # It is unknown which gradients are to be added.
            added = wanted if may_add else ()
            return self._op_of(
                *training_parts.compiled(self._symbol, graph, inputs, wanted, added, data)
            )
        choice = partition.for_inference(self._symbol, graph, inputs, data)
        # Equal cuts share their parts, and what these keep of weights.
        cut = arrays[0].context, choice.on, str(choice.groups), self._sizes(arrays, self._is_open)
        if cut not in self._by_cuts:
            self._by_cuts[cut] = self._op_of(*partition.in_parts(choice, inputs))
        return self._by_cuts[cut]

    def _op_of(self, symbol: Any, opened: Parts | None) -> CompiledOp | None:
        if symbol is None:
            return None
        return CompiledOp(self._plain, symbol, self._names, self._data, self._flags, opened)


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
        places = [[n for n, name in enumerate(own) if (name in data) == of] for of in (True, False)]
        indices = zip(("data_indices", "param_indices"), places)
        self._new_op = functools.partial(plain, symbol, [*indices, *flags])
        self._op = self._new_op()
        self._parts = opened
        on_gpu = _read_by_parts(symbol) if opened and opened.train_on_gpu else set()
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

    def renew(self) -> None:
        """Give up MXNet's CachedOp: with static shapes it writes gradients to the arrays of its
        first backward pass."""
        with self._lock:
            self._op = self._new_op()

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

    def hold(self, given: Sequence[Any]) -> None:
        """Hold the parameters of the next call. If they differ, wait for the last call, which may
        still read its own."""
        kept = [given[number] for number in self._kept.values()]
        if _are_same(kept, self._given):
            return
        with self._lock:
            # Another thread may have done it meanwhile. One that sees them as held may call.
            if _are_same(kept, self._given):
                return
            if self._parts is not None:
                array_memory.wait_for_uses(self._given or ())
                self._parts.forget(dict(zip(self._kept, kept)))
                if self._direct is not None:
                    self._direct.hold(given)
            self._given = kept


def _are_same(arrays: Sequence[Any], before: Sequence[Any] | None) -> bool:
    return before is not None and all(map(operator.is_, arrays, before))


def _read_by_parts(symbol: Any) -> set[str]:
    """Return the inputs that only parts read."""
    graph: Graph = json.loads(graph_json.text(symbol))
    nodes = graph["nodes"]
    rest = [node["inputs"] for node in nodes if node["op"] != parts_at_work.NAME]
    others = {entry[0] for entries in (graph["heads"], *rest) for entry in entries}
    return {n["name"] for k, n in enumerate(nodes) if n["op"] == "null" and k not in others}
