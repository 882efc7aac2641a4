"""Parts of a graph that the GPU computes, on MXNet's arrays of the CPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import settings
from ..errors import UnsupportedProblem

if TYPE_CHECKING:
    from ..network import Array, Network

Graph = Mapping[str, Any]

# Kinds of a part's inputs, as in the header kernels/mxnet/callbacks.h: data, with one row per
# image; parameters; and computed arrays that are the same for all images.
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
ARRAY_BYTES = _ARRAY.itemsize
# Types by MXNet's numbers.
TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")

_retired: deque[OnGpu] = deque()


class OnGpu:
    """The network of a part, with its last parameters. `kinds` has the kind of each input, and
    `unread` marks the outputs that need not be computed; `whole` computes all of them.

    Raises what `Network` does.
    """

    def __init__(
        self, whole: Network, graph: Graph, names: Sequence[str], kinds: str, unread: str
    ) -> None:
        from ..network import Network

        _close_retired()
        _say_what_is_not_heard(graph["nodes"])
        heads = graph["heads"]
        self._read = [n for n in range(len(heads)) if unread[n : n + 1] != UNREAD]
        self._network = whole
        if len(self._read) < len(heads):
            read = json.dumps({**graph, "heads": [heads[n] for n in self._read]})
            constant = {name for name, kind in zip(names, kinds) if kind != DATA}
            self._network = Network(read, names, constant)
        self._kinds = kinds
        self._data = [place for place, kind in enumerate(kinds) if kind == DATA]
        # The version of the last parameters, MXNet's description of them, and the inputs without
        # data.
        self._last: tuple[int, bytes, list[Any]] = (0, b"", [None] * len(names))

    def compute(
        self, version: int, data: Iterable[Array], parameters: bytes, outputs: Sequence[Array]
    ) -> None:
        """Compute a call of MXNet's; `parameters` is its description of them."""
        _, text, arrays = self._last
        if text != parameters:
            known = iter(described(parameters))
            arrays = [None if kind == DATA else next(known) for kind in self._kinds]
        self._last = version, parameters, arrays
        self._compute(arrays, data, outputs, are_held=True)

    def compute_again(self, version: int, data: Iterable[Array], outputs: Sequence[Array]) -> bool:
        """Compute a call with parameters of this version, which may move meanwhile; return whether
        that was possible."""
        from ..network import WeightsNeeded

        last, _, arrays = self._last
        if last != version:
            return False
        try:
            self._compute(arrays, data, outputs, are_held=False)
        except WeightsNeeded:
            return False
        return True

    def _compute(
        self, arrays: list[Any], data: Iterable[Array], outputs: Sequence[Array], are_held: bool
    ) -> None:
        _close_retired()
        inputs = arrays.copy()
        for place, array in zip(self._data, data):
            inputs[place] = array
        self._network.compute(inputs, [outputs[n] for n in self._read], are_held)

    def retire(self, retired: deque[OnGpu] = _retired) -> None:
        """Queue it for closing before another network is created or runs: garbage collection may
        call this in the middle of another one's work, or when this module's names are gone."""
        retired.append(self)

    def close(self) -> None:
        """Free its memory on the GPU."""
        self._network.close()


_said: set[str] = set()


def _say_what_is_not_heard(nodes: Iterable[Graph]) -> None:
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


def known_kinds(kinds: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return the kinds of inputs with these shapes: data has as many rows as the largest data
    array."""
    data = [shape for kind, shape in zip(kinds, shapes) if kind == DATA]
    rows = max(data, key=lambda shape: (len(shape), shape[:1]), default=())[:1]
    return "".join(
        FOR_ALL_IMAGES if kind == DATA and shape[:1] != rows else kind
        for kind, shape in zip(kinds, shapes)
    )


def described(text: bytes) -> list[Array]:
    """Return the arrays that the header's structures describe. Raises `UnsupportedProblem` for
    arrays that no network takes."""
    from ..network import Array

    result = []
    arrays = np.frombuffer(text, _ARRAY)
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
