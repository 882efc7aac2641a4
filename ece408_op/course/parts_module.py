"""A network whose parameters stay on GPUs while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import ece408_op

from ..operator.loading import load_mxnet


class PartsModule:
    """A network of data and labels that this package's parts train on the GPUs of some contexts,
    with those methods of MXNet's `Module` that training uses."""

    def __init__(self, network: Any, contexts: Sequence[Any], params: Mapping[str, Any]) -> None:
        mx = load_mxnet()
        self.symbol, self._contexts = network, contexts
        inputs = [mx.sym.Variable(name) for name in ("data", "softmax_label")]
        with warnings.catch_warnings():
            # That it cannot decide the type of data.
            warnings.simplefilter("ignore", UserWarning)
            self._block = mx.gluon.SymbolBlock(network, inputs)
        own = self._block.collect_params()
        self._params = {name: own[name] for name in params}
        for name, value in params.items():
            self._params[name].shape = value.shape
            self._params[name].initialize(ctx=list(contexts))
            self._params[name].set_data(value)
        self._outputs: list[Any] = []
        self._trainer: Any = None

    def init_optimizer(self, optimizer: Any, moments: Mapping[int, Sequence[Any]]) -> None:
        """Take an optimizer and its states by the numbers of parameters."""
        for name, each in self._params.items():
            each.lr_mult = optimizer.lr_mult.get(name, 1.0)
            each.wd_mult = optimizer.wd_mult.get(name, 1.0)
        self._trainer = ece408_op.Trainer(list(self._params.values()), optimizer)
        for updater in self._trainer._updaters:
            updater.states.update({n: tuple(a.copy() for a in of) for n, of in moments.items()})
            updater.states_synced.update(dict.fromkeys(moments, True))

    def forward_backward(self, batch: Any) -> None:
        mx = load_mxnet()
        split = mx.gluon.utils.split_and_load
        parts = zip(*(split(each[0], self._contexts) for each in (batch.data, batch.label)))
        with mx.autograd.record():
            self._outputs = [self._block(*part) for part in parts]
        mx.autograd.backward(self._outputs)

    def update(self) -> None:
        # The optimizer divides by the size of the batch.
        self._trainer.step(1)

    def get_outputs(self) -> list[Any]:
        return [load_mxnet().nd.concat(*self._outputs, dim=0)]

    def get_params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {name: each.list_data()[0] for name, each in self._params.items()}, {}

    def moments(self) -> dict[int, Sequence[Any]]:
        """Return the optimizer's states."""
        self._trainer._fetch_states(self._trainer._on_gpu)
        return self._trainer._updaters[0].states
