"""Convolutions in NumPy, in float64, one tap at a time: independent of the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ece408_op.problem import ConvProblem


def _pad(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    (ph, pw) = problem.pad
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))


def _taps(problem: ConvProblem) -> Iterator[tuple]:
    """Every group and tap: slices of filters and channels, p, q, rows and columns of padded x."""
    filters, channels = problem.filters // problem.groups, problem.channels // problem.groups
    for g in range(problem.groups):
        m = slice(g * filters, (g + 1) * filters)
        c = slice(g * channels, (g + 1) * channels)
        for p, q in np.ndindex(*problem.kernel):
            h0, w0 = p * problem.dilate[0], q * problem.dilate[1]
            h1 = h0 + (problem.out_height - 1) * problem.stride[0] + 1
            w1 = w0 + (problem.out_width - 1) * problem.stride[1] + 1
            window = (slice(h0, h1, problem.stride[0]), slice(w0, w1, problem.stride[1]))
            yield m, c, p, q, window


def forward(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    padded = _pad(problem, x)
    y = np.zeros(problem.y_shape)
    for m, c, p, q, (rows, cols) in _taps(problem):
        y[:, m] += np.einsum("mc,bchw->bmhw", w[m, :, p, q], padded[:, c, rows, cols])
    return y if bias is None else y + bias[:, None, None]


def backward_data(problem: ConvProblem, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
    padded = _pad(problem, np.zeros(problem.x_shape))
    for m, c, p, q, (rows, cols) in _taps(problem):
        padded[:, c, rows, cols] += np.einsum("mc,bmhw->bchw", w[m, :, p, q], dy[:, m])
    h0, w0 = problem.pad
    return padded[:, :, h0 : h0 + problem.height, w0 : w0 + problem.width]


def backward_weight(problem: ConvProblem, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    padded = _pad(problem, x)
    dw = np.zeros(problem.w_shape)
    for m, c, p, q, (rows, cols) in _taps(problem):
        dw[m, :, p, q] = np.einsum("bmhw,bchw->mc", dy[:, m], padded[:, c, rows, cols])
    return dw


def backward_bias(dy: np.ndarray) -> np.ndarray:
    return dy.astype(np.float64).sum(axis=(0, 2, 3))
