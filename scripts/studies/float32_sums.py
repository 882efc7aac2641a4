"""Convolutions and gradients by plain float32 sums: one product after the other, each rounded."""

from __future__ import annotations

import numpy as np

from ece408_op.bench import oracle
from ece408_op.problem import ConvProblem


def forward(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y, summed tap by tap and channel by channel."""
    y = _grouped(problem, np.zeros(problem.y_shape, np.float32))
    x, w = _grouped(problem, x), w.reshape(problem.groups, -1, *w.shape[1:])
    for (p, q), pixels, at in oracle.windows(problem):
        for channel in range(w.shape[2]):
            y[at] += w[:, :, channel, p, q][..., None, None] * x[pixels][:, :, channel, None]
    return y.reshape(problem.y_shape)


def backward_data(problem: ConvProblem, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx, summed tap by tap and filter by filter."""
    dx = _grouped(problem, np.zeros(problem.x_shape, np.float32))
    dy, w = _grouped(problem, dy), w.reshape(problem.groups, -1, *w.shape[1:])
    for (p, q), pixels, at in oracle.windows(problem):
        for filter in range(w.shape[1]):
            dx[pixels] += w[:, filter, :, p, q][..., None, None] * dy[at][:, :, filter, None]
    return dx.reshape(problem.x_shape)


def backward_weight(problem: ConvProblem, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dw, summed image by image and pixel by pixel."""
    groups, (pad_h, pad_w) = problem.groups, problem.pad
    dw = np.zeros((groups, problem.filters // groups, *problem.w_shape[1:]), np.float32)
    x = np.pad(x, ((0, 0), (0, 0), (pad_h, pad_h), (pad_w, pad_w)))
    for image, i, j in np.ndindex(problem.batch, problem.out_height, problem.out_width):
        rows, columns = (
            slice(at * stride, at * stride + (kernel - 1) * dilate + 1, dilate)
            for at, stride, kernel, dilate in zip(
                (i, j), problem.stride, problem.kernel, problem.dilate
            )
        )
        window = x[image, :, rows, columns].reshape(groups, 1, *problem.w_shape[1:])
        dw += dy[image, :, i, j].reshape(groups, -1, 1, 1, 1) * window
    return dw.reshape(problem.w_shape)


def backward_bias(problem: ConvProblem, dy: np.ndarray) -> np.ndarray:
    """dbias, summed image by image and pixel by pixel."""
    dbias = np.zeros(problem.bias_shape, np.float32)
    for image, i, j in np.ndindex(problem.batch, problem.out_height, problem.out_width):
        dbias += dy[image, :, i, j]
    return dbias


def _grouped(problem: ConvProblem, images: np.ndarray) -> np.ndarray:
    """Images with an axis for groups."""
    batch, planes, *plane = images.shape
    return images.reshape(batch, problem.groups, planes // problem.groups, *plane)
