"""A network's steps on the CPU, as arrays of structures: `kernels/cpu/network/program.h` by ctypes.

Classes have the header's names and fields; `run` computes a program.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from ...errors import Ece408Error
from . import native

MOST_INPUTS, MOST_ALSO, MOST_OPS, MOST_AXES, PACKED_HEADER = 6, 3, 24, 6, 64
TYPES = {"float32": 0, "float16": 1, "uint8": 2}

Kind = IntEnum(
    "Kind",
    "CONVOLVE PACK DATA_GRADIENT POINTWISE COPY POOL REDUCE SOFTMAX LRN RESIZE "
    "WEIGHT_GRADIENT POOL_GRADIENT NORM NORM_GRADIENT ONE_HOT",
    start=0,
)
Read = IntEnum("Read", "ALIKE IMAGES SHARED", start=0)
Border = IntEnum("Border", "FILL NEAREST MIRRORED", start=0)
Pool = IntEnum("Pool", "LARGEST AVERAGE SUM", start=0)
Reduce = IntEnum("Reduce", "SUM LARGEST LARGEST_NUMBER", start=0)

# Operators of a pointwise chain, by their numbers.
TERMS = (
    *("relu", "sigmoid", "tanh", "softsign", "softrelu", "exp", "log", "sqrt", "square", "abs"),
    *("negative", "erf", "elu", "selu", "gelu", "leaky", "prelu", "clip", "affine", "constant"),
    *("round_half", "add", "subtract", "multiply", "divide", "plus", "minus", "minus_from"),
    *("times", "over", "over_from", "maximum", "minimum", "power", "inverse_deviation"),
    *("scaled_deviation", "multiply_add", "subtract_product", "shifted", "where"),
)

_WHOLE, _INT, _REAL, _FLOAT = ctypes.c_int64, ctypes.c_int32, ctypes.c_double, ctypes.c_float


def _fields(of: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, of) for name in names]


class Operand(ctypes.Structure):
    """A place in an array of `run`; the default is none."""

    _fields_ = [*_fields(_WHOLE, "offset", "image"), *_fields(_INT, "base", "type")]

    def __init__(self, offset: int = 0, image: int = 0, base: int = -1, type: int = 0) -> None:
        super().__init__(offset, image, base, type)


class Convolve(ctypes.Structure):
    """Of CONVOLVE, PACK and gradients."""

    _fields_ = [
        *_fields(native.Problem, "problem"),
        *_fields(_INT, "kernel", "strict"),
        *_fields(_FLOAT, "lowest", "highest"),
    ]


class Reading(ctypes.Structure):
    """How an input is read."""

    _fields_ = _fields(_WHOLE, "outer", "count", "inner", "kind")


class Op(ctypes.Structure):
    """One operator of a chain; `op` is its place in `TERMS`."""

    _fields_ = [
        *[*_fields(_INT, "op"), *_fields(_INT * 4, "arguments"), *_fields(_INT, "unused")],
        *_fields(_REAL, "p", "q"),
    ]


class Pointwise(ctypes.Structure):
    """A chain of operators."""

    _fields_ = [
        *_fields(_WHOLE, "elements", "per_image", "inputs", "ops"),
        *[*_fields(Reading * MOST_INPUTS, "readings"), *_fields(Op * MOST_OPS, "op")],
    ]


class Strided(ctypes.Structure):
    """A copy of up to six axes, the last axis first."""

    _fields_ = [
        *_fields(_WHOLE, "elements", "border"),
        *_fields(_WHOLE * MOST_AXES, "size", "first", "held", "stride"),
        *_fields(_REAL, "fill"),
    ]


class Windows(ctypes.Structure):
    """Windows along one axis."""

    _fields_ = _fields(_WHOLE, "size", "count", "kernel", "stride", "pad")


class Pooled(ctypes.Structure):
    """A pooling."""

    _fields_ = [
        *_fields(_WHOLE, "kind", "border", "images", "channels"),
        *_fields(Windows, "rows", "columns"),
    ]


class Reduced(ctypes.Structure):
    """A reduction of rows."""

    _fields_ = [*_fields(_WHOLE, "kind", "outputs", "length", "inner"), *_fields(_REAL, "factor")]


class Softmaxed(ctypes.Structure):
    """A softmax of rows, or rows of zeros and ones from labels."""

    _fields_ = [*_fields(_WHOLE, "rows", "length", "inner", "logarithm"), *_fields(_REAL, "scale")]


class Lrn(ctypes.Structure):
    """A normalisation over adjacent channels."""

    _fields_ = [
        *_fields(_WHOLE, "elements", "channels", "plane", "size"),
        *_fields(_REAL, "alpha", "beta", "knorm"),
    ]


class Resized(ctypes.Structure):
    """A bilinear resize."""

    _fields_ = _fields(_WHOLE, "planes", "height", "width", "out_height", "out_width", "aligned")


class Batch(ctypes.Structure):
    """A normalisation by the batch's averages, or its gradient."""

    _fields_ = [
        *_fields(_WHOLE, "images", "channels", "pixels"),
        *[*_fields(_REAL, "epsilon"), *_fields(_INT, "is_relu")],
    ]


