"""Reference convolutions and gradients in float64, in NumPy.

Independent of the compiled kernels. They loop over taps and never multiply padding, so that
infinities and NaN among the inputs appear exactly where the textbook loop puts them. Each function
takes arrays of any dtype in the problem's shapes and returns a new float64 array.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..problem import ConvProblem


def forward(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Compute y."""
    taps, x = _taps(problem, w), _grouped(problem, x)
    y = _grouped(problem, np.zeros(problem.y_shape))
    with np.errstate(invalid="ignore"):
        for tap, pixels, at in windows(problem):
            y[at] += _product(taps[tap], x[pixels])
        if bias is not None:
            y += _grouped(problem, bias.reshape(1, -1, 1, 1))
    return y.reshape(problem.y_shape)


def backward_data(problem: ConvProblem, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Compute dx."""
    taps, dy = _taps(problem, w).swapaxes(-1, -2), _grouped(problem, dy)
    dx = _grouped(problem, np.zeros(problem.x_shape))
    with np.errstate(invalid="ignore"):
        for tap, pixels, at in windows(problem):
            dx[pixels] += _product(taps[tap], dy[at])
    return dx.reshape(problem.x_shape)


def backward_weight(problem: ConvProblem, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Compute dw."""
    x, dy = _grouped(problem, x), _grouped(problem, dy)
    dw = np.zeros((problem.groups, problem.filters // problem.groups, *problem.w_shape[1:]))
    with np.errstate(invalid="ignore"):
        for tap, pixels, at in windows(problem):
            a, b = (part.reshape(*part.shape[:3], -1) for part in (dy[at], x[pixels]))
            dw[..., tap[0], tap[1]] = (a @ b.swapaxes(-1, -2)).sum(axis=0)
    return dw.reshape(problem.w_shape)


def backward_bias(problem: ConvProblem, dy: np.ndarray) -> np.ndarray:
    """Compute dbias."""
    with np.errstate(invalid="ignore"):
        return dy.sum(axis=(0, 2, 3), dtype=np.float64)


def every_direction(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, dy: np.ndarray
) -> dict[str, np.ndarray]:
    """Return all four results by the name of their function."""
    return {
        "forward": forward(problem, x, w, bias),
        "backward_data": backward_data(problem, w, dy),
        "backward_weight": backward_weight(problem, x, dy),
        "backward_bias": backward_bias(problem, dy),
    }


def _grouped(problem: ConvProblem, images: np.ndarray) -> np.ndarray:
    """Return images in float64 with an axis for groups: batch, group, channel in it, row,
    column."""
    batch, planes, *plane = images.shape
    wide = images.astype(np.float64)
    return wide.reshape(batch, problem.groups, planes // problem.groups, *plane)


def _taps(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """Return weights in float64: row and column of the kernel, group, filter in it, channel in
    it."""
    grouped = w.reshape(problem.groups, -1, *w.shape[1:]).astype(np.float64)
    return np.ascontiguousarray(grouped.transpose(3, 4, 0, 1, 2))


def _product(matrices: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Multiply each group's matrix by its pixels."""
    batch, groups, planes, *plane = images.shape
    product = matrices @ images.reshape(batch, groups, planes, -1)
    return product.reshape(*product.shape[:3], *plane)


def windows(problem: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple, tuple]]:
    """Yield every tap (p, q) with the indices of the pixels of x that it reads and of y that it
    adds to."""
    for tap in np.ndindex(*problem.kernel):
        of_x: list[slice] = []
        of_y: list[slice] = []
        sizes = ((problem.height, problem.out_height), (problem.width, problem.out_width))
        for axis, (size, out) in enumerate(sizes):
            step = problem.stride[axis]
            start = tap[axis] * problem.dilate[axis] - problem.pad[axis]
            first, end = max(0, -(start // step)), min(out, (size - start - 1) // step + 1)
            if first >= end:
                break
            of_x.append(slice(start + first * step, start + (end - 1) * step + 1, step))
            of_y.append(slice(first, end))
        else:
            yield tap, (..., *of_x), (..., *of_y)
