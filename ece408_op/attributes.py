"""MXNet's attributes of a convolution, from the strings it hands over to a `ConvProblem`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import InvalidProblem, UnsupportedProblem
from .problem import ConvProblem, Pair

_IGNORED = ("workspace", "cudnn_tune", "cudnn_off")
_UNSET = ("None", "_Null", "()", "")


@dataclass(frozen=True)
class ConvAttributes:
    """What a convolution is told besides its arrays, under MXNet's names.

    `layer` and `backend` are this package's own: the layer's name for the log of op times, and
    the backend that shall compute this layer, or `None` for the one in the settings.
    """

    kernel: Pair
    num_filter: int
    stride: Pair = (1, 1)
    dilate: Pair = (1, 1)
    pad: Pair = (0, 0)
    num_group: int = 1
    no_bias: bool = False
    layer: str = ""
    backend: str | None = None

    @classmethod
    def parse(cls, attributes: Mapping[str, str]) -> ConvAttributes:
        """From strings as MXNet passes them: `'(5, 5)'`, `'True'`, `'None'` for what is not set.

        `workspace`, `cudnn_tune` and `cudnn_off` mean nothing here and are ignored, and so are
        names of the form `__name__`, which belong to MXNet. Raises `InvalidProblem` for an
        unknown name, a value of the wrong kind, or when kernel or num_filter is not given, and
        `UnsupportedProblem` for a layout other than NCHW.
        """
        fields: dict[str, object] = {}
        for name, text in attributes.items():
            text = str(text).strip()
            if name in _IGNORED or name.startswith("__") or text in _UNSET:
                continue
            if name == "layout":
                if text != "NCHW":
                    raise UnsupportedProblem(f"layout {text} is not supported; use NCHW")
            elif name in _PARSERS:
                fields[name] = _PARSERS[name](name, text)
            else:
                raise InvalidProblem(
                    f"unknown attribute {name}={text}; there are: {', '.join(_PARSERS)}"
                )
        for name in ("kernel", "num_filter"):
            if name not in fields:
                raise InvalidProblem(f"required attribute {name} is not given")
        return cls(**fields)  # type: ignore[arg-type]

    def problem(self, x_shape: Sequence[int], dtype: str) -> ConvProblem:
        """The convolution of these attributes on x of shape (B, C, H, W).

        Raises `InvalidProblem` when there is none.
        """
        if len(x_shape) != 4:
            raise InvalidProblem(
                f"data has shape {tuple(x_shape)}; a 2-D convolution needs 4 dimensions, NCHW"
            )
        batch, channels, height, width = (int(size) for size in x_shape)
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


def _pair(name: str, text: str) -> Pair:
    value = _literal(name, text)
    if isinstance(value, int):
        value = (value,)
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, int) for v in value):
        raise InvalidProblem(f"{name}={text} is not a pair of whole numbers such as (5, 5)")
    if len(value) != 2:
        raise UnsupportedProblem(
            f"{name}={text} has {len(value)} numbers; only 2-D convolutions are supported"
        )
    return (value[0], value[1])


def _whole(name: str, text: str) -> int:
    value = _literal(name, text)
    if not isinstance(value, int) or isinstance(value, bool):
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


def _literal(name: str, text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise InvalidProblem(f"{name}={text} is not a number or a tuple of numbers") from None


_PARSERS = {
    "kernel": _pair,
    "num_filter": _whole,
    "stride": _pair,
    "dilate": _pair,
    "pad": _pair,
    "num_group": _whole,
    "no_bias": _flag,
    "layer": _text,
    "backend": _text,
}
