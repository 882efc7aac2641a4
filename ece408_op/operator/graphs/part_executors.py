"""Executors on graphs with parts for the GPU: in training mode they run the graph without parts, in
inference one with the parts that suit their arrays."""

from __future__ import annotations

import functools
from typing import Any

from ..native_handles import are_foreign
from . import graph_json, partition, parts
from .executors import Bound

# Attribute of such an executor: its substitutes.
_FORMS = "_ece408_forms"


class _Forms:
    """The substitutes of an executor, on its bound arrays. Each is created at first use."""

    def __init__(self, executor: Any) -> None:
        self._bound = Bound.of(executor)
        self._whole: Any = None
        self._partitioned: Any = None
        # Whether the last forward pass was in training mode.
        self.trained = False

    def whole(self, executor: Any) -> Any:
        """Return the executor of the graph without parts."""
        if self._whole is None:
            arguments, gradients, states = self._bound.named(executor._symbol)
            requests = executor._grad_req if gradients else "null"
            self._whole = parts.put_back_symbol(executor._symbol).bind(
                executor._ctx, arguments, gradients or None, requests, states, executor._group2ctx
            )
            # `forward` writes its inputs to this dictionary's arrays.
            self._whole._arg_dict = executor.arg_dict
        return self._whole

    def partitioned(self, executor: Any) -> Any:
        """Return the executor itself, or one with another partition: shapes and types may have been
        unknown when the graph was partitioned."""
        if self._partitioned is None:
            self._partitioned = executor
            arguments, _, states = self._bound.named(executor._symbol)
            found = partition.repartitioned(executor._symbol, {**arguments, **states})
            if found is not None:
                self._partitioned = found.bind(executor._ctx, arguments, None, "null", states)
                if _FORMS in vars(self._partitioned):
                    getattr(self._partitioned, _FORMS)._partitioned = self._partitioned
                self._partitioned._arg_dict = executor.arg_dict
        return self._partitioned


def install(mxnet: Any) -> None:
    """Make MXNet's executors use this module for graphs with parts."""
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
    """Wrap `bind` or `simple_bind`, whose first argument is the context."""

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
        setattr(executor, _FORMS, _Forms(executor))
        return executor

    return bind


def _forwarding(method: Any) -> Any:
    @functools.wraps(method)
    def forward(self: Any, is_train: bool = False, **inputs: Any) -> Any:
        forms: _Forms | None = vars(self).get(_FORMS)
        if forms is None:
            return method(self, is_train, **inputs)
        forms.trained = bool(is_train)
        other = forms.whole(self) if is_train else forms.partitioned(self)
        if other is self:
            return method(self, is_train, **inputs)
        for found, output in zip(other.forward(is_train, **inputs), self.outputs):
            found.copyto(output)
        return self.outputs

    return forward


def _backwarding(method: Any) -> Any:
    @functools.wraps(method)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        forms: _Forms | None = vars(self).get(_FORMS)
        trained = forms is not None and forms.trained
        return method(forms.whole(self) if forms and trained else self, *arguments, **keywords)

    return backward


def _reshaping(method: Any) -> Any:
    @functools.wraps(method)
    def reshape(self: Any, *arguments: Any, **keywords: Any) -> Any:
        executor = method(self, *arguments, **keywords)
        if _FORMS in vars(self):
            setattr(executor, _FORMS, _Forms(executor))
        return executor

    return reshape
