"""What executors of a graph with parts for the GPU do in training mode: they run the graph without
parts, on the same arrays."""

from __future__ import annotations

import functools
from typing import Any

from ..owners import are_foreign
from . import graph_json, parts
from .executors import Bound

# The attribute of such an executor that holds the other one; before its first use the arrays that
# the executor was bound to.
_WHOLE = "_ece408_whole"
# Whether the last forward pass was the other one's.
_TRAINED = "_ece408_trained"


def install(mxnet: Any) -> None:
    """Have MXNet's executors take graphs with parts from here."""
    symbol_class = mxnet.symbol.symbol.Symbol
    for name in ("bind", "simple_bind"):
        setattr(symbol_class, name, _binding(getattr(symbol_class, name)))
    executor_class = mxnet.executor.Executor
    for name, wrapped in (
        ("forward", _forwarding),
        ("backward", _backwarding),
        ("reshape", _reshaping),
    ):
        setattr(executor_class, name, wrapped(getattr(executor_class, name)))


def _binding(method: Any) -> Any:
    """`bind` or `simple_bind`, whose first argument is the context."""

    @functools.wraps(method)
    def bind(self: Any, ctx: Any, *arguments: Any, **keywords: Any) -> Any:
        executor = method(self, ctx, *arguments, **keywords)
        graph = parts.read(self)
        if graph is None:
            return executor
        arrays = {**executor.arg_dict, **executor.aux_dict}
        if executor._ctx.device_type == "cpu" and are_foreign(list(arrays.values())):
            found = graph_json.write(parts.with_foreign(graph, arrays), self)
            executor = method(found, ctx, *arguments, **keywords)
            executor._symbol = self
        setattr(executor, _WHOLE, Bound.of(executor))
        return executor

    return bind


def _whole(executor: Any) -> Any:
    """The executor of the graph without parts."""
    found = getattr(executor, _WHOLE)
    if isinstance(found, Bound):
        arguments, gradients, states = found.named(executor._symbol)
        found = parts.put_back_symbol(executor._symbol).bind(
            executor._ctx,
            arguments,
            gradients or None,
            executor._grad_req if gradients else "null",
            states,
            executor._group2ctx,
        )
        # `forward` writes its inputs there.
        found._arg_dict = executor.arg_dict
        setattr(executor, _WHOLE, found)
    return found


def _forwarding(method: Any) -> Any:
    @functools.wraps(method)
    def forward(self: Any, is_train: bool = False, **inputs: Any) -> Any:
        if _WHOLE not in vars(self):
            return method(self, is_train, **inputs)
        setattr(self, _TRAINED, bool(is_train))
        if not is_train:
            return method(self, is_train, **inputs)
        for found, output in zip(_whole(self).forward(True, **inputs), self.outputs):
            found.copyto(output)
        return self.outputs

    return forward


def _backwarding(method: Any) -> Any:
    @functools.wraps(method)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        trained = vars(self).get(_TRAINED, False)
        return method(_whole(self) if trained else self, *arguments, **keywords)

    return backward


def _reshaping(method: Any) -> Any:
    @functools.wraps(method)
    def reshape(self: Any, *arguments: Any, **keywords: Any) -> Any:
        executor = method(self, *arguments, **keywords)
        if _WHOLE in vars(self):
            setattr(executor, _WHOLE, Bound.of(executor))
        return executor

    return reshape
