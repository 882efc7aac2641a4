"""`ConvProblem`, the description of a convolution, and precisions of its result."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from .errors import InvalidProblem, InvalidSetting

Pair = tuple[int, int]

# Precisions that a caller permits, or that a computation used, in descending order; each permits
# all before it. "strict": every element of a float32 result is within 1e-6 of the sum of its terms'
# magnitudes. "float32": the relative L2 error is that of float32 sums, but a small element beside
# large ones may have a larger error: Winograd's algorithm adds numbers that only its neighbours
# need, and split numbers share a power of two.
PRECISIONS = ("strict", "float32", "tf32", "float16")
# The largest error of an element, relative to the sum of its terms' magnitudes: of "strict" for all
# numbers, of the others for normal ones (docs/results/cuda_errors.md), rounded up.
LARGEST_ERRORS = {"float16": 1e-2, "tf32": 1e-3, "float32": 1e-5, "strict": 1e-6}
ITEM_BYTES = {"float16": 2, "float32": 4, "float64": 8}
# Limits of kernels/cpu/api/shape.h: MXNet's for one size, and address arithmetic's for an array.
MOST_SIZE = 2**31 - 1
MOST_ELEMENTS = 2**47

_AXES = {
    "b": "batch",
    "c": "channels",
    "h": "height",
    "w": "width",
    "m": "filters",
    "g": "groups",
}
_PAIRS = {"k": "kernel", "s": "stride", "p": "pad", "d": "dilate"}


def check_precision(given: str | float, what: str = "precision") -> str:
    """Return the name if it is one of `PRECISIONS`. For a number, the largest error of an element
    that the caller accepts, relative to the sum of its terms' magnitudes, return the lowest
    precision that keeps it. `what` is "precision" or "gradient precision". Raises `InvalidSetting`
    for other names and for numbers that no precision keeps."""
    text = str(given).strip()
    if text in PRECISIONS:
        return text
    attribute = what.replace(" ", "_")
    ways = ["--precision"] if what == "precision" else []
    where = ", ".join([f"attribute {attribute}", *ways, f"ECE408_{attribute.upper()}"])
    try:
        accepted = float(text)
    except ValueError:
        raise InvalidSetting(
            f"unknown {what} {text!r}; choose one of {', '.join(PRECISIONS)}, or the largest "
            f"error of an element, such as 1e-5 ({where})"
        ) from None
    for name, error in LARGEST_ERRORS.items():
        if error <= accepted:
            return name
    least = min(LARGEST_ERRORS.values())
    raise InvalidSetting(f"no kernel keeps {what} {text}; accept errors of {least} ({where})")


@dataclass(frozen=True)
class ConvProblem:
    """One two-dimensional convolution (cross-correlation, as in MXNet), NCHW.

    With x of shape (batch, channels, height, width) and w of shape (filters, channels / groups,
    kernel[0], kernel[1]), for one group::

        y[b, m, i, j] = bias[m] + sum over c, p, q of w[m, c, p, q]
                        * x[b, c, i * stride[0] + p * dilate[0] - pad[0],
                                  j * stride[1] + q * dilate[1] - pad[1]]

    where x is zero outside its borders. It is immutable and hashable, so that it can be the key
    of a cache, and has a one-line text form (`str`, `parse`) that reproduces it.

    Raises `InvalidProblem` when no such convolution exists.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: Pair
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilate: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self._has_plain_numbers():
            for name in (*_AXES.values(), *_PAIRS.values()):
                self._check_numbers(name)
        if self.dtype not in ITEM_BYTES:
            raise InvalidProblem(
                f"dtype {self.dtype} is not supported; use one of {', '.join(ITEM_BYTES)}"
            )
        if self.channels % self.groups or self.filters % self.groups:
            raise InvalidProblem(
                f"num_group {self.groups} must divide both the {self.channels} input channels "
                f"and the {self.filters} filters"
            )
        padded = (self.height + 2 * self.pad[0], self.width + 2 * self.pad[1])
        (down, across), (rows, columns) = self.dilate, self.kernel
        extent = (down * (rows - 1) + 1, across * (columns - 1) + 1)
        if extent[0] > padded[0] or extent[1] > padded[1]:
            raise InvalidProblem(
                f"kernel {self.kernel} with dilate {self.dilate} covers {extent[0]}x{extent[1]} "
                f"pixels, more than the padded input's {padded[0]}x{padded[1]}"
            )
        bordered = (self.batch, self.channels, *padded)
        shapes = bordered, self.w_shape, self.y_shape
        if max(map(math.prod, shapes)) <= MOST_ELEMENTS:
            return
        for name, shape in zip(("data", "weight", "output"), shapes):
            if math.prod(shape) > MOST_ELEMENTS:
                raise InvalidProblem(
                    f"{name} of shape {shape}, with its padding, has more than the {MOST_ELEMENTS} "
                    "elements that an array can have"
                )

    def _has_plain_numbers(self) -> bool:
        """Return whether all numbers are within bounds: `_check_numbers` takes several times as
        long to find what is wrong."""
        pairs = (self.kernel, self.stride, self.pad, self.dilate)
        if {*map(type, pairs)} != {tuple} or {*map(len, pairs)} != {2}:
            return False
        one = (self.batch, self.channels, self.height, self.width, self.filters, self.groups)
        positive = (*one, *self.kernel, *self.stride, *self.dilate)
        if {*map(type, positive), *map(type, self.pad)} != {int}:
            return False
        return min(positive) >= 1 and min(self.pad) >= 0 and max(*positive, *self.pad) <= MOST_SIZE

    def _check_numbers(self, name: str) -> None:
        """Raise `InvalidProblem` unless the field's numbers are integers within its bounds."""
        value = getattr(self, name)
        is_pair = name in _PAIRS.values()
        numbers = value if is_pair else (value,)
        if is_pair and (not isinstance(value, tuple) or len(value) != 2):
            raise InvalidProblem(f"{name} is {value!r}; it must be two whole numbers")
        least = 0 if name == "pad" else 1
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool):
                raise InvalidProblem(f"{name} is {value!r}; it must be of whole numbers")
            if not least <= number <= MOST_SIZE:
                raise InvalidProblem(
                    f"{name} is {value}; {'both numbers' if is_pair else 'it'} must be at least "
                    f"{least} and at most {MOST_SIZE}"
                )

    def with_bias(self) -> ConvProblem:
        """Return it with a bias, which needs no checks."""
        made = object.__new__(ConvProblem)
        vars(made).update(vars(self), bias=True)
        return made

    @property
    def out_height(self) -> int:
        return self._out_size(self.height, 0)

    @property
    def out_width(self) -> int:
        return self._out_size(self.width, 1)

    def _out_size(self, size: int, axis: int) -> int:
        extent = self.dilate[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.pad[axis] - extent) // self.stride[axis] + 1

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.filters, self.channels // self.groups, *self.kernel)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return (self.filters,)

    @functools.cached_property
    def y_shape(self) -> tuple[int, ...]:
        return (self.batch, self.filters, self.out_height, self.out_width)

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass; a multiply-add counts as two."""
        return 2 * math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    @property
    def bytes(self) -> int:
        """Minimum memory traffic of one forward pass: inputs read once, the output written once."""
        elements = sum(math.prod(s) for s in (self.x_shape, self.w_shape, self.y_shape))
        return ITEM_BYTES[self.dtype] * (elements + (self.filters if self.bias else 0))

    def __str__(self) -> str:
        """The problem in one word, `b100,c12,h33,w33,m24,k5x5`, without default values."""
        parts = [f"{key}{getattr(self, name)}" for key, name in _AXES.items() if key != "g"]
        defaults = {"s": (1, 1), "p": (0, 0), "d": (1, 1)}
        for key, name in _PAIRS.items():
            pair = getattr(self, name)
            if pair != defaults.get(key):
                parts.append(f"{key}{pair[0]}x{pair[1]}")
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        if self.bias:
            parts.append("bias")
        if self.dtype != "float32":
            parts.append(self.dtype)
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> ConvProblem:
        """Parse a text written by `str`; `k5` is short for `k5x5`.

        Raises `InvalidProblem` for text of another form, and for a missing or repeated part.
        """
        fields: dict[str, object] = {}
        for part in text.replace(" ", "").split(","):
            name, value = _parse_part(part, text)
            if name in fields:
                raise InvalidProblem(f"{part!r} gives {name} a second time in {text!r}")
            fields[name] = value
        required = ("batch", "channels", "height", "width", "filters", "kernel")
        missing = [name for name in required if name not in fields]
        if missing:
            raise InvalidProblem(f"{text!r} lacks {', '.join(missing)}; {_FORM}")
        return cls(**fields)  # type: ignore[arg-type]


_FORM = "a problem looks like b100,c12,h33,w33,m24,k5x5[,s2x2][,p1x1][,d1x1][,g1][,bias][,float16]"


def _parse_part(part: str, text: str) -> tuple[str, object]:
    if part == "bias":
        return "bias", True
    if part in ITEM_BYTES:
        return "dtype", part
    match = re.fullmatch(r"([a-z])(\d+)(?:x(\d+))?", part)
    if match:
        key, first, second = match.groups()
        if key in _PAIRS:
            return _PAIRS[key], (int(first), int(second or first))
        if key in _AXES and second is None:
            return _AXES[key], int(first)
    raise InvalidProblem(f"cannot read {part!r} in {text!r}; {_FORM}")
