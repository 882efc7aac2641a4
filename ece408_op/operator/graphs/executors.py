"""Executors on graphs with our operator.

An executor without gradients runs the compiled operator; others are bound to the unchanged graph.
On the CPU, without a monitor, substitute executors on the same arrays run in their place: one with
parts that are one node each for inference, and one with compiled gradients for training.

An executor of a graph with parts for our GPU backend never runs itself: the graph is put back
together, and in inference on CPU arrays cut again for these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...problem import ITEM_BYTES
from .. import array_memory, compiled_operator, parts_at_work, variables
from ..parts_at_work import Parts
from . import (
    compiled_graphs,
    graph_inference,
    graph_json,
    guards,
    partition,
    parts,
    training_parts,
)
from .graph_inference import Shapes
from .graph_json import Graph

# Attribute of our executors on the CPU: the substitutes.
_SUBSTITUTES = "_ece408_substitutes"
# Attribute of each executor on our graphs: its bound arrays.
_BOUND = "_ece408_bound"


class Bound(NamedTuple):
    """The arrays to which an executor was bound. It uses them even if its user changes its lists
    and dictionaries later."""

    arguments: list[Any]
    gradients: list[Any]
    states: list[Any]

    @classmethod
    def of(cls, executor: Any) -> Bound:
        """Record those of an unchanged executor."""
        gradients = executor.grad_arrays or [None] * len(executor.arg_arrays)
        return cls(list(executor.arg_arrays), list(gradients), list(executor.aux_arrays))

    def named(self, symbol: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return them by the names in `symbol`; gradients without `None`."""
        names = symbol.list_arguments()
        wanted = {name: each for name, each in zip(names, self.gradients) if each is not None}
        states = dict(zip(symbol.list_auxiliary_states(), self.states))
        return dict(zip(names, self.arguments)), wanted, states


def install(mxnet: Any) -> None:
    """Make MXNet's executors use this module."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name, shapes_of in (("bind", _bound_shapes), ("simple_bind", _inferred_shapes)):
        method = getattr(symbol_class, name)
        setattr(symbol_class, name, _binding(method, shapes_of))
    executor_class = mxnet.executor.Executor
    for name, wrapped in (
        ("forward", _forwarding),
        ("backward", functools.partial(_backwarding, executor_class.forward)),
        ("set_monitor_callback", _monitoring),
        ("reshape", _reshaping),
    ):
        setattr(executor_class, name, wrapped(getattr(executor_class, name)))


def _binding(method: Any, shapes_of: Any) -> Any:
    """Wrap `bind` or `simple_bind` for our graphs."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def bind(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with compiled_graphs.ONE_AT_A_TIME:
            if parts.read(self) is not None:
                executor = method(self, *arguments, **keywords)
                setattr(executor, _BOUND, Bound.of(executor))
                setattr(executor, _SUBSTITUTES, _OnGpu())
                return executor
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
            if shapes and _is_on_cpu(given) and _has_floats(self, given):
                setattr(executor, _SUBSTITUTES, _Substitutes(is_compiled=False))
        setattr(executor, _BOUND, Bound.of(executor))
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
    """Return an executor of the compiled graph, or `None` if it cannot be compiled."""
    if not shapes or not _only_forward(given) or not _has_floats(symbol, given):
        return None
    try:
        compiled = compiled_graphs.compiled(symbol, graph, shapes)
        if compiled is None or compiled.list_inputs() != symbol.list_inputs():
            return None
        executor = method(compiled, *arguments, **keywords)
    except compiled_graphs.failures():
        return None
    if _is_on_cpu(given):
        setattr(executor, _SUBSTITUTES, _Substitutes(is_compiled=True))
        _make_plain(graph, {**executor.arg_dict, **executor.aux_dict})
    return executor


def _make_plain(graph: Graph, arrays: Mapping[str, Any]) -> None:
    """Convert parameters in blocked layouts, which MXNet would convert in each call."""
    array_memory.make_plain([arrays[n] for n in compiled_graphs.weights(graph) & arrays.keys()])