class Of(ctypes.Union):
    """What a step computes, by its kind."""

    _fields_ = [
        *[*_fields(Convolve, "convolve"), *_fields(Pointwise, "pointwise")],
        *[*_fields(Strided, "strided"), *_fields(Pooled, "pooled"), *_fields(Reduced, "reduced")],
        *[*_fields(Softmaxed, "softmaxed"), *_fields(Lrn, "lrn"), *_fields(Resized, "resized")],
        *_fields(Batch, "batch"),
    ]


class Step(ctypes.Structure):
    """One step. Operands without an array need `Operand()`."""

    _fields_ = [
        *[*_fields(_WHOLE, "kind"), *_fields(Operand * MOST_INPUTS, "in")],
        *[*_fields(Operand, "out"), *_fields(Operand * MOST_ALSO, "also"), *_fields(Of, "of")],
    ]

    @property
    def inputs(self) -> ctypes.Array[Operand]:
        """The field `in`, a word of Python's own."""
        found: ctypes.Array[Operand] = getattr(self, "in")
        return found


# A step's kind; offset, image, base and type of each input and result; and what it computes.
# `struct` fills structures several times as fast as ctypes does, field by field.
PLACE, NOWHERE = struct.Struct("qqii"), struct.pack("qqii", 0, 0, -1, 0)
_STEP = struct.Struct(
    f"q{PLACE.size * MOST_INPUTS}s{PLACE.size}s{PLACE.size * MOST_ALSO}s{ctypes.sizeof(Of)}s"
)
_CODES = {_WHOLE: "q", _INT: "i", _REAL: "d", _FLOAT: "f"}


def _code(of: Any) -> str:
    """Return the codes of `struct` for a type of fields."""
    if issubclass(of, ctypes.Array):
        return _code(of._type_) * of._length_
    if issubclass(of, ctypes.Structure):
        return "".join(_code(field[1]) for field in of._fields_)
    return _CODES[of]


@functools.lru_cache(maxsize=64)
def _packer(of: type[ctypes.Structure], count: int) -> struct.Struct:
    return struct.Struct(_code(of)[:count])


def packed(of: type[ctypes.Structure], *numbers: float) -> bytes:
    """Return the bytes of a structure with these numbers in its first fields, those of inner
    structures one by one."""
    return _packer(of, len(numbers)).pack(*numbers)


def steps_of(packed_steps: Sequence[tuple[int, bytes, bytes, bytes, bytes]]) -> ctypes.Array[Step]:
    """Return steps, each given by its kind, its inputs, its output and its further results in
    `PLACE`'s form, and what it computes."""
    given = bytearray(_STEP.size * len(packed_steps))
    for number, each in enumerate(packed_steps):
        _STEP.pack_into(given, number * _STEP.size, *each)
    return (Step * len(packed_steps)).from_buffer(given)


@functools.lru_cache(maxsize=1)
def _function() -> ctypes._NamedFuncPointer:
    function = native.library().ece408_run
    steps, bases = ctypes.POINTER(Step), ctypes.POINTER(ctypes.c_void_p)
    seconds, failed = ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_int64)
    arguments: list[Any] = [steps, _WHOLE, bases, ctypes.c_int, ctypes.c_int, seconds, failed]
    function.argtypes = arguments
    return function


def run(
    steps: ctypes.Array[Step],
    count: int,
    bases: ctypes.Array[ctypes.c_void_p],
    threads: int,
    isa: str,
    timed: bool = False,
) -> list[float] | None:
    """Compute `count` steps on arrays at `bases`; with `timed`, return the seconds of each.

    Raises `KernelsMissing`, `InvalidProblem`, `UnsupportedProblem` and `NotEnoughMemory`.
    """
    seconds = (ctypes.c_double * count)() if timed else None
    failed = ctypes.c_int64()
    status = _function()(
        steps, count, bases, threads, native.ISA_CODES[isa], seconds, ctypes.byref(failed)
    )
    if status:
        raise failure(status, failed.value, steps[failed.value].kind)
    return None if seconds is None else list(seconds)


def failure(status: int, step: int, kind: int) -> Ece408Error:
    """Return the error of a program whose step number `step` returned this status."""
    error = native.FAILURES.get(status, Ece408Error)
    name = Kind(kind).name if kind in list(Kind) else f"of kind {kind}"
    return error(
        f"step {step} of a program, {name}, failed with status {status} ({error.__name__})"
    )
