"""Scoring of a network on images, through MXNet's Module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..operator.frozen_network import to_gpu
from ..operator.loading import load_mxnet


def as_input(images: np.ndarray) -> np.ndarray:
    """Return the networks' input, float32 (N, 1, H, W), from uint8 (N, H, W): raw pixels, 0 to
    255."""
    return images[:, np.newaxis].astype(np.float32)


def evaluate(
    symbol: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    gpu: int | None = None,
) -> Any:
    """Return MXNet's accuracy metric for a network on images, uint8 (N, H, W), and labels, uint8
    (N,).

    Images are processed in batches of `batch_size`, of which the last may be smaller, so every
    image counts once; on GPU number `gpu`, or on the CPU. The metric's `get()[1]` is the accuracy;
    printed, it is the course's line.
    """
    mx = load_mxnet()
    context = mx.cpu() if gpu is None else mx.gpu(gpu)
    module = _bind(symbol, arg_params, aux_params, (batch_size, 1, *images.shape[1:]), context)
    metric = mx.metric.Accuracy()
    for batch in _batches(images, labels, batch_size):
        module.forward(batch, is_train=False)
        module.update_metric(metric, batch.label)
    return metric


def evaluate_on_gpu(
    symbol: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
) -> Any:
    """As `evaluate`, by our kernels on GPUs that MXNet cannot use; pixels are copied as uint8."""
    mx = load_mxnet()
    floats = (_as_float32(params) for params in (arg_params, aux_params))
    network = to_gpu(symbol, *floats)
    metric = mx.metric.Accuracy()
    for start in range(0, len(images), batch_size):
        part = slice(start, start + batch_size)
        pixels = mx.nd.from_numpy(np.ascontiguousarray(images[part, np.newaxis]))
        metric.update([_as_labels(labels[part])], [network(pixels)])
    return metric


def _as_labels(labels: np.ndarray) -> Any:
    return load_mxnet().nd.from_numpy(labels.astype(np.float32))


def _as_float32(params: dict[str, Any]) -> dict[str, Any]:
    """Convert parameters, which files may store as float16, for a Module."""
    return {name: array.astype(np.float32) for name, array in params.items()}


def answers(
    symbol: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    images: np.ndarray,
    batch_size: int,
) -> np.ndarray:
    """Return the predicted class of each image, int64 (N,), for images of uint8 (N, H, W)."""
    mx = load_mxnet()
    shape = (batch_size, 1, *images.shape[1:])
    module = _bind(symbol, arg_params, aux_params, shape, mx.cpu())
    found = []
    for batch in _batches(images, np.zeros(len(images)), batch_size):
        module.forward(batch, is_train=False)
        found.append(module.get_outputs()[0].asnumpy().argmax(axis=1))
    return np.concatenate(found)


def _bind(
    symbol: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    shape: tuple[int, ...],
    context: Any,
) -> Any:
    """Return a new module: in one that has run, oneDNN may continue to use the old parameters."""
    module = load_mxnet().mod.Module(symbol, context=context)
    module.bind([("data", shape)], [("softmax_label", shape[:1])], for_training=False)
    module.set_params(arg_params, aux_params)
    return module


def _batches(images: np.ndarray, labels: np.ndarray, batch_size: int) -> Iterator[Any]:
    mx = load_mxnet()
    for start in range(0, len(images), batch_size):
        end = min(start + batch_size, len(images))
        yield mx.io.DataBatch(
            [mx.nd.from_numpy(as_input(images[start:end]))],
            [_as_labels(labels[start:end])],
            provide_data=[("data", (end - start, 1, *images.shape[1:]))],
            provide_label=[("softmax_label", (end - start,))],
        )
