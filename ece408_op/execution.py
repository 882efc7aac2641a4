"""What MXNet runs in the place of a graph with our operator, by who runs it.

Executors get the bare graph. Executors without gradients, and hybridized Gluon blocks while
nothing is recorded, get the compiled operator, on the CPU. It happens as MXNet is handed a graph;
what users hold, save and export is never touched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import bare_graphs, forward_operator, layout_guard
from .problem import ITEM_BYTES


def install(mxnet: Any) -> None:
    """Have MXNet's executors and hybridized blocks take their graphs from here."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name, shapes_of in (("bind", _bound_shapes), ("simple_bind", _inferred_shapes)):
        method = getattr(symbol_class, name)
        setattr(symbol_class, name, _binding(method, shapes_of))
    block_class = mxnet.gluon.HybridBlock
    block_class._build_cache = _caching(block_class._build_cache)


def _binding(method: Any, shapes_of: Any) -> Any:
    """`bind` or `simple_bind` on a graph of ours."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def bind(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not bare_graphs.has_ours(self):
            return method(self, *arguments, **keywords)
        given = signature.bind(self, *arguments, **keywords).arguments
        shapes = shapes_of(self, given) if _only_forward(given) else None
        compiled = None if shapes is None else bare_graphs.compiled(self, shapes)
        if compiled is not None:
            # Whatever is wrong, the custom operator says it in this package's words.
            with contextlib.suppress(RuntimeError):
                executor = method(compiled, *arguments, **keywords)
                _make_plain(compiled, executor.arg_dict)
                return executor
        return method(bare_graphs.bare(self), *arguments, **keywords)

    return bind


def _only_forward(given: dict[str, Any]) -> bool:
    """Whether an executor of these arguments has no gradients and is on the CPU."""
    requests = given.get("grad_req", "write")
    requests = requests.values() if isinstance(requests, dict) else requests
    requests = [requests] if isinstance(requests, str) else requests or ()
    none_asked = all(request == "null" for request in requests)
    no_room = "args" in given and not given.get("args_grad")
    on_cpu = getattr(given.get("ctx"), "device_type", None) == "cpu"
    return on_cpu and not given.get("group2ctx") and (none_asked or no_room)


def _bound_shapes(symbol: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Shapes of the arrays that `bind` is given."""
    from mxnet.ndarray import NDArray

    args = given["args"]
    arrays = args if isinstance(args, dict) else dict(zip(symbol.list_arguments(), args))
    if not all(isinstance(array, NDArray) for array in arrays.values()):
        return None
    if not _are_floats(array.dtype for array in arrays.values()):
        return None
    return {name: array.shape for name, array in arrays.items()}


def _inferred_shapes(symbol: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Shapes of arguments as they follow from those that `simple_bind` is given."""
    from mxnet import MXNetError

    if not _are_floats((given.get("type_dict") or {}).values()):
        return None
    try:
        # Unlike `infer_shape` it prints nothing and warns of nothing: `simple_bind` does.
        shapes, _, _ = symbol.infer_shape_partial(**given.get("kwargs", {}))
    except (MXNetError, TypeError):
        # `simple_bind` meets it again.
        return None
    return {name: shape for name, shape in zip(symbol.list_arguments(), shapes) if shape}


def _are_floats(types: Iterable[Any]) -> bool:
    """Whether our operators have all the types; the custom one has the words to refuse others."""
    return all(np.dtype(dtype).name in ITEM_BYTES for dtype in types)


def _make_plain(symbol: Any, arrays: dict[str, Any]) -> None:
    """Undo blocked layouts that MXNet's convolutions have left the weights of ours in.

    Right it is either way, but MXNet would convert them anew for every call.
    """
    from mxnet import nd

    for name in bare_graphs.weights(symbol) & arrays.keys():
        # Not in place: a blocked output is declared plain before its old values are read.
        nd.identity(layout_guard.plain_gradient(nd, arrays[name]), out=arrays[name])


def _caching(method: Any) -> Any:
    """`HybridBlock._build_cache` with a second graph for what is not recorded."""

    @functools.wraps(method)
    def build_cache(self: Any, *arguments: Any) -> Any:
        method(self, *arguments)
        if self._backend or forward_operator.missing() is not None:
            return
        symbol = self._cached_graph[1]
        if bare_graphs.has_ours(symbol):
            names = symbol.list_inputs()
            data = {name for name, (is_data, _) in zip(names, self._cached_op_args) if is_data}
            self._cached_op = _TwofoldOp(self._cached_op, symbol, data, self._flags)

    return build_cache


class _TwofoldOp:
    """A CachedOp, with a compiled one beside it that computes what needs no gradients.

    The second is made, of `symbol`, when it is first of use; with static memory it has memory of
    its own.
    """

    def __init__(
        self, cached_op: Any, symbol: Any, data: set[str], flags: list[tuple[str, Any]]
    ) -> None:
        self._cached_op = cached_op
        # None once the compiled one has been made, or could not be.
        self._symbol: Any = symbol
        self._data = data
        self._flags = flags
        self._compiled: Any = None
        self._order: list[int] = []
        self._is_monitored = False

    def __call__(self, *arrays: Any, **keywords: Any) -> Any:
        from mxnet import MXNetError, autograd

        # Under train_mode a normalisation takes the batch's own averages, and adds to its others.
        plain = not (self._is_monitored or autograd.is_recording() or autograd.is_training())
        if not plain or arrays[0].context.device_type != "cpu" or not self._can_compile(arrays):
            return self._cached_op(*arrays, **keywords)
        try:
            return self._compiled(*(arrays[number] for number in self._order), **keywords)
        except MXNetError:
            # Whatever is wrong, the custom operator says it in this package's words.
            return self._cached_op(*arrays, **keywords)

    def _can_compile(self, arrays: tuple[Any, ...]) -> bool:
        """Whether there is a compiled operator; tries to make it the first time."""
        if self._symbol is not None:
            graph, self._symbol = self._symbol, None
            self._compile(graph, arrays)
        return self._compiled is not None

    def _compile(self, graph: Any, arrays: tuple[Any, ...]) -> None:
        from mxnet.ndarray import CachedOp

        names = graph.list_inputs()
        inputs = dict(zip(names, arrays))
        floats = all(array.dtype == np.float32 for array in arrays)
        shapes = {name: array.shape for name, array in inputs.items()}
        symbol = bare_graphs.compiled(graph, shapes, fuse=floats)
        if symbol is None:
            return
        _make_plain(symbol, {k: v for k, v in inputs.items() if k not in self._data})
        taken = symbol.list_inputs()
        self._order = [names.index(name) for name in taken]
        indices = [
            ("data_indices", [i for i, name in enumerate(taken) if name in self._data]),
            ("param_indices", [i for i, name in enumerate(taken) if name not in self._data]),
        ]
        self._compiled = CachedOp(symbol, [*indices, *self._flags])

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._is_monitored = bool(callback)
        self._cached_op._register_op_hook(callback, monitor_all)
