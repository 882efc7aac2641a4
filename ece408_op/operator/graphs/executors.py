"""What MXNet's executors run instead of a graph with our operator.

An executor without gradients on the CPU gets the compiled operator, and what follows convolutions
fused into them while it runs with moving averages and nobody listens to its nodes. Others get the
graph as it is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...problem import ITEM_BYTES
from .. import variables
from . import compiled_graphs, graph_inference, graph_json, guards
from .graph_inference import Shapes
from .graph_json import Graph

# The attribute of an executor of ours that holds its fused one: `_TO_MAKE` before its first use,
# `None` if there is none.
_FUSED = "_ece408_fused"
_TO_MAKE = object()


def install(mxnet: Any) -> None:
    """Have MXNet's executors take their graphs from here."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name, shapes_of in (("bind", _bound_shapes), ("simple_bind", _inferred_shapes)):
        method = getattr(symbol_class, name)
        setattr(symbol_class, name, _binding(method, shapes_of))
    executor_class = mxnet.executor.Executor
    for name, wrapped in (
        ("forward", _forwarding),
        ("set_monitor_callback", _monitoring),
        ("reshape", _reshaping),
    ):
        setattr(executor_class, name, wrapped(getattr(executor_class, name)))


def _binding(method: Any, shapes_of: Any) -> Any:
    """`bind` or `simple_bind` on a graph of ours."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def bind(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with compiled_graphs.ONE_AT_A_TIME:
            graph = graph_json.read(self)
            if graph is not None:
                return bind_ours(self, graph, arguments, keywords)
        return method(self, *arguments, **keywords)

    def bind_ours(
        self: Any, graph: Graph, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        given = signature.bind(self, *arguments, **keywords).arguments
        try:
            shapes = shapes_of(self, given)
            graph = graph_inference.with_known_sources(self, graph, shapes)
        except compiled_graphs.failures():
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
        guards.make_plain(compiled_graphs.weights(graph), executor.arg_dict)
    except compiled_graphs.failures():
        return None
    setattr(executor, _FUSED, _TO_MAKE)
    return executor


def _forwarding(method: Any) -> Any:
    """`Executor.forward`, by the fused executor where there is one."""

    @functools.wraps(method)
    def forward(self: Any, is_train: bool = False, **inputs: Any) -> Any:
        fused = None if is_train or self._monitor_callback is not None else _fused(self)
        if fused is None:
            return method(self, is_train, **inputs)
        # Who has asked for the outputs before holds these arrays.
        for found, output in zip(method(fused, False, **inputs), self.outputs):
            found.copyto(output)
        return self.outputs

    return forward


def _fused(executor: Any) -> Any:
    """The executor of the fused graph on the same arrays, or `None`; tries to make it at first."""
    found = vars(executor).get(_FUSED)
    if found is _TO_MAKE:
        found = None
        with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
            found = _make_fused(executor)
        setattr(executor, _FUSED, found)
    return found


def _make_fused(executor: Any) -> Any:
    symbol, arrays = executor._symbol, {**executor.arg_dict, **executor.aux_dict}
    graph = graph_json.read(symbol)
    if graph is None or any(array.dtype != np.float32 for array in arrays.values()):
        return None
    shapes = {name: array.shape for name, array in executor.arg_dict.items()}
    graph = graph_inference.with_known_sources(symbol, graph, shapes)
    plain, fused = (compiled_graphs.compiled(symbol, graph, shapes, fuse) for fuse in (False, True))
    if fused is None or fused.tojson() == plain.tojson():
        return None
    arguments = {name: arrays[name] for name in fused.list_arguments()}
    states = {name: arrays[name] for name in fused.list_auxiliary_states()}
    return fused.bind(executor._ctx, arguments, grad_req="null", aux_states=states)


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
            reshaped = method(self, partial_shaping, allow_up_sizing, **shapes)
            if _FUSED in vars(self):
                setattr(reshaped, _FUSED, _TO_MAKE)
            return reshaped
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
        return guards.guarded_symbol(graph, symbol)
    return graph_json.write(graph, symbol)


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
