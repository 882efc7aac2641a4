"""`ece408_network`: a part of a graph that MXNet runs as one node on CPU arrays and the GPU
computes.

kernels/mxnet/network_operator.cpp is called by MXNet, and calls the functions here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import operator
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from .. import errors, settings
from ..errors import UnsupportedProblem
from . import compiled_operator, native_handles
from .array_memory import make_plain

if TYPE_CHECKING:
    from ..network import Array, Network

# Kinds of a network's inputs, as in the header: data, with one row per image; parameters; and
# computed arrays that are the same for all images.
DATA, PARAMETER, FOR_ALL_IMAGES = "012"
# Mark of an output of which only the shape is used.
UNREAD = "1"
# The header's ECE408_MOST_DIMENSIONS and ece408_array.
_MOST_DIMENSIONS = 8
_ARRAY = np.dtype(
    [
        ("address", np.uint64),
        ("version", np.uint64),
        ("type", np.int64),
        ("dimensions", np.int64),
        ("shape", np.int64, (_MOST_DIMENSIONS,)),
    ]
)
# Types by MXNet's numbers.
TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")

_Open = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_char),
    *[ctypes.POINTER(ctypes.c_int64)] * 2,
    ctypes.c_char_p,
)
_ARRAYS = (ctypes.c_int64, ctypes.c_void_p)
_Compute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *_ARRAYS, *_ARRAYS, *_ARRAYS)
_Close = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_Seen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *_ARRAYS)

_opened: dict[int, Opened] = {}
_watched: weakref.WeakValueDictionary[int, Parameters] = weakref.WeakValueDictionary()
_retired: deque[Opened] = deque()
_numbers = itertools.count(1)


def install() -> None:
    """Register this module's functions with the operator, if MXNet has loaded it."""
    if compiled_operator.missing() is None:
        native_handles.library().ece408_network_use(_open, _compute, _close)
        native_handles.library().ece408_parameters_use(_seen)


def missing() -> str | None:
    """Return in one line why the operator is unavailable, or `None` if it is available."""
    return compiled_operator.missing()


class Opened:
    """The network of a part, with its last parameters. `graph` is its JSON, `kinds` the kinds of
    its inputs, `unread` the outputs that need not be computed, and `on` the machine as for
    `Network`.

    Raises what `Network` does.
    """

    def __init__(self, graph: str, kinds: str, unread: str = "", on: str = "gpu") -> None:
        from ..network import Network

        _close_retired()
        document = json.loads(graph)
        nodes, heads = document["nodes"], document["heads"]
        self._read = [n for n in range(len(heads)) if unread[n : n + 1] != UNREAD]
        graph = json.dumps({**document, "heads": [heads[n] for n in self._read]})
        if on == "gpu":
            _say_what_is_not_heard(nodes)
        names = [node["name"] for node in nodes if node["op"] == "null"]
        self._is_parameter = [kind != DATA for kind in kinds]
        self._data = [place for place, is_one in enumerate(self._is_parameter) if not is_one]
        parameters = {name for name, is_one in zip(names, self._is_parameter) if is_one}
        self._network: Network = Network(graph, names, parameters, on=on)
        # The last description of the parameters, and the inputs without data.
        self._last: tuple[bytes, list[Any]] = (b"", [None] * len(names))

    def compute(
        self,
        data: Iterable[Array],
        parameters: bytes,
        outputs: Sequence[Array],
        are_held: bool = True,
    ) -> None:
        """Run it; `parameters` is MXNet's description of them, and `are_held` is that of
        `Network`."""
        _close_retired()
        text, arrays = self._last
        if text != parameters:
            known = iter(_arrays(parameters))
            arrays = [next(known) if is_one else None for is_one in self._is_parameter]
            self._last = (parameters, arrays)
        inputs = list(arrays)
        for place, array in zip(self._data, data):
            inputs[place] = array
        self._network.compute(inputs, [outputs[n] for n in self._read], are_held)

    def close(self) -> None:
        """Free its memory on the GPU."""
        self._network.close()

    def retire(self, retired: deque[Opened] = _retired) -> None:
        """Queue it for closing before another network is created or runs: garbage collection may
        call this in the middle of another one's work, or when this module's names are gone."""
        retired.append(self)


_said: set[str] = set()


def _say_what_is_not_heard(nodes: Iterable[Mapping[str, Any]]) -> None:
    """Warn once on stderr about each requested kernel: networks choose their own."""
    asked = {node.get("attrs", {}).get("cuda_kernel", "None") for node in nodes}
    kernels = {settings.kernel(), *asked} - {None, "None", *_said}
    for kernel in sorted(map(str, kernels)):
        _said.add(kernel)
        if sys.stderr is not None:
            print(
                f"ece408: kernel {kernel} is requested, but not used in a whole network on the "
                "GPU, which chooses its own; it is for layers that run one by one",
                file=sys.stderr,
            )


def _close_retired() -> None:
    while _retired:
        with contextlib.suppress(IndexError):
            _retired.popleft().close()


def known_kinds(kinds: str, dimensions: Sequence[int], first_sizes: Sequence[int]) -> str:
    """Return the kinds of inputs with these shapes: data has as many rows as the largest data
    array."""
    data = [n for n, kind in enumerate(kinds) if kind == DATA]
    if not data:
        return kinds
    largest = max(data, key=lambda n: (dimensions[n], first_sizes[n]))
    return "".join(
        FOR_ALL_IMAGES if kind == DATA and first_sizes[n] != first_sizes[largest] else kind
        for n, kind in enumerate(kinds)
    )


