"""Chooses what MXNet runs instead of a graph with our operator.

Executors get the graph as it is. A CachedOp, which is what a hybridized Gluon block runs, gets it
with guards (see `guards`). On the CPU, executors without gradients, and a CachedOp outside
`autograd.record()`, get the compiled operator. The graph is replaced when MXNet receives it; what
users hold, save and export never changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import Ece408Error
from ...problem import ITEM_BYTES
from .. import variables
from . import compiled_graphs, graph_inference, graph_json, guards
from .graph_inference import Shapes
from .graph_json import Graph


def install(mxnet: Any) -> None:
    """Have MXNet's executors and CachedOps take their graphs from here."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name, shapes_of in (("bind", _bound_shapes), ("simple_bind", _inferred_shapes)):
        method = getattr(symbol_class, name)
        setattr(symbol_class, name, _binding(method, shapes_of))
    symbol_class.optimize_for = _partitioning(symbol_class.optimize_for)
    mxnet.ndarray.CachedOp = _cached_op_class(mxnet.ndarray.CachedOp)
    executor_class = mxnet.executor.Executor
    executor_class.set_monitor_callback = _monitoring(executor_class.set_monitor_callback)
    executor_class.reshape = _reshaping(executor_class.reshape)


def _failures() -> tuple[type[Exception], ...]:
    """The errors of a graph that cannot be compiled, or whose shapes cannot be inferred.

    After one, the Python operator computes, or raises this package's error.
    """
    from mxnet import MXNetError

    return (Ece408Error, MXNetError, RuntimeError, LookupError, TypeError, ValueError)


def _binding(method: Any, shapes_of: Any) -> Any:
    """`bind` or `simple_bind` on a graph of ours."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def bind(self: Any, *arguments: Any, **keywords: Any) -> Any:
        graph = graph_json.read(self)
        if graph is None:
            return method(self, *arguments, **keywords)
        given = signature.bind(self, *arguments, **keywords).arguments
        try:
            shapes = shapes_of(self, given)
            graph = graph_inference.with_known_sources(self, graph, shapes)
        except _failures():
            shapes = {}
        if "kwargs" in signature.parameters:
            keywords = {**keywords, **shapes}
        executor = _compiled_executor(method, self, graph, shapes, given, arguments, keywords)
        if executor is None:
            if given.get("group2ctx"):
                variables.plan_memory_apart()
            executor = method(_for_executors(self, graph), *arguments, **keywords)
        # The symbol that the user knows.
        executor._symbol = self
        return executor

    return bind


def _compiled_executor(
    method: Any,
    symbol: Any,
    graph: Graph,
    shapes: Shapes,
    given: dict[str, Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """An executor of the compiled graph, or `None` if it cannot be compiled."""
    if not shapes or not _only_forward(given) or not _has_floats(symbol, given):
        return None
    try:
        compiled = compiled_graphs.compiled(symbol, graph, shapes)
        if compiled is None or compiled.list_inputs() != symbol.list_inputs():
            return None
        executor = method(compiled, *arguments, **keywords)
        _make_plain(compiled_graphs.weights(graph), executor.arg_dict)
    except _failures():
        return None
    return executor


def _partitioning(method: Any) -> Any:
    """`Symbol.optimize_for`, after which no guards can be added."""

    @functools.wraps(method)
    def optimize_for(self: Any, *arguments: Any, **keywords: Any) -> Any:
        graph = graph_json.read(self)
        if graph is not None and not graph_json.is_partitioned(graph):
            self = _guarded(graph, self, of_data="clip")
        return method(self, *arguments, **keywords)

    return optimize_for


def _monitoring(method: Any) -> Any:
    """`Executor.set_monitor_callback` that names what users know: inputs by role, and no guards."""

    @functools.wraps(method)
    def set_monitor_callback(self: Any, callback: Any, monitor_all: bool = False) -> None:
        graph = graph_json.read(self._symbol)
        if graph is None:
            method(self, callback, monitor_all)
            return
        # An operator of a library has inputs without names.
        roles = {
            f"{node['name']}_input{number}": f"{node['name']}_{role}"
            for node in graph["nodes"]
            if graph_json.is_ours(node)
            for number, role in enumerate(("data", "weight", "bias"))
        }

        def heard(name: bytes, array: Any) -> None:
            text = name.decode()
            callback(roles.get(text, text).encode(), array)

        method(self, guards.unheard(heard), monitor_all)

    return set_monitor_callback


def _reshaping(method: Any) -> Any:
    """`Executor.reshape`, which binds the user's graph again if shapes were written into it."""

    @functools.wraps(method)
    def reshape(
        self: Any, partial_shaping: bool = False, allow_up_sizing: bool = False, **shapes: Any
    ) -> Any:
        from mxnet import MXNetError

        try:
            return method(self, partial_shaping, allow_up_sizing, **shapes)
        except MXNetError:
            rebound = _rebound(self, partial_shaping, allow_up_sizing, shapes)
            if rebound is None:
                raise
            return rebound

    return reshape


