"""Gluon's convolution layers on this package's kernels; parameter files stay compatible."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from .. import dispatch
from .conv_attributes import ConvAttributes
from .convolution import Convolution


class _Computed:
    """Mixin that computes a layer of `gluon.nn` with `Convolution`."""

    _kwargs: dict[str, Any]
    act: Any
    prefix: str
    backend: str | None = None
    precision: str | None = None

    def __init__(
        self,
        *arguments: Any,
        backend: str | None = None,
        precision: str | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.backend, self.precision = backend, precision
        check_layer(self)

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        name = "fwd" if isinstance(x, mx.sym.Symbol) else f"{self.prefix}fwd"
        own: dict[str, Any] = {"backend": self.backend, "precision": self.precision}
        result = Convolution(x, weight, bias, name=name, **own, **self._kwargs)
        return result if self.act is None else self.act(result)


class Conv2D(_Computed, mx.gluon.nn.Conv2D):
    """`gluon.nn.Conv2D` with our kernels: the same arguments, parameters and parameter files.

    `backend` names the backend, and `precision` is the minimum precision, as for `Convolution`.
    Raises `UnsupportedProblem` for a layout other than NCHW, `InvalidSetting` for an unknown
    backend or precision, and what `Convolution` raises when it is called.
    """


class Conv1D(_Computed, mx.gluon.nn.Conv1D):
    """`gluon.nn.Conv1D` with our kernels; otherwise as `Conv2D`, for layout NCW."""


def check_layer(layer: Any) -> None:
    """Raise what `Convolution` raises if it cannot compute this layer."""
    attributes = {name: str(value) for name, value in layer._kwargs.items()}
    ConvAttributes.parse({**attributes, "precision": str(layer.precision)})
    dispatch.check_names(layer.backend)
