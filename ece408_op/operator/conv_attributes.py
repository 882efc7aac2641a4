"""Attributes of a convolution: parsing of MXNet's strings, and conversion to a `ConvProblem`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dispatch import Layer
from ..errors import InvalidProblem, UnsupportedProblem
from ..problem import ConvProblem, Pair, check_precision

# Attributes that MXNet's Convolution lacks.
OWN = ("layer", "backend", "cuda_kernel", "precision", "gradient_precision")
# Attributes that MXNet reads from any node: context, learning rates, recomputation.
_OF_MXNET = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")
# Attributes of MXNet's Convolution that ours ignores; a layout is only checked.
IGNORED = ("workspace", "cudnn_tune", "cudnn_off", "layout")
_UNSET = ("None", "_Null", "()", "")
_LAYOUTS = {1: "NCW", 2: "NCHW"}
# Neutral values for the axis that a one-dimensional convolution lacks.
_HEIGHT_OF_ONE_DIMENSION = {"kernel": 1, "stride": 1, "pad": 0, "dilate": 1}


def is_of_mxnet(name: str) -> bool:
    """Return whether MXNet itself reads an attribute of this name from any operator."""
    return name.startswith(("__", *_OF_MXNET))


@dataclass(frozen=True)
class ConvAttributes:
    """The parameters of a convolution besides its arrays, under MXNet's names.

    A one-dimensional convolution, with `spatial` 1, is stored as a two-dimensional one on images of
    height 1. `layer`, `backend`, `cuda_kernel`, `precision` and `gradient_precision` are this
    package's own: the layer's name for the log of op times, the backend and the CUDA kernel for
    this layer, and the minimum precisions; `None` leaves each to the settings.
    Layers that differ only in name are equal, so caches do not grow with each new net of Gluon.
    """

    kernel: Pair
    num_filter: int
    stride: Pair = (1, 1)
    dilate: Pair = (1, 1)
    pad: Pair = (0, 0)
    num_group: int = 1
    no_bias: bool = False
    layer: str = field(default="", compare=False)
    backend: str | None = None
    cuda_kernel: str | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    spatial: int = 2

    @classmethod
    def parse(cls, attributes: Mapping[str, str]) -> ConvAttributes:
        """Parse MXNet's strings: `'(5, 5)'`, `'True'`, `'None'` for an unset value.

        Ignores `IGNORED` and names for which `is_of_mxnet` is true. Raises `InvalidProblem` for an
        unknown name, a value of the wrong kind, or a missing kernel or num_filter,
        `UnsupportedProblem` for a layout other than NCHW (NCW) or three dimensions, and
        `InvalidSetting` for an unknown precision.
        """
        given = {name: str(text).strip() for name, text in attributes.items()}
        fields: dict[str, Any] = {}
        for name, text in given.items():
            if name in IGNORED or is_of_mxnet(name) or text in _UNSET:
                continue
            if name not in _PARSERS:
                raise InvalidProblem(
                    f"unknown attribute {name}={text}; there are: {', '.join(_PARSERS)}"
                )
            fields[name] = _PARSERS[name](name, text)
        for name in ("kernel", "num_filter"):
            if name not in fields:
                raise InvalidProblem(f"required attribute {name} is not given")
        spatial = len(fields["kernel"])
        _check_dimensions(given.get("layout", "None"), spatial)
        for name in _HEIGHT_OF_ONE_DIMENSION:
            if name in fields:
                fields[name] = _as_pair(name, fields[name], spatial)
        return cls(**fields, spatial=spatial)

    def layer_on(self, device: str = "cpu", index: int = 0) -> Layer:
        """Return the layer for arrays on this device."""
        precisions = (self.precision, self.gradient_precision)
        return Layer(self.layer, device, self.backend, index, self.cuda_kernel, *precisions)

    @property
    def layout(self) -> str:
        """The layout of data, by MXNet's name."""
        return _LAYOUTS[self.spatial]

    def problem(self, x_shape: Sequence[int], dtype: str) -> ConvProblem:
        """Return the convolution on x of shape (B, C, H, W), or (B, C, W).

        Raises `InvalidProblem` when no such convolution exists.
        """
        if len(x_shape) != 2 + self.spatial:
            raise InvalidProblem(
                f"data has shape {tuple(x_shape)}; a {self.spatial}-D convolution needs "
                f"{2 + self.spatial} dimensions, {self.layout}"
            )
        sizes = [int(size) for size in x_shape]
        if self.spatial == 1:
            sizes.insert(2, 1)
        batch, channels, height, width = sizes
        layer = (self.num_filter, self.kernel, self.stride, self.pad, self.dilate, self.num_group)
        return ConvProblem(batch, channels, height, width, *layer, not self.no_bias, dtype)


def mxnet_attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes that MXNet's Convolution also has."""
    return {name: text for name, text in attributes.items() if name not in OWN}


@functools.lru_cache(maxsize=1024)
def problem_of(attributes: ConvAttributes, x_shape: tuple[int, ...], dtype: str) -> ConvProblem:
    """Return `attributes.problem`, cached per layer, shape and type."""
    return attributes.problem(x_shape, dtype)


def _check_dimensions(layout: str, spatial: int) -> None:
    if spatial not in _LAYOUTS:
        raise UnsupportedProblem(
            f"a kernel of {spatial} dimensions is not supported; only 1-D and 2-D convolutions are"
        )
    if layout not in (*_UNSET, _LAYOUTS[spatial]):
        raise UnsupportedProblem(
            f"layout {layout} is not supported for a {spatial}-D convolution; use "
            f"{_LAYOUTS[spatial]}"
        )


def _as_pair(name: str, value: tuple[int, ...], spatial: int) -> Pair:
    if len(value) != spatial:
        raise InvalidProblem(
            f"{name}={value} has {len(value)} numbers, but the kernel has {spatial}"
        )
    return (_HEIGHT_OF_ONE_DIMENSION[name], value[0]) if spatial == 1 else (value[0], value[1])


def _numbers(name: str, text: str) -> tuple[int, ...]:
    value = _literal(name, text)
    if isinstance(value, int):
        value = (value,)
    # bool is a subclass of int.
    if not isinstance(value, (tuple, list)) or not all(type(v) is int for v in value):
        raise InvalidProblem(f"{name}={text} is not a tuple of whole numbers such as (5, 5)")
    return tuple(value)


def _whole(name: str, text: str) -> int:
    value = _literal(name, text)
    if type(value) is not int:
        raise InvalidProblem(f"{name}={text} is not a whole number")
    return value


def _flag(name: str, text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise InvalidProblem(f"{name}={text} is neither True nor False")


def _text(name: str, text: str) -> str:
    return text


def _precision(name: str, text: str) -> str:
    return check_precision(text, name.replace("_", " "))


@functools.lru_cache(maxsize=1024)
def literal(text: str) -> Any:
    """Return the number, flag or tuple in a text. Cached, because Python's parser may fail in
    several threads at the same time. Raises `ValueError` or `SyntaxError`."""
    return ast.literal_eval(text)


def _literal(name: str, text: str) -> object:
    try:
        return literal(text)
    except (ValueError, SyntaxError):
        raise InvalidProblem(f"{name}={text} is not a number or a tuple of numbers") from None


_PARSERS = {
    "kernel": _numbers,
    "num_filter": _whole,
    "stride": _numbers,
    "dilate": _numbers,
    "pad": _numbers,
    "num_group": _whole,
    "no_bias": _flag,
    "layer": _text,
    "backend": _text,
    "cuda_kernel": _text,
    "precision": _precision,
    "gradient_precision": _precision,
}