def _rebound(executor: Any, partial_shaping: bool, allow_up_sizing: bool, shapes: Shapes) -> Any:
    """An executor of other shapes with the same arrays where theirs stay; `None` if not allowed."""
    from mxnet import nd

    symbol = executor._symbol
    if graph_json.read(symbol) is None:
        return None
    needed, _, _ = symbol.infer_shape(**shapes)
    if needed is None:
        return None
    arrays, gradients = [], []
    names = symbol.list_arguments()
    for name, shape, array, gradient in zip(
        names, needed, executor.arg_arrays, executor.grad_arrays
    ):
        if shape != array.shape:
            grows = np.prod(shape) > array.size
            if (name not in shapes and not partial_shaping) or (grows and not allow_up_sizing):
                return None
            array = nd.zeros(shape, ctx=array.context, dtype=array.dtype)
            gradient = None if gradient is None else nd.zeros_like(array)
        arrays.append(array)
        gradients.append(gradient)
    return symbol.bind(
        executor._ctx,
        arrays,
        None if all(gradient is None for gradient in gradients) else gradients,
        executor._grad_req,
        executor.aux_arrays,
        executor._group2ctx,
    )


def _for_executors(symbol: Any, graph: Graph) -> Any:
    """The graph as executors run it.

    Control flow runs the graphs inside it by CachedOps, and around it arrays must be plain.
    """
    if graph_json.is_partitioned(graph):
        return symbol
    if graph_json.has_control_flow(graph):
        return _guarded(graph, symbol)
    return graph_json.write(graph, symbol)


def _guarded(graph: Graph, like: Any, of_data: str = "reshape") -> Any:
    """The Symbol with guards, for a CachedOp."""
    if graph_json.has_control_flow(graph):
        variables.plan_memory_apart()
    return graph_json.write(guards.guarded(graph, of_data=of_data), like)


def _only_forward(given: dict[str, Any]) -> bool:
    """Whether an executor of these arguments has no gradients and is on the CPU."""
    requests = given.get("grad_req", "write")
    requests = requests.values() if isinstance(requests, dict) else requests
    requests = [requests] if isinstance(requests, str) else requests or ()
    none_asked = all(request == "null" for request in requests)
    no_room = "args" in given and not given.get("args_grad")
    on_cpu = getattr(given.get("ctx"), "device_type", None) == "cpu"
    return on_cpu and not given.get("group2ctx") and (none_asked or no_room)


def _has_floats(symbol: Any, given: dict[str, Any]) -> bool:
    """Whether our operators have all the types; others fall through to the custom operator, which
    explains."""
    if "args" in given:
        return _are_floats(array.dtype for array in _bound_arrays(symbol, given).values())
    return _are_floats((given.get("type_dict") or {}).values())


def _are_floats(types: Iterable[Any]) -> bool:
    return all(np.dtype(dtype).name in ITEM_BYTES for dtype in types)


def _bound_arrays(symbol: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arrays that `bind` is given. Raises `TypeError` if one is not an array."""
    from mxnet.ndarray import NDArray

    args = given["args"]
    arrays = args if isinstance(args, dict) else dict(zip(symbol.list_arguments(), args))
    if not all(isinstance(array, NDArray) for array in arrays.values()):
        raise TypeError("bind takes NDArrays")
    return arrays


def _bound_shapes(symbol: Any, given: dict[str, Any]) -> Shapes:
    """Shapes of the arrays that `bind` is given."""
    return {name: tuple(array.shape) for name, array in _bound_arrays(symbol, given).items()}


def _inferred_shapes(symbol: Any, given: dict[str, Any]) -> Shapes:
    """Shapes of all arguments, inferred from those that `simple_bind` is given."""
    return graph_inference.argument_shapes(symbol, given.get("kwargs", {}))


def _make_plain(names: set[str], arrays: dict[str, Any]) -> None:
    """Undo blocked layouts that MXNet's convolutions have left the weights of ours in.

    Results are right either way, but MXNet would convert the weights again in every call.
    """
    from mxnet import nd

    for name in names & arrays.keys():
        # Not in place: a blocked output is declared plain before its old values are read.
        nd.identity(guards.plain_gradient(nd, arrays[name]), out=arrays[name])


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
            super().__init__(_guarded(graph, sym), flags)
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
        except _failures():
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
            with contextlib.suppress(*_failures()):
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
        _make_plain(compiled_graphs.weights(graph), parameters)
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
        guarded = self._plain(_guarded(graph, symbol), self._flags)
        made = _DualCachedOp(self._plain, guarded, symbol, graph, self._flags)
        if self._hook[0]:
            made.register_hook(*self._hook)
        return made
