"""Parts of a graph that the GPU computes, on MXNet's arrays of the CPU; and whether it can."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import settings
from ..errors import NoUsableGpu
from ..host import gpu
from . import compiled_operator

if TYPE_CHECKING:
    from ..network import Array, Network

Graph = Mapping[str, Any]

# Kinds of a part's inputs, as in the header kernels/mxnet/callbacks.h: data, with one row per
# image; parameters; and computed arrays that are the same for all images.
DATA, PARAMETER, FOR_ALL_IMAGES = "012"
# Mark of an output of which only the shape is used.
UNREAD = "1"
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
        # The version of the last parameters, and the inputs without data.
        self._last: tuple[int, list[Any]] = (0, [None] * len(names))

    def compute(
        self,
        version: int,
        versions: Sequence[int],
        addresses: Sequence[int],
        arrays: Sequence[Array],
    ) -> None:
        """Compute a call of MXNet's. `arrays` are its inputs and outputs without addresses and
        versions; `version` is that of all inputs but data."""
        from ..network import Array

        def placed(number: int) -> Array:
            each = arrays[number]
            of_input = versions[number] if number < len(self._kinds) else 0
            return Array(addresses[number], each.shape, each.dtype, of_input)

        known = [None if kind == DATA else placed(n) for n, kind in enumerate(self._kinds)]
        self._last = version, known
        outputs = [placed(n) for n in range(len(known), len(arrays))]
        self._compute(known, map(placed, self._data), outputs, are_held=True)

    def compute_again(self, version: int, data: Iterable[Array], outputs: Sequence[Array]) -> bool:
        """Compute a call with parameters of this version, which may move meanwhile; return whether
        that was possible."""
        from ..network import WeightsNeeded

        last, arrays = self._last
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


def why_no_gpu() -> str | None:
    """Return in one line why no network can run on a GPU here, or `None` if one can."""
    if compiled_operator.missing() is not None:
        return compiled_operator.missing()
    reason = _why_other_backend()
    if reason is not None or settings.backend() == "emulator":
        return reason
    try:
        gpu.require_our_kernels(settings.devices())
    except NoUsableGpu as error:
        return str(error)
    return None


def _why_other_backend() -> str | None:
    backend = settings.backend()
    is_gpu = backend in (None, "cuda", "emulator")
    return None if is_gpu else f"backend {backend} is requested (ECE408_BACKEND)"


def may_use_gpu() -> bool:
    """Return whether the backend that the settings name is a GPU's; if not, say so."""
    reason = _why_other_backend()
    if reason is not None:
        say_why_no_gpu(reason)
    return reason is None


_last_said = ""


def say_why_no_gpu(reason: str) -> None:
    """Print the reason to stderr, unless it was the last one printed."""
    global _last_said
    if reason != _last_said and sys.stderr is not None:
        print(f"ece408: the network runs on the CPU, by MXNet: {reason}", file=sys.stderr)
    _last_said = reason


def why_not_of(arrays: Iterable[Any]) -> str | None:
    """Return why no network runs on our GPU backend with such arrays, or `None` if one can."""
    for array in arrays:
        if array.context.device_type != "cpu":
            return f"its arrays are on {array.context}"
        if array.dtype == np.float64:
            return "it has arrays of float64, not of float32"
    return None
