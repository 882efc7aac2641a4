"""What executors of a graph with parts for the GPU run: in training mode the graph without parts,
and in inference one with the parts that their arrays call for, where those are others."""

from __future__ import annotations

import functools
from typing import Any

from ..native_handles import are_foreign
from . import graph_json, partition, parts
from .executors import Bound

# The attribute of such an executor with what runs in its place.
_FORMS = "_ece408_forms"


class _Forms:
    """The executors that run in the place of one, on the arrays that it was bound to. Each is made
    when it is first needed."""

    def __init__(self, executor: Any) -> None:
        self._bound = Bound.of(executor)
        self._whole: Any = None
        self._cut: Any = None
        # Whether the last forward pass was in training mode.
        self.trained = False

    def whole(self, executor: Any) -> Any:
        """The executor of the graph without parts."""
        if self._whole is None:
            arguments, gradients, states = self._bound.named(executor._symbol)
            requests = executor._grad_req if gradients else "null"
            self._whole = parts.put_back_symbol(executor._symbol).bind(
                executor._ctx, arguments, gradients or None, requests, states, executor._group2ctx
            )
            # `forward` writes its inputs there.
            self._whole._arg_dict = executor.arg_dict
        return self._whole

    def cut(self, executor: Any) -> Any:
        """The executor itself, or one of another cut: whoever cut the graph may not have known of
        what shapes and types the arrays are."""
        if self._cut is None:
            self._cut = executor
            arguments, _, states = self._bound.named(executor._symbol)
            found = partition.cut_again(executor._symbol, {**arguments, **states})
            if found is not None:
                self._cut = found.bind(executor._ctx, arguments, None, "null", states)
                if _FORMS in vars(self._cut):
                    getattr(self._cut, _FORMS)._cut = self._cut
                self._cut._arg_dict = executor.arg_dict
        return self._cut


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
        other = forms.whole(self) if is_train else forms.cut(self)
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
