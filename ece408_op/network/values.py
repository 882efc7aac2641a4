"""Symbolic device arrays (before addresses are assigned), and the steps that compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..problem import ConvProblem
from .host_arrays import ITEM_BYTES

# Kinds of buffers: inputs of a call; weights, and arrays computed from them, which stay on the GPU;
# intermediate arrays; those that the backward pass reads, in memory of the caller; outputs.
INPUT, WEIGHT, LASTING = "input", "weight", "lasting"
ARENA, SAVED, OUTPUT = "arena", "saved", "output"


@dataclass(eq=False)
class Buffer:
    """A block of GPU memory. `uses` counts remaining readers; `number` is the index among inputs,
    weights or outputs."""

    kind: str
    nbytes: int
    number: int = 0
    uses: int = 0


@dataclass(eq=False)
class Value:
    """An array at `offset` bytes in a buffer; `image` is the stride between images in elements; 0
    means that images are contiguous. Operands share it: nobody may change one. (It is not `frozen`,
    as creating those takes several times as long.)"""

    buffer: Buffer
    shape: tuple[int, ...]
    offset: int = 0
    image: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # A stride that says nothing must not outlive the shape.
        if self.image and self.image == self.per_image:
            self.image = 0

    @property
    def constant(self) -> bool:
        """Whether it is the same for all images."""
        return self.buffer.kind in (WEIGHT, LASTING)

    @property
    def identity(self) -> tuple[object, ...]:
        """What distinguishes an array of weights alone from other such arrays of the graph: equal
        ones have the same elements in all programs."""
        of = self.buffer.number if self.buffer.kind == WEIGHT else self.buffer
        return of, self.shape, self.offset, self.image, self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def per_image(self) -> int:
        """Elements per image."""
        return math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """End of the last element, in bytes from the start of the buffer."""
        if not self.image or not self.elements:
            return self.offset + ITEM_BYTES[self.dtype] * self.elements
        images = self.shape[0] if self.shape else 1
        count = (images - 1) * self.image + self.per_image
        return self.offset + ITEM_BYTES[self.dtype] * count

    @property
    def dense(self) -> bool:
        """Whether images are contiguous."""
        return not self.image

    def seen(self, shape: tuple[int, ...], image: int = 0, offset: int | None = None) -> Value:
        """Return it with another shape and stride, and another offset if one is given."""
        offset = self.offset if offset is None else offset
        return Value(self.buffer, shape, offset, image, self.dtype)


class Plan(Protocol):
    """What a machine does in a step."""

    @property
    def name(self) -> str:
        """The kernel's name."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory that it uses besides its arrays."""

    def has_code_of(self, other: Any) -> bool:
        """Return whether it differs from another plan in sizes alone."""


class Step(NamedTuple):
    """A plan and its arrays by name; `node` is the node that it computes, `problem` the convolution
    to log op times for, if any, and `direction` what it computes of that."""

    node: str
    plan: Plan
    arrays: Mapping[str, Value]
    problem: ConvProblem | None = None
    direction: str = "forward"


@dataclass(frozen=True)
class Early:
    """The first steps planned for fewer `images`, on the same arrays. They may run repeatedly, on
    any of the images."""

    images: int
    steps: list[Step]


# Arrays that depend on weights alone, by their recipes (`Builder.once`), for other programs of the
# graph.
Lasting = dict[object, tuple[Value, ...]]


@dataclass
class Steps:
    """All steps of a network for a number of images: `for_weights` run once, `for_images` per
    chunk. `lasting` are arrays that the former compute. `forward` of the latter are the forward
    pass, if the others compute gradients."""

    images: int
    for_weights: list[Step] = field(default_factory=list)
    for_images: list[Step] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    lasting: Lasting = field(default_factory=dict)
    # Whether images are independent of each other.
    divisible: bool = True
    early: Early | None = None
    forward: int | None = None