class Parameters:
    """MXNet arrays that are a network's parameters, watched for changes.

    Call its methods from one thread at a time.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        import mxnet

        self._described = b""
        self._work: Callable[[bytes], object] | None = None
        self._number = next(_numbers)
        self._arrays = list(arrays)
        if not arrays:
            return
        names = [f"parameter{number}" for number in range(len(arrays))]
        nodes: list[dict[str, Any]] = [{"op": "null", "name": n, "inputs": []} for n in names]
        attributes = {"key": compiled_operator.KEY, "network": f"{self._number} {len(arrays)}"}
        attributes["kinds"] = "".join(
            FOR_ALL_IMAGES if native_handles.are_foreign([each]) else PARAMETER for each in arrays
        )
        inputs = [[number, 0, 0] for number in range(len(arrays))]
        look = {"op": "ece408_parameters", "name": "look", "attrs": attributes, "inputs": inputs}
        heads = [[len(arrays), 0, 0]]
        arguments = list(range(len(arrays)))
        graph = {"nodes": [*nodes, look], "arg_nodes": arguments, "heads": heads}
        # Otherwise MXNet prints that it converts an old file.
        major, minor, patch = map(int, mxnet.__version__.split(".")[:3])
        version = 10000 * major + 100 * minor + patch
        text = json.dumps({**graph, "attrs": {"mxnet_version": ["int", version]}})
        self._executor = mxnet.sym.load_json(text).bind(mxnet.cpu(), dict(zip(names, arrays)))
        self._counted = (
            *((ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)),),
            *((ctypes.c_uint64 * len(arrays))(), len(arrays)),
            ctypes.cast(mxnet.base._LIB.MXNDArrayWaitToRead, ctypes.c_void_p),
        )
        self._are_own = not native_handles.are_foreign(arrays)
        _watched[self._number] = self

    def are(self, arrays: Sequence[Any]) -> bool:
        """Return whether these are the same arrays."""
        return len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))

    def described(self) -> bytes:
        """Return MXNet's description of the arrays when all writes to them are done. Do not use its
        addresses: they may be those of deleted copies, and MXNet moves an array when a convolution
        converts it to oneDNN's layout."""
        if self._arrays and not self._are_unchanged():
            self._look()
        return self._described

    def _are_unchanged(self) -> bool:
        """Return whether nothing was written since the last description: several times as fast as
        another one."""
        if not self._are_own:
            return False
        are_same = native_handles.library().ece408_parameters_unchanged(*self._counted)
        return bool(are_same and self._described)

    def _look(self) -> None:
        # None is left if this fails: counts of writes have been taken already.
        self._described = b""
        self._executor.forward(is_train=False)
        self._executor.outputs[0].wait_to_read()

    def held(self, work: Callable[[bytes], object]) -> None:
        """Call `work` on a thread of MXNet's, with MXNet's description of the arrays, which stay in
        place until it returns. Raises what it raises."""
        if not self._arrays:
            work(b"")
            return
        make_plain(self._arrays)
        failures: list[BaseException] = []

        def kept(described: bytes) -> None:
            try:
                work(described)
            except BaseException as error:
                failures.append(error)

        self._work = kept
        try:
            self._look()
        finally:
            self._work = None
        if failures:
            raise failures[0]

    def seen(self, described: bytes) -> None:
        """Called by MXNet's operator."""
        self._described = described
        if self._work is not None:
            self._work(described)


def _arrays(described: bytes) -> list[Array]:
    from ..network import Array

    result = []
    arrays = np.frombuffer(described, _ARRAY)
    for address, version, number, dimensions, shape in zip(
        *(arrays[name].tolist() for name in _ARRAY.names or ())
    ):
        if not 0 <= number < len(TYPES):
            what = "a sparse array" if number < 0 else f"an array of MXNet's type {number}"
            raise UnsupportedProblem(
                f"{what} cannot go to the GPU; use a dense one of {', '.join(TYPES)}"
            )
        if dimensions > _MOST_DIMENSIONS:
            raise UnsupportedProblem(
                f"an array of {dimensions} dimensions cannot go to the GPU; use at most "
                f"{_MOST_DIMENSIONS}"
            )
        result.append(Array(address, tuple(shape[:dimensions]), TYPES[number], version))
    return result


@_Open
def _open(graph: bytes, inputs: Any, dimensions: Any, first_sizes: Any, unread: bytes) -> int:
    number = next(_numbers)

    def work() -> None:
        kinds = ctypes.string_at(inputs).decode()
        count = len(kinds)
        kinds = known_kinds(kinds, dimensions[:count], first_sizes[:count])
        marks, _, on = unread.decode().partition(" ")
        _opened[number] = Opened(graph.decode(), kinds, marks, on or "gpu")
        ctypes.memmove(inputs, kinds.encode(), count)

    return number if errors.remembered(work) else 0


@_Compute
def _compute(number: int, *described: int) -> int:
    def work() -> None:
        data, parameters, outputs = map(_text, described[::2], described[1::2])
        _opened[number].compute(_arrays(data), parameters, _arrays(outputs))

    return errors.remembered(work)


@_Seen
def _seen(number: int, count: int, address: int) -> int:
    return errors.remembered(lambda: _watched[number].seen(_text(count, address)))


def _text(count: int, address: int | None) -> bytes:
    return ctypes.string_at(address, count * _ARRAY.itemsize) if address else b""


@_Close
def _close(number: int) -> int:
    return errors.remembered(lambda: _opened.pop(number).retire())
