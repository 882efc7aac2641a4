"""Gluon's convolution layers with this package's kernels; their parameter files are Gluon's."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from .api import Convolution
from .attributes import ConvAttributes


class _Computed:
    """What makes a layer of `gluon.nn` compute with `Convolution`."""

    _kwargs: dict[str, Any]
    act: Any
    prefix: str
    backend: str | None = None

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        name = "fwd" if isinstance(x, mx.sym.Symbol) else f"{self.prefix}fwd"
        result = Convolution(x, weight, bias, name=name, backend=self.backend, **self._kwargs)
        return result if self.act is None else self.act(result)


class Conv2D(_Computed, mx.gluon.nn.Conv2D):
    """`gluon.nn.Conv2D` with our kernels: the same arguments, parameters and parameter files.

    `backend` picks who computes this layer. Raises `UnsupportedProblem` for a layout other than
    NCHW, and what `Convolution` raises when it is called.
    """

    def __init__(self, *arguments: Any, backend: str | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.backend = backend
        check_layer(self)


class Conv1D(_Computed, mx.gluon.nn.Conv1D):
    """`gluon.nn.Conv1D` with our kernels; otherwise as `Conv2D`, for layout NCW."""

    def __init__(self, *arguments: Any, backend: str | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.backend = backend
        check_layer(self)


def check_layer(layer: Any) -> None:
    """Raise `InvalidProblem` or `UnsupportedProblem` unless `Convolution` can be this layer."""
    attributes = {name: str(value) for name, value in layer._kwargs.items()}
    ConvAttributes.parse(attributes)