class _Substitutes:
    """The substitutes of an executor, on the same arrays. Each is created at first use, or found to
    be impossible."""

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        # By (for training, how parts run); and the parts, which inference alone has.
        self._made: dict[tuple[bool, str], Any] = {}
        self._parts: list[Parts] = []
        # The substitute that ran last (`None`: the executor itself), and whether that was for
        # training.
        self.last: Any = None
        self.was_training = False

    def fresh(self) -> _Substitutes:
        """Return new substitutes for an executor on other arrays."""
        return _Substitutes(self._is_compiled)

    def of(self, executor: Any, is_train: bool) -> Any:
        """Return the substitute of `executor`, or `None`."""
        if executor._monitor_callback is not None:
            return None
        key = is_train, parts_at_work.mode()
        if key not in self._made:
            found = None
            with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
                found = self._make(executor, is_train)
            self._made[key] = found
            graph = graph_json.read(executor._symbol)
            if found is not None and graph is not None:
                arrays, _, states = getattr(executor, _BOUND).named(executor._symbol)
                _make_plain(graph, {**arrays, **states})
        return self._made[key]

    def _make(self, executor: Any, is_train: bool) -> Any:
        symbol = executor._symbol
        graph = graph_json.read(symbol)
        if graph is None or graph_json.is_partitioned(graph):
            return None
        given, all_gradients, own_states = getattr(executor, _BOUND).named(symbol)
        arrays = {**given, **own_states}
        shapes = {name: array.shape for name, array in given.items()}
        graph = graph_inference.with_known_sources(symbol, graph, shapes)
        requests = _requests(executor, all_gradients) if is_train else {}
        gradients = {name: all_gradients[name] for name in requests}
        if not is_train:
            found, opened = partition.with_parts(symbol, graph, arrays)
            if opened is None and self._is_compiled:
                return None
        elif self._is_compiled:
            return None
        else:
            found, opened = training_parts.compiled(
                *(symbol, graph, arrays, gradients, _added(requests))
            )
        if opened is not None:
            opened.forget({name: arrays[name] for name in opened.parameters})
            self._parts.append(opened)
        if found is None:
            return None
        return _second(executor, found, arrays, gradients, requests)


def _added(requests: Mapping[str, str]) -> list[str]:
    return [name for name, request in requests.items() if request == "add"]


def _second(
    executor: Any,
    symbol: Any,
    arrays: Mapping[str, Any],
    gradients: Mapping[str, Any],
    requests: Mapping[str, str],
) -> Any:
    """Return an executor of another graph on the arrays of `executor`."""
    arguments = {name: arrays[name] for name in symbol.list_arguments()}
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    others = executor._group2ctx
    asked = dict(requests) or "null"
    second = symbol.bind(executor._ctx, arguments, gradients, asked, states, others)
    # `forward` writes its inputs to this dictionary's arrays, even to unbound ones.
    second._arg_dict = executor.arg_dict
    return second


class _OnGpu(_Substitutes):
    """Those of an executor of a graph with parts on the GPU, which cannot run itself: one of the
    graph without parts, with the executor's monitor if any, and one with the parts that suit its
    arrays."""

    def __init__(self, monitor: Any = None) -> None:
        super().__init__(is_compiled=False)
        self._monitor = monitor
        self._whole: Any = None
        # By whether it trains; `None` if it has no parts.
        self._cut: dict[bool, Any] = {}

    def fresh(self) -> _OnGpu:
        return _OnGpu(self._monitor)

    def monitor(self, *how: Any) -> None:
        """Set a monitor, as executors do."""
        self._monitor = how
        if self._whole is not None:
            self._whole.set_monitor_callback(*how)

    def of(self, executor: Any, is_train: bool) -> Any:
        on_cpu = executor._ctx.device_type == "cpu" and not executor._group2ctx
        if self._monitor is not None or not on_cpu:
            return self.without_parts(executor)
        if is_train not in self._cut:
            found = None
            with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
                found = self._with_parts(executor, is_train)
            self._cut[is_train] = found
        found = self._cut[is_train]
        return self.without_parts(executor) if found is None else found

    def without_parts(self, executor: Any) -> Any:
        if self._whole is None:
            arguments, gradients, states = getattr(executor, _BOUND).named(executor._symbol)
            requests = _requests(executor, gradients)
            symbol = parts.put_back_symbol(executor._symbol)
            gradients = {name: gradients[name] for name in requests}
            arrays = {**arguments, **states}
            self._whole = _second(executor, symbol, arrays, gradients, requests)
            if self._monitor is not None:
                self._whole.set_monitor_callback(*self._monitor)
        return self._whole

    def _with_parts(self, executor: Any, is_train: bool) -> Any:
        arguments, all_gradients, states = getattr(executor, _BOUND).named(executor._symbol)
        arrays = {**arguments, **states}
        symbol = partition.with_known_sources(parts.put_back_symbol(executor._symbol), arrays)
        requests = _requests(executor, all_gradients) if is_train else {}
        gradients = {name: all_gradients[name] for name in requests}
        if is_train:
            graph = json.loads(graph_json.text(symbol))
            found, opened = training_parts.compiled(
                *(symbol, graph, arrays, gradients, _added(requests)), on="gpu"
            )
        else:
            choice = partition.choose_for(symbol, arrays, None)
            found, opened = partition.in_parts(choice, arrays, Parts())
        if found is None or opened is None or not opened.numbers:
            return None
        kept = {name: arrays[name] for name in opened.parameters}
        opened.forget(kept)
        array_memory.make_plain(list(kept.values()))
        self._parts.append(opened)
        return _second(executor, found, arrays, gradients, requests)


