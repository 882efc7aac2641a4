"""Arrays of a network on the GPU before they have addresses, and the steps that compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...problem import ConvProblem
from ..cuda.kernel_plan import Plan
from .host_arrays import ITEM_BYTES

# Where arrays live: what a call brings; weights and what is made of them, which stay on the GPU;
# what steps leave for each other; and the results.
INPUT, WEIGHT, LASTING, ARENA, OUTPUT = "input", "weight", "lasting", "arena", "output"


@dataclass(eq=False)
class Buffer:
    """A piece of the GPU's memory. `uses` counts readers to come; `number` tells apart inputs,
    weights and outputs, by their order."""

    kind: str
    nbytes: int
    number: int = 0
    uses: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """An array in a buffer, from `offset` bytes on; `image` is the number of elements from one
    image to the next where that is more than an image has."""

    buffer: Buffer
    shape: tuple[int, ...]
    offset: int = 0
    image: int = 0
    dtype: str = "float32"

    @property
    def constant(self) -> bool:
        """Whether it is the same for all images."""
        return self.buffer.kind in (WEIGHT, LASTING)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def per_image(self) -> int:
        """Elements of an image."""
        return math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """Where the last element ends, in bytes from the beginning of the buffer."""
        if self.elements == 0:
            return self.offset
        images = self.shape[0] if self.shape else 1
        count = (images - 1) * (self.image or self.per_image) + self.per_image
        return self.offset + ITEM_BYTES[self.dtype] * count

    @property
    def dense(self) -> bool:
        """Whether images lie one behind the other."""
        return self.image in (0, self.per_image)


@dataclass(frozen=True)
class Step:
    """A plan on arrays by the names that it has for them; `node` is what it computes, `problem` the
    convolution if it is one that is in the log of op times."""

    node: str
    plan: Plan
    arrays: Mapping[str, Value]
    problem: ConvProblem | None = None


@dataclass(frozen=True)
class Early:
    """The first steps with plans for fewer `images`, on the same arrays: for a few images at a
    time, and as often as one likes, they compute what the first steps compute for all."""

    images: int
    steps: list[Step]


@dataclass
class Steps:
    """All that a network does for a number of images: once for its weights, and for the images."""

    images: int
    for_weights: list[Step] = field(default_factory=list)
    for_images: list[Step] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    # Whether no image has to do with another one.
    divisible: bool = True
    early: Early | None = None
