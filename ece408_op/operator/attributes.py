"""MXNet's attributes of a convolution, from the strings it hands over to a `ConvProblem`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dispatch import Layer
from ..errors import InvalidProblem, UnsupportedProblem
from ..problem import ConvProblem, Pair, check_precision

# Attributes that MXNet's Convolution does not have.
OWN = ("layer", "backend", "cuda_kernel", "precision", "gradient_precision")
# Attributes that MXNet itself reads from any node: context, learning rates, recomputation.
_OF_MXNET = ("ctx_group", "lr_mult", "wd_mult", "force_mirroring", "mirror_stage")
# Attributes of MXNet's Convolution that mean nothing to ours; a layout is only checked.
IGNORED = ("workspace", "cudnn_tune", "cudnn_off", "layout")
_UNSET = ("None", "_Null", "()", "")
_LAYOUTS = {1: "NCW", 2: "NCHW"}
# Values that make the axis that a one-dimensional convolution lacks do nothing.
_HEIGHT_OF_ONE_DIMENSION = {"kernel": 1, "stride": 1, "pad": 0, "dilate": 1}


def is_of_mxnet(name: str) -> bool:
    """Whether an attribute of this name is MXNet's own, whatever the operator."""
    return name.startswith(("__", *_OF_MXNET))


@dataclass(frozen=True)
class ConvAttributes:
    """The parameters of a convolution besides its arrays, under MXNet's names.

    A one-dimensional convolution, `spatial` being 1, is the two-dimensional one on images of
    height 1, and its attributes are kept as such. `layer`, `backend`, `cuda_kernel`, `precision`
    and `gradient_precision` are this package's own: the layer's name for the log of op times, the
    backend and the CUDA kernel that shall compute this layer, and the lowest precisions allowed;
    `None` leaves each to the settings. Those of layers that differ in name only are equal, so that
    caches do not grow with each new net of Gluon's, whose layers have new names.
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
        """From strings as MXNet passes them: `'(5, 5)'`, `'True'`, `'None'` for what is not set.

        Ignores `IGNORED` and what `is_of_mxnet`. Raises `InvalidProblem` for an unknown name, a
        value of the wrong kind, or when kernel or num_filter is not given, `UnsupportedProblem` for
        a layout other than NCHW (NCW), or three dimensions, and `InvalidSetting` for a precision
        that does not exist.
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
        """The layer of these attributes with its arrays on that device."""
        precisions = (self.precision, self.gradient_precision)
        return Layer(self.layer, device, self.backend, index, self.cuda_kernel, *precisions)

    @property
    def layout(self) -> str:
        """How data is laid out, by MXNet's names."""
        return _LAYOUTS[self.spatial]

    def problem(self, x_shape: Sequence[int], dtype: str) -> ConvProblem:
        """The convolution of these attributes on x of shape (B, C, H, W), or (B, C, W).

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
        return ConvProblem(
            batch=batch,
            channels=channels,
            height=height,
            width=width,
            filters=self.num_filter,
            kernel=self.kernel,
            stride=self.stride,
            pad=self.pad,
            dilate=self.dilate,
            groups=self.num_group,
            bias=not self.no_bias,
            dtype=dtype,
        )


def mxnet_attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    """Those of our operator's attributes that MXNet's Convolution also has."""
    return {name: text for name, text in attributes.items() if name not in OWN}


@functools.lru_cache(maxsize=1024)
def problem_of(attributes: ConvAttributes, x_shape: tuple[int, ...], dtype: str) -> ConvProblem:
    """`attributes.problem`, made once for all calls of a layer on arrays of one shape and type."""
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
    # A bool is an int to Python.
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
    """The number, flag or tuple that a text says; parsed once, since Python's parser may fail in
    several threads at once. Raises `ValueError` or `SyntaxError`."""
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
