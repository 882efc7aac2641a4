"""`ece408_part`: parts of a graph, each of which MXNet runs as one node.

kernels/mxnet/part_operator.cpp is called by MXNet, and calls the functions here: for the program of
each new set of shapes, and for op times and errors.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import errors, settings
from ..backends import kernel_file
from ..backends.cpu import native, program
from ..errors import Ece408Error
from . import compiled_operator, native_handles
from .native_handles import library as _library
from .networks import DATA, FOR_ALL_IMAGES, PARAMETER, TYPES

if TYPE_CHECKING:
    from ..network import Array, CpuCode

# Types of a part's arrays.
COMPUTED = ("float32", "float16", "uint8")

_SIZES = ctypes.POINTER(ctypes.c_int64)
_Make = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, _SIZES, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
)
_Report = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.c_int64),
    *(ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
)
_Forget = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_Close = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class _Functions(ctypes.Structure):
    """The header's `ece408_part_functions`."""

    _fields_ = [("make", _Make), ("report", _Report), ("forget", _Forget), ("close", _Close)]


_numbers = itertools.count(1)
_opened: dict[int, _Opened] = {}
_programs: dict[int, CpuCode] = {}


def install() -> None:
    """Register this module's functions with the operator, if MXNet has loaded it."""
    if compiled_operator.missing() is None:
        _library().ece408_part_use(ctypes.byref(_FUNCTIONS))


def mode() -> str:
    """Return the precision of parts under the settings; "" if there are none, because each
    convolution is for another backend, or for a file. Raises `InvalidSetting`."""
    kernel = settings.kernel()
    by_file = kernel is not None and kernel_file.device_of(kernel) is not None
    return settings.precision() if settings.backend() in (None, "cpu") and not by_file else ""


class Parts:
    """The parts of one graph, as long as this object lives.

    Its creator must keep the arrays of the last calls alive: MXNet could reuse their memory for
    others, which would be mistaken for them.
    """

    numbers: Sequence[int] = ()  # also defined if an interrupt prevents construction

    def __init__(self) -> None:
        self._release = _library().ece408_part_release  # names may be gone when this is deleted
        self.numbers = []
        # The names of inputs that are parameters of a part.
        self.parameters: dict[str, None] = {}

    def node(
        self, graph: Mapping[str, Any], kinds: str, types: Sequence[str], name: str
    ) -> dict[str, Any]:
        """Open a part and return its node, without inputs. `kinds` has the kind of each input (see
        `networks`), and `types` are those of its inputs and outputs. Raises what `Network`
        does."""
        number = next(_numbers)
        opened = _opened[number] = _Opened(graph, kinds, types)
        codes = (ctypes.c_int * len(types))(*map(TYPES.index, types))
        _library().ece408_part_open(number, kinds.encode(), codes, len(types))
        self.numbers = [*self.numbers, number]
        self.parameters.update(dict.fromkeys(opened.parameters))
        attributes = {"key": compiled_operator.KEY, "part": str(number)}
        return {"op": "ece408_part", "name": name, "attrs": attributes}

    def forget(self, arrays: Mapping[str, Any]) -> None:
        """Forget the parameters of the last calls; the next ones have these arrays, by name. No
        call may be in progress."""
        foreign = {name for name, array in arrays.items() if native_handles.are_foreign([array])}
        for number in self.numbers:
            kinds = _opened[number].kinds(foreign)
            _library().ece408_part_forget(number, kinds.encode())

    def __del__(self) -> None:
        for number in self.numbers:
            self._release(number)


class _Opened:
    """A part's network."""

    def __init__(self, graph: Mapping[str, Any], kinds: str, types: Sequence[str]) -> None:
        from ..network import Network

        self._names = [node["name"] for node in graph["nodes"] if node["op"] == "null"]
        self._kinds, self._types = kinds, types
        self.parameters = [name for name, kind in zip(self._names, kinds) if kind == PARAMETER]
        constant = {name for name, kind in zip(self._names, kinds) if kind != DATA}
        self._network = Network(json.dumps(graph), self._names, constant, on="cpu")

    def kinds(self, foreign: set[str]) -> str:
        """Return the kinds of its inputs if parameters of these names are in memory that MXNet does
        not own."""
        return "".join(
            FOR_ALL_IMAGES if kind == PARAMETER and name in foreign else kind
            for name, kind in zip(self._names, self._kinds)
        )

    def make(self, sizes: Sequence[int], target: int) -> None:
        """Give the library the program for inputs of these types and shapes."""
        inputs = list(_arrays(sizes))
        code = self._network.code(inputs, self._types[len(inputs) :])
        number = next(_numbers)
        _programs[number] = code
        for value in code.steps.outputs:
            shape = (ctypes.c_int64 * len(value.shape))(*value.shape)
            _library().ece408_part_output(ctypes.c_void_p(target), shape, len(value.shape))
        given = _library().ece408_part_give(
            *(ctypes.c_void_p(target), ctypes.c_int64(number), code.for_weights, code.for_images),
            *map(ctypes.c_int64, (len(code.for_weights), len(code.for_images))),
            *map(ctypes.c_int64, (code.arena_bytes, code.lasting_bytes)),
            native.ISA_CODES[code.isa],
        )
        if not given:
            raise errors.NotEnoughMemory(
                f"a network keeps {code.lasting_bytes} bytes of its weights, and there is no room"
            )


def _arrays(sizes: Sequence[int]) -> Iterator[Array]:
    from ..network import Array

    at = 0
    while at < len(sizes):
        kind, dimensions = sizes[at : at + 2]
        at += 2 + dimensions
        yield Array(0, tuple(sizes[at - dimensions : at]), TYPES[kind], 0)


def _make(part: int, sizes: Any, count: int, target: int, is_call: int) -> int:
    def work() -> None:
        _opened[part].make(sizes[:count], target)

    if is_call:
        return errors.remembered(work)
    try:
        work()
    except Ece408Error:
        # The operator in Python computes then, and reports the error.
        return 0
    return 1


def _report(number: int, seconds: Any, count: int, status: int, step: int, kind: int) -> int:
    def work() -> None:
        if status:
            raise program.failure(status, step, kind)
        network.publish(_programs[number], seconds[:count])

    from .. import network

    return errors.remembered(work)


def _forget(number: int) -> int:
    return errors.remembered(lambda: _programs.pop(number))


def _close(number: int) -> int:
    return errors.remembered(lambda: _opened.pop(number))


_FUNCTIONS = _Functions(_Make(_make), _Report(_report), _Forget(_forget), _Close(_close))