def _requests(executor: Any, gradients: Mapping[str, Any]) -> dict[str, str]:
    """Return the executor's gradient requests (grad_req) for these gradients, where set."""
    given, names = executor._grad_req, executor._symbol.list_arguments()
    if isinstance(given, str):
        given = dict.fromkeys(names, given)
    elif not isinstance(given, dict):
        given = dict(zip(names, given))
    asked = {name: request for name, request in given.items() if request != "null"}
    return {name: asked[name] for name in names if name in asked and name in gradients}


def _forwarding(method: Any) -> Any:
    """Wrap `Executor.forward` to use the substitute, if any."""

    @functools.wraps(method)
    def forward(self: Any, is_train: bool = False, **inputs: Any) -> Any:
        substitutes = vars(self).get(_SUBSTITUTES)
        if substitutes is None:
            return method(self, is_train, **inputs)
        found = substitutes.of(self, bool(is_train))
        if found is not substitutes.last:
            # An executor does not declare to MXNet that it writes moving averages.
            array_memory.wait_for_uses(getattr(self, _BOUND).states)
        substitutes.last, substitutes.was_training = found, bool(is_train)
        if found is None:
            return method(self, is_train, **inputs)
        # Earlier readers of the outputs hold these arrays.
        for result, output in zip(found.forward(is_train, **inputs), self.outputs):
            result.copyto(output)
        return self.outputs

    return forward


def _backwarding(forward: Any, method: Any) -> Any:
    """Wrap `Executor.backward` to use the executor that has run forward."""

    @functools.wraps(method)
    def backward(self: Any, out_grads: Any = None, is_train: bool = True) -> Any:
        substitutes = vars(self).get(_SUBSTITUTES)
        if substitutes is None or substitutes.last is None:
            return method(self, out_grads, is_train)
        if substitutes.was_training and is_train:
            return substitutes.last.backward(out_grads, is_train)
        # Gradients of an inference pass, which the substitute does not have.
        array_memory.wait_for_uses(getattr(self, _BOUND).states)
        if isinstance(substitutes, _OnGpu):
            substitutes.last = substitutes.without_parts(self)
            substitutes.last.forward(substitutes.was_training)
            return substitutes.last.backward(out_grads, is_train)
        substitutes.last = None
        forward(self, substitutes.was_training)
        return method(self, out_grads, is_train)

    return backward


