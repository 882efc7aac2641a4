"""Networks through `backends.network`, and the same through MXNet on the CPU."""

from __future__ import annotations

import numpy as np

from ece408_op.backends.network import Array, Network
from ece408_op.operator.loading import load_mxnet


def array(values, version=0):
    return Array(values.ctypes.data, values.shape, str(values.dtype), version)


class Case:
    """A symbol with random weights, and inputs of these shapes; with `whole` numbers all sums of a
    small network are exact."""

    def __init__(self, symbol, whole=False, dtype="float32", seed=408, **shapes):
        self.symbol, self.shapes, self.dtype = symbol, shapes, dtype
        self.rng = np.random.default_rng(seed)
        arguments, self.output_shapes, states = symbol.infer_shape(**shapes)
        self.arrays = {}
        for name, shape in zip(symbol.list_arguments(), arguments):
            self.arrays[name] = self._random(name, shape, whole)
        for name, shape in zip(symbol.list_auxiliary_states(), states):
            self.arrays[name] = self.rng.uniform(0.5, 1.5, shape).astype(np.float32)
        self.version = 0

    def _random(self, name, shape, whole):
        if name in self.shapes and self.dtype == "uint8":
            return self.rng.integers(0, 256, shape).astype(np.uint8)
        if whole:
            return self.rng.integers(-3, 4, shape).astype(np.float32)
        scale = 1 if name in self.shapes or len(shape) < 2 else np.prod(shape[1:]) ** -0.5
        return (scale * self.rng.uniform(-1, 1, shape)).astype(np.float32)

    def network(self):
        parameters = [name for name in self.arrays if name not in self.shapes]
        return Network(self.symbol.tojson(), list(self.arrays), parameters)

    def run(self, network):
        """The outputs, which are NaN before."""
        found = [np.full(shape, np.nan, np.float32) for shape in self.output_shapes]
        inputs = [array(each, self.version) for each in self.arrays.values()]
        network.compute(inputs, [array(each) for each in found])
        return found

    def expected(self):
        """MXNet's on the CPU."""
        mx = load_mxnet()
        held = {name: mx.nd.array(values, dtype="float32") for name, values in self.arrays.items()}
        states = {name: held.pop(name) for name in self.symbol.list_auxiliary_states()}
        executor = self.symbol.bind(mx.cpu(), held, aux_states=states, grad_req="null")
        return [each.asnumpy() for each in executor.forward(is_train=False)]


def error(found, expected):
    """Of the worst element, relative to the largest one."""
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return np.inf
    return np.abs(found - expected).max() / max(1e-30, np.abs(expected).max())
