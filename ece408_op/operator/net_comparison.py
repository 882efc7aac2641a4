"""Comparison of two networks on the same input: error and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..errors import InvalidSetting
from .loading import load_mxnet

_ROUNDS = 9


@dataclass(frozen=True)
class NetComparison:
    """Result for two networks on one input: `error`, the largest difference between elements of an
    output relative to the first network's largest finite magnitude in it; and the median seconds of
    each."""

    error: float
    seconds: tuple[float, float]

    @property
    def speed_up(self) -> float:
        """The first network's time divided by the second's."""
        return self.seconds[0] / self.seconds[1]

    def __str__(self) -> str:
        first, second = (1e3 * each for each in self.seconds)
        return (
            f"outputs differ by at most {self.error:.1e} of the largest; "
            f"{first:.3f} ms and {second:.3f} ms: {self.speed_up:.2f}x as fast"
        )


def compare(net_a: Any, net_b: Any, x: Any, rounds: int = _ROUNDS) -> NetComparison:
    """Call two Gluon nets, such as one and its swapped copy, on the same input, alternately.

    `x` is an NDArray, or a tuple of a net's several inputs. Each net is called once to warm up,
    then `rounds` times. Raises `InvalidSetting` if outputs have different shapes, and the errors of
    the operator.
    """
    inputs = x if isinstance(x, (tuple, list)) else (x,)
    return _measure(lambda: net_a(*inputs), lambda: net_b(*inputs), rounds)


def compare_symbols(
    first: Any, second: Any, arg_params: Any, aux_params: Any, x: np.ndarray
) -> NetComparison:
    """As `compare`, for Symbols with the same parameters and one input.

    Also raises `InvalidSetting` for a network with an ambiguous input, or one of another shape.
    """
    calls = [_bound(each, arg_params, aux_params, x) for each in (first, second)]
    return _measure(calls[0], calls[1], _ROUNDS)


def _bound(symbol: Any, arg_params: Any, aux_params: Any, x: np.ndarray) -> Any:
    """Return a function that calls the network."""
    mx = load_mxnet()
    free = [each for each in symbol.list_arguments() if each not in arg_params]
    inputs = [each for each in free if not each.endswith("label")]
    if len(inputs) != 1:
        raise InvalidSetting(
            f"the network's input is not clear: {', '.join(inputs) or 'none'} have no parameters; "
            "compare it in Python, with ece408_op.compare"
        )
    try:
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", **{inputs[0]: x.shape})
        executor.copy_params_from(arg_params, aux_params)
    except (mx.MXNetError, RuntimeError, ValueError) as error:
        sizes = "x".join(map(str, x.shape[1:]))
        line = str(error).strip().splitlines()[-1]
        raise InvalidSetting(f"the network does not accept images of {sizes}: {line}") from error
    return lambda: executor.forward(is_train=False, **{inputs[0]: mx.nd.array(x)})


def _measure(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> NetComparison:
    with errors.surfaced():
        error = _difference(_arrays(first()), _arrays(second()))
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for call, own in zip((first, second), seconds):
                begin = time.perf_counter()
                for output in _outputs(call()):
                    output.wait_to_read()
                own.append(time.perf_counter() - begin)
    return NetComparison(error, (statistics.median(seconds[0]), statistics.median(seconds[1])))


def _outputs(found: Any) -> list[Any]:
    """Return the NDArrays in a network's result, which may be nested lists."""
    if isinstance(found, (tuple, list)):
        return [output for each in found for output in _outputs(each)]
    return [found]


def _arrays(found: Any) -> list[np.ndarray]:
    return [output.asnumpy().astype(np.float64) for output in _outputs(found)]


def _difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    shapes = [[each.shape for each in outputs] for outputs in (first, second)]
    if shapes[0] != shapes[1]:
        raise InvalidSetting(
            f"the networks' outputs have shapes {shapes[0]} and {shapes[1]}; compare networks with "
            "the same ones"
        )
    return max((_share(*each) for each in zip(first, second) if each[0].size), default=0.0)


def _share(a: np.ndarray, b: np.ndarray) -> float:
    largest = float(np.abs(a[np.isfinite(a)]).max(initial=0))
    # Non-finite elements must be equal in both.
    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not different.any():
        return 0.0
    return float(np.abs(b[different] - a[different]).max()) / (largest or 1.0)
