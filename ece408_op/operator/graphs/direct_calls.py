"""Direct calls of a graph that is one sequence, without MXNet's CachedOp
(kernels/mxnet/direct_calls.cpp).

Most calls return after computing. MXNet's engine orders them among its operators.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from .. import compiled_operator
from ..loading import load_mxnet
from ..native_handles import locked_library
from .graph_json import Graph
from .permuted_cached_op import handles_of

# The header's `ece408_mxnet`.
_NAMES = (
    *("MXNDArrayWaitToRead", "MXNDArrayGetData", "MXNDArrayGetShapeEx", "MXNDArrayGetDType"),
    *("MXNDArrayGetStorageType", "MXNDArrayGetContext", "MXNDArrayCreateEx"),
    *("MXAutogradIsRecording", "MXAutogradIsTraining", "MXEnginePushSyncND"),
)


@functools.lru_cache(maxsize=1)
def mxnet_functions() -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of MXNet's functions for the compiled library."""
    mxnet = load_mxnet().base._LIB
    found = (ctypes.cast(getattr(mxnet, name), ctypes.c_void_p) for name in _NAMES)
    return (ctypes.c_void_p * len(_NAMES))(*found)


class DirectCalls:
    """Calls of a graph with arrays by input name; those in `data` change in each call. `held` are
    the parameters that the sequence holds."""

    def __init__(
        self,
        graph: Graph,
        arrays: Mapping[str, Any],
        data: Sequence[str],
        held: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        node = next(node for node in graph["nodes"] if node["op"] != "null")
        names = [graph["nodes"][entry[0]]["name"] for entry in node["inputs"]]
        # Parameters must outlive the calls.
        self._parameters = [arrays[name] for name in names if name not in data]
        self._held, self._results = held, len(graph["heads"])
        self._array, self._data = load_mxnet().nd.NDArray, ctypes.c_void_p * len(data)
        open_calls, self._call, self._close = (
            getattr(locked_library(), f"ece408_direct_{verb}") for verb in ("open", "call", "close")
        )
        open_calls.restype = ctypes.c_void_p
        texts = [text.encode() for pair in node["attrs"].items() for text in pair]
        numbers = [data.index(name) if name in data else -1 for name in names]
        self._calls = ctypes.c_void_p(
            open_calls(
                *(mxnet_functions(), len(node["attrs"]), (ctypes.c_char_p * len(texts))(*texts)),
                *(len(names), (ctypes.c_int * len(names))(*numbers)),
                *(handles_of([arrays[name] for name in names]), self._results),
            )
        )

    @classmethod
    def of(cls, graph: Graph, *given: Any) -> DirectCalls | None:
        """Return `None` if the graph is not one sequence, or its arrays are too large."""
        nodes = [number for number, node in enumerate(graph["nodes"]) if node["op"] != "null"]
        is_sequence = graph["nodes"][nodes[0]]["op"] == compiled_operator.SEQUENCE
        heads = [[nodes[0], output, 0] for output in range(len(graph["heads"]))]
        if len(nodes) > 1 or not is_sequence or [list(h) for h in graph["heads"]] != heads:
            return None
        found = cls(graph, *given)
        return found if found._calls else None

    def __call__(self, data: Sequence[Any], compared: Sequence[Any]) -> list[Any] | None:
        """Return the graph's result; `None` if the data has another shape or device, held
        parameters have changed, gradients are wanted, or the lists `compared[0]` do not begin with
        the objects `compared[1]`. Raises `MXNetError`."""
        # Everything possible is prepared before the call: see `block_calls`.
        results = (ctypes.c_void_p * self._results)()
        handles = [ctypes.c_void_p.from_buffer(results, 8 * n) for n in range(self._results)]
        arrays = [self._array(handle) for handle in handles]
        given = self._data(*[each.handle for each in data])
        count = len(compared[0])
        status = self._call(self._calls, given, self._held, results, *compared, count)
        if status == 1:
            return arrays
        if status < 0:
            load_mxnet().base.check_call(status)
        return None

    def __del__(self) -> None:
        if getattr(self, "_calls", None):
            self._close(self._calls)
