"""Executors on graphs with our operator.

An executor without gradients runs the compiled operator; others are bound to the unchanged graph.
On the CPU, without a monitor, substitute executors on the same arrays run in their place: one with
parts that are one node each for inference, some of them on the GPU if the graph has marks, and one
with compiled gradients for training.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ... import settings
from .. import array_memory, compiled_operator, parts_at_work, variables
from ..parts_at_work import Parts
from . import compiled_graphs, graph_inference, graph_json, guards, partition, training_parts
from .graph_inference import Shapes
from .graph_json import Graph

# Attribute of each executor of our graphs: its `_Ours`.
_OURS = "_ece408"


def install(mxnet: Any) -> None:
    """Make MXNet's executors use this module."""
    symbol_class = mxnet.symbol.symbol.Symbol
    inferred = graph_inference.argument_shapes
    for name, shapes_of in (("bind", _bound_shapes), ("simple_bind", inferred)):
        setattr(symbol_class, name, _binding(getattr(symbol_class, name), shapes_of))
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
            graph = graph_json.read(self)
            if graph is not None:
                return bind_ours(self, graph, arguments, keywords)
        return method(self, *arguments, **keywords)

    def bind_ours(
        self: Any, graph: Graph, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        given = signature.bind(self, *arguments, **keywords).arguments
        try:
            shapes = shapes_of(self, given["args"] if "args" in given else given.get("kwargs", {}))
            graph = graph_inference.with_known_sources(self, graph, shapes)
        except compiled_graphs.failures():
            shapes = {}
        if "kwargs" in signature.parameters:
            keywords = {**keywords, **shapes}
        executor, modes = None, [False]
        if shapes and _only_forward(given):
            with contextlib.suppress(*compiled_graphs.failures()):
                compiled = compiled_graphs.compiled(self, graph, shapes)
                if compiled is not None and compiled.list_inputs() == self.list_inputs():
                    executor = method(compiled, *arguments, **keywords)
        if executor is None:
            if given.get("group2ctx"):
                variables.plan_memory_apart()
            executor = method(_for_executors(self, graph), *arguments, **keywords)
            modes = [False, True]
        # The symbol that the user knows.
        executor._symbol = self
        setattr(executor, _OURS, _Ours(executor, modes if shapes and _is_on_cpu(given) else []))
        return executor

    return bind


class _Ours:
    """Record of an executor of our graphs: the arrays to which it was bound, which it uses
    even if its user changes its lists and dictionaries later, and its substitutes on these. Each is
    created at first use, or found to be impossible."""

    def __init__(self, executor: Any, modes: Collection[bool]) -> None:
        """`modes` are those of calls that may have substitutes: with `is_train`, without."""
        self.arguments: list[Any] = list(executor.arg_arrays)
        self.gradients: list[Any] = list(executor.grad_arrays or [None] * len(self.arguments))
        self.states: list[Any] = list(executor.aux_arrays)
        self.modes = modes
        # By (for training, how parts run); and the parts, which use these arrays.
        self._made: dict[Any, Any] = {}
        self._parts: list[Parts] = []
        # The substitute that ran last (`None`: the executor itself), and whether that was for
        # training.
        self.last: Any = None
        self.was_training = False
        # The executor's own outputs if its user's are others: MXNet computes relu in place, also on
        # an array that is an output, too.
        self.outputs: list[Any] = []
        places = {array_memory.pointer(each) for each in executor.outputs if modes}
        if 0 < len(places) < len(executor.outputs):
            self.outputs = executor.outputs
            executor.outputs = [each.copy() for each in self.outputs]

    def of(self, executor: Any, is_train: bool) -> Any:
        """Return the substitute of `executor`, or `None`."""
        if executor._monitor_callback is not None or is_train not in self.modes:
            return None
        key = is_train, parts_at_work.mode(), settings.backend()
        if key not in self._made:
            self._made[key] = None
            with compiled_graphs.ONE_AT_A_TIME, contextlib.suppress(*compiled_graphs.failures()):
                self._made[key] = self._make(executor, is_train)
        return self._made[key]

    def _make(self, executor: Any, is_train: bool) -> Any:
        """Return an executor of a compiled graph on the arrays of `executor`, or `None`."""
        symbol = executor._symbol
        graph = graph_json.read(symbol)
        if graph is None:
            return None
        names = symbol.list_arguments()
        given = dict(zip(names, self.arguments))
        arrays = {**given, **dict(zip(symbol.list_auxiliary_states(), self.states))}
        shapes = {name: array.shape for name, array in given.items()}
        graph = graph_inference.with_known_sources(symbol, graph, shapes)
        # MXNet would convert parameters in blocked layouts in each call.
        array_memory.make_plain([arrays[name] for name in compiled_graphs.weights(graph)])
        gradients: dict[str, Any] = {}
        requests: dict[str, str] | str = "null"
        if is_train:
            every = {name: each for name, each in zip(names, self.gradients) if each is not None}
            requests = _requests(executor, every)
            gradients = {name: every[name] for name in requests}
            added = [name for name, request in requests.items() if request == "add"]
            found, opened = training_parts.compiled(symbol, graph, arrays, gradients, added)
        else:
            choice = partition.for_inference(symbol, graph, arrays)
            found, opened = partition.in_parts(choice, arrays)
            if opened is None and True not in self.modes:
                # It is compiled itself.
                return None
        if found is None:
            return None
        if opened is not None:
            opened.forget({name: arrays[name] for name in opened.parameters})
            self._parts.append(opened)
        arguments = {name: arrays[name] for name in found.list_arguments()}
        states = {name: arrays[name] for name in found.list_auxiliary_states()}
        others = executor._group2ctx
        second = found.bind(executor._ctx, arguments, gradients, requests, states, others)
        # `forward` writes its inputs to this dictionary's arrays, even to unbound ones.
        second._arg_dict = executor.arg_dict
        return second


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
        ours = vars(self).get(_OURS)
        if ours is None:
            return method(self, is_train, **inputs)
        found = ours.of(self, bool(is_train))
        if found is not ours.last:
            # An executor does not declare to MXNet that it writes moving averages.
            array_memory.wait_for_uses(ours.states)
        ours.last, ours.was_training = found, bool(is_train)
        if found is None:
            method(self, is_train, **inputs)
        results = ours.outputs if found is None else found.forward(is_train, **inputs)
        # Earlier readers of the outputs hold these arrays.
        for result, output in zip(results, self.outputs):
            result.copyto(output)
        return self.outputs

    return forward


def _backwarding(forward: Any, method: Any) -> Any:
    """Wrap `Executor.backward` to use the executor that has run forward."""

    @functools.wraps(method)
    def backward(self: Any, out_grads: Any = None, is_train: bool = True) -> Any:
        ours = vars(self).get(_OURS)
        if ours is None or ours.last is None:
            return method(self, out_grads, is_train)
        if ours.was_training and is_train:
            return ours.last.backward(out_grads, is_train)
        # Gradients of an inference pass, which the substitute does not have.
        array_memory.wait_for_uses(ours.states)
        ours.last = None
        forward(self, ours.was_training)
        return method(self, out_grads, is_train)

    return backward


def _monitoring(method: Any) -> Any:
    """Wrap `Executor.set_monitor_callback`: report inputs by role, and no guards."""

    @functools.wraps(method)
    def set_monitor_callback(self: Any, callback: Any, monitor_all: bool = False) -> None:
        graph = graph_json.read(self._symbol)
        if graph is None:
            method(self, guards.unheard(callback), monitor_all)
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
            if _OURS in vars(self):
                setattr(reshaped, _OURS, _Ours(reshaped, getattr(self, _OURS).modes))
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
    bound = getattr(executor, _OURS)
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
    some = None if all(gradient is None for gradient in gradients) else gradients
    others = executor._grad_req, bound.states, executor._group2ctx
    return symbol.bind(executor._ctx, arrays, some, *others)


def _for_executors(symbol: Any, graph: Graph) -> Any:
    """Return the graph for executors. Control flow runs its inner graphs by CachedOps, and its
    inputs must be plain."""
    if graph_json.has_control_flow(graph):
        return guards.guarded_symbol(graph, symbol)
    return graph_json.write(graph, symbol)


def _is_on_cpu(given: dict[str, Any]) -> bool:
    on_cpu = getattr(given.get("ctx"), "device_type", None) == "cpu"
    return on_cpu and not given.get("group2ctx")


def _only_forward(given: dict[str, Any]) -> bool:
    """Return whether an executor of these arguments has no gradients and a device that has the
    compiled operator."""
    requests = given.get("grad_req", "write")
    requests = requests.values() if isinstance(requests, dict) else requests
    requests = [requests] if isinstance(requests, str) else requests or ()
    none_asked = all(request == "null" for request in requests)
    no_room = "args" in given and not given.get("args_grad")
    on_gpu = compiled_operator.runs_on_gpu(given.get("ctx")) and not given.get("group2ctx")
    return (none_asked or no_room) and (on_gpu or _is_on_cpu(given))


def _bound_shapes(symbol: Any, args: Any) -> Shapes:
    """Return the shapes of the arrays passed to `bind`. Raises `TypeError` if one is not an
    array."""
    from mxnet.ndarray import NDArray

    arrays = args if isinstance(args, dict) else dict(zip(symbol.list_arguments(), args))
    if not all(isinstance(array, NDArray) for array in arrays.values()):
        raise TypeError("bind takes NDArrays")
    return {name: tuple(array.shape) for name, array in arrays.items()}
