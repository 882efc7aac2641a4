"""Bindings of the compiled CPU kernels, `libece408_cpu.so`, through ctypes (releases the GIL).

`kernels/cpu/api/ece408.h` declares the library's functions.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import (
    Ece408Error,
    InvalidProblem,
    KernelsMissing,
    NotEnoughMemory,
    UnsupportedProblem,
)
from ...problem import ITEM_BYTES, ConvProblem
from .. import DIRECTIONS

LIBRARY = Path(__file__).resolve().with_name("libece408_cpu.so")
SUFFIXES = {"float16": "f16", "float32": "f32", "float64": "f64"}
# Suffix of the fast functions for float32 arrays with float64 products and sums.
STRICT = "strict"

_ABI_VERSION = 14
ISA_CODES = {"avx512": 2, "avx2": 1, "baseline": 0}
_REMEDY = "run `pip install .` in the checkout, which needs a C++ compiler (g++ or clang++)"
FAILURES: dict[int, type[Ece408Error]] = {
    1: InvalidProblem,
    2: UnsupportedProblem,
    3: NotEnoughMemory,
}


_FIELDS = (
    *("batch", "channels", "height", "width", "filters", "kernel_h", "kernel_w"),
    *("stride_h", "stride_w", "pad_h", "pad_w", "dilate_h", "dilate_w", "groups"),
)


_NUMBERS = struct.Struct(f"{len(_FIELDS)}q")

# Destination address, source address, number of bytes.
Copy = tuple[int, int, int]


class _Copied(ctypes.Structure):
    """The header's `ece408_copied`."""

    _fields_ = [("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_int64)]


class Problem(ctypes.Structure):
    """The header's `ece408_problem`."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


def as_numbers(problem: ConvProblem) -> tuple[int, ...]:
    """Return the fields of the header's `ece408_problem`."""
    return (
        *(problem.batch, problem.channels, problem.height, problem.width, problem.filters),
        *(*problem.kernel, *problem.stride, *problem.pad, *problem.dilate, problem.groups),
    )


@functools.lru_cache(maxsize=4096)
def as_struct(problem: ConvProblem) -> Problem:
    """Return the header's `ece408_problem`. C code only reads it, so calls may share it.

    Raises `InvalidProblem` for a number that does not fit, which ctypes would truncate silently.
    """
    try:
        return Problem.from_buffer_copy(_NUMBERS.pack(*as_numbers(problem)))
    except struct.error:
        raise InvalidProblem(f"{problem} has a number beyond 64 bits") from None


_INT, _LONG, _ARRAY = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_PROBLEM = ctypes.POINTER(Problem)
# The header's functions: result and parameters.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "isa_supported": (_INT, _INT),
    "half_to_float": (ctypes.c_float, ctypes.c_uint16),
    "float_to_half": (ctypes.c_uint16, ctypes.c_float),
    "copy": (None, ctypes.POINTER(_Copied), _INT, _INT),
    "populate": (None, _ARRAY, _LONG, _INT),
    "ask_for_huge_pages": (None, _ARRAY, _LONG),
    "ceiling_multiply_adds": (ctypes.c_double, _LONG, _INT, _INT),
    "ceiling_stores": (_INT, _ARRAY, _LONG, _INT, _INT),
    "ceiling_reads": (_INT, _ARRAY, _LONG, _INT, _INT),
    "kernel_name": (ctypes.c_char_p, _INT),
    "choose": (_INT, _PROBLEM, *[_INT] * 5),
    "packed_floats": (_LONG, _PROBLEM, _INT, _INT),
}
_ARRAYS = {"forward": 4, "backward_data": 3, "backward_weight": 3, "backward_bias": 2}
for _direction, _arrays in _ARRAYS.items():
    _computes = (_INT, _PROBLEM, *[_ARRAY] * _arrays)
    for _suffix in SUFFIXES.values():
        _FUNCTIONS[f"reference_{_direction}_{_suffix}"] = (*_computes, _INT, _INT)
    for _suffix in (*SUFFIXES.values(), STRICT) if _direction != "backward_bias" else ():
        _FUNCTIONS[f"{_direction}_{_suffix}"] = (*_computes, *[_INT] * 4)


def _declare_all(library: ctypes.CDLL) -> None:
    for name, (result, *parameters) in _FUNCTIONS.items():
        function = getattr(library, f"ece408_{name}")
        function.restype, function.argtypes = result, parameters


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and declare its functions.

    Raises `KernelsMissing` if it is missing, does not load or has another version.
    """
    if not path.is_file():
        raise KernelsMissing(f"the compiled CPU kernels are not at {path}; {_REMEDY}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.ece408_abi_version()
        if version == _ABI_VERSION:
            _declare_all(library)
    except (OSError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise KernelsMissing(f"{path} does not load ({reason}); {_REMEDY}") from error
    if version != _ABI_VERSION:
        raise KernelsMissing(
            f"{path} has interface {version}, this package needs {_ABI_VERSION}; {_REMEDY}"
        )
    return library


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the installed library, loaded once. Raises `KernelsMissing`."""
    return load(LIBRARY)


@functools.lru_cache(maxsize=1)
def isas() -> tuple[str, ...]:
    """Return the instruction sets of both library and CPU, best first. Raises `KernelsMissing`."""
    supported = library().ece408_isa_supported
    return tuple(name for name, code in ISA_CODES.items() if supported(code))


@functools.lru_cache(maxsize=1)
def kernels() -> tuple[str, ...]:
    """Return the names of the fast kernels, by their numbers. Raises `KernelsMissing`."""
    names = map(library().ece408_kernel_name, itertools.count())
    return tuple(name.decode() for name in itertools.takewhile(bool, names))


def choose(
    problem: ConvProblem, direction: str, isa: str, strict: bool = False, kept: bool = False
) -> str:
    """Return the kernel that computes a direction, of `DIRECTIONS`; with `strict` one with float64
    products and sums of unsplit numbers. `kept`: a forward pass receives packed weights. Raises
    `KernelsMissing`."""
    numbers = DIRECTIONS.index(direction), ITEM_BYTES[problem.dtype], ISA_CODES[isa], strict, kept
    return kernels()[library().ece408_choose(as_struct(problem), *numbers)]


def packed_floats(problem: ConvProblem, isa: str, kernel: str) -> int:
    """Return the floats of a layer's weights packed for a kernel's forward pass; 0 if it reads them
    in place. Raises `KernelsMissing`."""
    codes = ISA_CODES[isa], kernels().index(kernel)
    found: int = library().ece408_packed_floats(as_struct(problem), *codes)
    return found


def _name(function: str, dtype: str, strict: bool) -> str:
    is_own = strict and dtype == "float32"
    return f"ece408_{function}_{STRICT if is_own else SUFFIXES[dtype]}"


def copy(copies: Sequence[Copy], threads: int) -> None:
    """Make copies on `threads` threads; destinations must not overlap other copies. One call wakes
    all threads once. Raises `KernelsMissing`."""
    made = (_Copied * len(copies))(*(_Copied(*each) for each in copies))
    library().ece408_copy(made, len(copies), threads)


def populate(address: int, nbytes: int, threads: int) -> None:
    """Touch the pages of a fresh array on `threads` threads. Raises `KernelsMissing`."""
    library().ece408_populate(address, nbytes, threads)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for the untouched part of an array, if it is large. Raises
    `KernelsMissing`."""
    library().ece408_ask_for_huge_pages(address, nbytes)


def address(function: str, dtype: str, strict: bool = False) -> int:
    """Return the address of `ece408_<function>_<dtype>`, or of the strict one, for callers without
    Python. Raises `KernelsMissing`."""
    found = getattr(library(), _name(function, dtype, strict))
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def run(
    function: str,
    problem: ConvProblem,
    *arrays: int | None,
    accumulate: bool,
    threads: int,
    isa: str | None = None,
    kernel: str | None = None,
    strict: bool = False,
) -> None:
    """Call `ece408_<function>_<dtype>`, or the strict one, on these addresses; `None` is a missing
    array. A fast function also takes an instruction set and the name of a kernel.

    Raises `KernelsMissing`, `InvalidProblem`, `UnsupportedProblem` and `NotEnoughMemory`.
    """
    name = _name(function, problem.dtype, strict)
    codes = (ISA_CODES[isa], kernels().index(kernel)) if isa and kernel else ()
    call = getattr(library(), name)
    status = call(as_struct(problem), *arrays, bool(accumulate), threads, *codes)
    if status:
        error = FAILURES.get(status, Ece408Error)
        name += f" by {kernel}" if kernel else ""
        raise error(f"{name} failed with status {status} ({error.__name__}) on {problem}")