def _monitoring(method: Any) -> Any:
    """Wrap `Executor.set_monitor_callback`: report inputs by role, and no guards."""

    @functools.wraps(method)
    def set_monitor_callback(self: Any, callback: Any, monitor_all: bool = False) -> None:
        substitutes = vars(self).get(_SUBSTITUTES)
        if isinstance(substitutes, _OnGpu):
            substitutes.monitor(callback, monitor_all)
        graph = graph_json.read(self._symbol)
        if graph is None:
            method(self, callback, monitor_all)
            return
        # Inputs of a library's operator have no names.
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
    """Wrap `Executor.reshape`: bind the user's graph again if shapes were written into it."""

    @functools.wraps(method)
    def reshape(
        self: Any, partial_shaping: bool = False, allow_up_sizing: bool = False, **shapes: Any
    ) -> Any:
        from mxnet import MXNetError

        try:
            reshaped = method(self, partial_shaping, allow_up_sizing, **shapes)
            # MXNet's executor keeps its monitor, but not in Python's object.
            reshaped._monitor_callback = self._monitor_callback
            if _BOUND in vars(self):
                setattr(reshaped, _BOUND, Bound.of(reshaped))
            if _SUBSTITUTES in vars(self):
                setattr(reshaped, _SUBSTITUTES, getattr(self, _SUBSTITUTES).fresh())
            return reshaped
        except MXNetError:
            rebound = _rebound(self, partial_shaping, allow_up_sizing, shapes)
            if rebound is None:
                raise
            return rebound

    return reshape


def _rebound(executor: Any, partial_shaping: bool, allow_up_sizing: bool, shapes: Shapes) -> Any:
    """Return an executor of other shapes that reuses arrays of unchanged shapes; `None` if not
    allowed."""
    from mxnet import nd

    symbol = executor._symbol
    if graph_json.read(symbol) is None:
        return None
    needed, _, _ = symbol.infer_shape(**shapes)
    if needed is None:
        return None
    arrays, gradients = [], []
    bound = getattr(executor, _BOUND)
    names = symbol.list_arguments()
    for name, shape, array, gradient in zip(names, needed, bound.arguments, bound.gradients):
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
        bound.states,
        executor._group2ctx,
    )


def _for_executors(symbol: Any, graph: Graph) -> Any:
    """Return the graph for executors.

    Control flow runs its inner graphs by CachedOps, and its inputs must be plain.
    """
    if graph_json.is_partitioned(graph):
        return symbol
    if graph_json.has_control_flow(graph):
        return guards.guarded_symbol(graph, symbol)
    return graph_json.write(graph, symbol)


def _is_on_cpu(given: dict[str, Any]) -> bool:
    on_cpu = getattr(given.get("ctx"), "device_type", None) == "cpu"
    return on_cpu and not given.get("group2ctx")


def _is_on_gpu(given: dict[str, Any]) -> bool:
    """Return whether an executor of these arguments is on a GPU that has the compiled operator."""
    return compiled_operator.runs_on_gpu(given.get("ctx")) and not given.get("group2ctx")


def _only_forward(given: dict[str, Any]) -> bool:
    """Return whether an executor of these arguments has no gradients and a device that has the
    compiled operator."""
    requests = given.get("grad_req", "write")
    requests = requests.values() if isinstance(requests, dict) else requests
    requests = [requests] if isinstance(requests, str) else requests or ()
    none_asked = all(request == "null" for request in requests)
    no_room = "args" in given and not given.get("args_grad")
    return (none_asked or no_room) and (_is_on_cpu(given) or _is_on_gpu(given))


def _has_floats(symbol: Any, given: dict[str, Any]) -> bool:
    """Return whether our operators support all types; otherwise the custom operator runs, and
    explains the error."""
    if "args" in given:
        return _are_floats(array.dtype for array in _bound_arrays(symbol, given).values())
    return _are_floats((given.get("type_dict") or {}).values())


def _are_floats(types: Iterable[Any]) -> bool:
    return all(np.dtype(dtype).name in ITEM_BYTES for dtype in types)


def _bound_arrays(symbol: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays passed to `bind`. Raises `TypeError` if one is not an array."""
    from mxnet.ndarray import NDArray

    args = given["args"]
    arrays = args if isinstance(args, dict) else dict(zip(symbol.list_arguments(), args))
    if not all(isinstance(array, NDArray) for array in arrays.values()):
        raise TypeError("bind takes NDArrays")
    return arrays


def _bound_shapes(symbol: Any, given: dict[str, Any]) -> Shapes:
    """Return the shapes of the arrays passed to `bind`."""
    return {name: tuple(array.shape) for name, array in _bound_arrays(symbol, given).items()}


def _inferred_shapes(symbol: Any, given: dict[str, Any]) -> Shapes:
    """Return the shapes of all arguments, inferred from those passed to `simple_bind`."""
    return graph_inference.argument_shapes(symbol, given.get("kwargs", {}))
