"""Shapes and types of a network's inputs, and recognition of repeated calls."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .host_arrays import ITEM_BYTES, RESULTS, Array, check
from .values import INPUT, WEIGHT, Buffer, Value

# Number of input sizes that are kept.
_MOST_KNOWN = 64


@dataclass(frozen=True, eq=False)
class Inputs:
    """A network's inputs: names, shapes, types, which of them have one element per image, and the
    types of its outputs. `images` is the first axis of the inputs with images, or 0 if they
    differ."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    over_images: tuple[int, ...]
    results: tuple[str, ...]
    images: int
    _others: dict[int, Inputs] = field(default_factory=dict)

    def of_images(self, images: int) -> Inputs:
        """Return the inputs for another number of images."""
        if images == self.images:
            return self
        if images not in self._others:
            shapes = list(self.shapes)
            for number in self.over_images:
                shapes[number] = (images, *shapes[number][1:])
            self._others[images] = replace(self, shapes=tuple(shapes), images=images, _others={})
        return self._others[images]

    def image_bytes(self) -> int:
        """Bytes of one image in all inputs."""
        return sum(
            ITEM_BYTES[self.dtypes[number]] * math.prod(self.shapes[number][1:])
            for number in self.over_images
        )

    def values(self) -> dict[str, Value]:
        """Return arrays for the builder."""
        found = {}
        for number, name in enumerate(self.names):
            shape, dtype = self.shapes[number], self.dtypes[number]
            kind = INPUT if number in self.over_images else WEIGHT
            buffer = Buffer(kind, ITEM_BYTES[dtype] * math.prod(shape), number)
            found[name] = Value(buffer, shape, dtype=dtype)
        return found


@dataclass(frozen=True)
class Call:
    """The arrays of a call, the description of its inputs, a `generation` that is equal for calls
    with the same weights, and whether the host arrays of the weights stay in place during the
    call."""

    inputs: Inputs
    arrays: Sequence[Array]
    outputs: Sequence[Array]
    generation: int
    are_held: bool


class Calls:
    """Recognises calls with inputs and weights of earlier ones."""

    def __init__(self, names: Sequence[str], parameters: frozenset[str]) -> None:
        self._names = tuple(names)
        numbers = range(len(self._names))
        self.weights = tuple(k for k in numbers if self._names[k] in parameters)
        self._over_images = tuple(k for k in numbers if self._names[k] not in parameters)
        self._lock = threading.Lock()
        # Twice the first one: an itemgetter of one item returns no tuple.
        places = (*self.weights, *self.weights[:1])
        self._taken = operator.itemgetter(*places) if places else lambda _: ()
        self._last: tuple[Array, ...] = ()
        self._shapes: list[tuple[tuple[int, ...], str]] = []
        self._generation = 0
        self._known: dict[tuple[object, ...], Inputs] = {}

    def call(self, arrays: Sequence[Array], outputs: Sequence[Array], are_held: bool) -> Call:
        """Return the call. Raises `UnsupportedProblem` for arrays of unsupported types."""
        weights = self._taken(arrays)
        results = tuple(array.dtype for array in outputs)
        key = (results, *((arrays[k].shape, arrays[k].dtype) for k in self._over_images))
        with self._lock:
            # Compared by identity first, which is fast for the same objects.
            if weights != self._last or not self._generation:
                self._last = weights
                self._generation += 1
                shapes = [(arrays[k].shape, arrays[k].dtype) for k in self.weights]
                if shapes != self._shapes:
                    self._shapes = shapes
                    self._known.clear()
            if key not in self._known:
                if len(self._known) == _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = self._inputs(arrays, results)
            return Call(self._known[key], arrays, outputs, self._generation, are_held)

    def _inputs(self, arrays: Sequence[Array], results: tuple[str, ...]) -> Inputs:
        for name, array in zip(self._names, arrays):
            check(array.dtype, name, ITEM_BYTES)
        for number, dtype in enumerate(results):
            check(dtype, f"output {number}", RESULTS)
        firsts = {arrays[k].shape[:1] for k in self._over_images}
        images = max(next(iter(firsts)), default=0) if len(firsts) == 1 else 0
        shapes = tuple(array.shape for array in arrays)
        dtypes = tuple(array.dtype for array in arrays)
        return Inputs(self._names, shapes, dtypes, self._over_images, results, images)
