"""Which CPU kernel computes a problem.

`depthwise` and single taps by `direct` for what they do; of stride 1 in float32 the one of `direct`
and `winograd` that is estimated to be faster, where they suit it; else `general`. Estimates are in
multiply-adds of vectors, at the rate at which one core does them; docs/design.md says how good.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ...problem import ConvProblem

# Products of a sum up to which `direct` is faster than `general` for padded images;
# kernels/cpu/filters_as_lanes.h has the others.
_DIRECT_PADDED = 128
# Products of a sum from which on `general`, which takes it in blocks, loses less to rounding: of
# `direct`, and of each of the sums that `winograd` puts together.
_LONG, _LONG_OF_SQUARES = 1536, 256
# Pixels of x for each of y from which on a window covers much of an image, so that the gradient
# for x would mostly be sums of borders; `general` leaves them out.
_DENSE = 4
# Channels of x from which on the gradient for it fills register tiles.
_TILED = 3
# Images, channels and filters from which on packing the weights of a single tap pays for lanes
# that are all used, where planes would fill less than such a share of them.
_PACKS, _DEEP, _FULL = 8, 128, 0.8
# The share of its lanes from which on `winograd` is faster than `general`, and the vectors of
# sums of a filter, over all images, that pay for the packing of its weights.
_FILLED, _WORTH_PACKING = 0.7, 24


class _Layer(NamedTuple):
    """A convolution of stride 1: the forward pass, or the gradient for x as one of dy."""

    batch: int
    channels: int
    filters: int
    kernel: tuple[int, int]
    out: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def forward_kernel(problem: ConvProblem, lanes: int) -> str:
    """The forward pass, with vectors of so many floats."""
    if _is_depthwise(problem):
        return "depthwise"
    if _is_flat(problem, lanes):
        return "direct"
    if not _has_unit_steps(problem):
        return "general"
    out = (problem.out_height, problem.out_width)
    layer = _Layer(problem.batch, problem.channels, problem.filters, problem.kernel, out)
    few = layer.filters < lanes or _products(layer) < _DIRECT_PADDED
    return _fastest(layer, lanes, fits_direct=problem.pad == (0, 0) or few)


@functools.lru_cache(maxsize=4096)
def backward_kernel(problem: ConvProblem, lanes: int) -> str:
    """The gradient for x: a padded convolution of dy with as many filters as x has channels."""
    if _is_depthwise(problem) and problem.stride == (1, 1) and problem.filters == problem.channels:
        return "depthwise"
    if _is_flat(problem, lanes) and _has_unit_steps(problem):
        return "direct"
    fits = all(pad < kernel for pad, kernel in zip(problem.pad, problem.kernel))
    out = (problem.height, problem.width)
    sparse = math.prod(out) >= _DENSE * problem.out_height * problem.out_width
    if not fits or not _has_unit_steps(problem) or problem.channels < _TILED or sparse:
        return "general"
    layer = _Layer(problem.batch, problem.filters, problem.channels, problem.kernel, out)
    few = layer.filters < lanes or _products(layer) < _DIRECT_PADDED
    return _fastest(layer, lanes, fits_direct=few)


def _is_depthwise(problem: ConvProblem) -> bool:
    """Groups of one channel, as kernels/cpu/shape.h's `depthwise_suits` has them."""
    stride = problem.stride[0] == problem.stride[1] <= (2 if problem.dilate == (1, 1) else 1)
    alone = 1 < problem.groups == problem.channels
    return alone and stride and problem.kernel in ((3, 3), (5, 5)) and problem.dtype == "float32"


def _is_flat(problem: ConvProblem, lanes: int) -> bool:
    """A single tap and no border: an image is one row of the pixels that the strides pick.

    Not for many images whose small planes would leave lanes idle; `general` packs their weights.
    """
    flat = (problem.kernel, problem.pad, problem.groups) == ((1, 1), (0, 0), 1)
    pixels = problem.out_height * problem.out_width
    idle = pixels < _FULL * lanes * -(-pixels // lanes)
    packs = problem.batch >= _PACKS and min(problem.channels, problem.filters) >= _DEEP
    fits = problem.dtype == "float32" and pixels >= lanes
    return flat and fits and not (idle and packs)


def _has_unit_steps(problem: ConvProblem) -> bool:
    unit = (problem.stride, problem.dilate, problem.groups) == ((1, 1), (1, 1), 1)
    return unit and problem.dtype == "float32"


def _fastest(layer: _Layer, lanes: int, fits_direct: bool) -> str:
    direct = fits_direct and layer.out[1] >= lanes and _products(layer) <= _LONG
    if not _fits_winograd(layer):
        return "direct" if direct else "general"
    if direct:
        faster = _winograd_cost(layer, lanes) < _direct_cost(layer, lanes)
    else:
        vectors = _winograd_vectors(layer, lanes)
        filled = layer.out[0] * layer.out[1] >= _FILLED * 4 * lanes * vectors
        faster = filled and layer.batch * vectors >= _WORTH_PACKING
    return "winograd" if faster else "direct" if direct else "general"


def _products(layer: _Layer) -> int:
    return layer.channels * layer.kernel[0] * layer.kernel[1]


def _fits_winograd(layer: _Layer) -> bool:
    """As kernels/cpu/shape.h's `winograd_suits` has it, and sums that are short."""
    sides = all(side in (3, 5, 7) for side in layer.kernel)
    return sides and layer.channels * _groups(layer)[0] * _groups(layer)[1] <= _LONG_OF_SQUARES


def _groups(layer: _Layer) -> tuple[int, int]:
    """Groups of taps, as kernels/cpu/winograd_f23.h cuts them."""
    return layer.kernel[0] // 2, layer.kernel[1] // 2


def _pairs(layer: _Layer) -> tuple[int, int]:
    return -(-layer.out[0] // 2), -(-layer.out[1] // 2)


def _winograd_vectors(layer: _Layer, lanes: int) -> int:
    """Vectors that a filter's 2x2 squares of pixels are summed in."""
    rows, columns = _pairs(layer)
    pitch = columns + _groups(layer)[1] - 1
    return -(-((rows - 1) * pitch + columns) // lanes)


def _direct_cost(layer: _Layer, lanes: int) -> float:
    """Of an image: products, and a store of each vector."""
    vectors = -(-layer.out[0] * layer.out[1] // lanes)
    return layer.filters * vectors * (1.08 * _products(layer) + 3)


def _winograd_cost(layer: _Layer, lanes: int) -> float:
    """Of an image: products and what is kept between domains, domains, and rows of y."""
    rows, columns = _pairs(layer)
    row_groups, column_groups = _groups(layer)
    taps = (3 * row_groups + 1) * (3 * column_groups + 1)
    sums = layer.filters * _winograd_vectors(layer, lanes) * (1.05 * layer.channels * taps + 40)
    domain_rows = layer.channels * (rows + row_groups - 1)
    domains = domain_rows * -(-(columns + column_groups - 1) // lanes) * 70
    return sums + domains + layer.filters * layer.out[0] * -(-layer.out[1] // lanes) * 8
