"""Networks computed by `network`, and by MXNet on the CPU."""

import numpy as np
import operator_fuzz
from compiled_together import MachineOfMany

from ece408_op.network import Array, Network
from ece408_op.network.gpu_training import Given
from ece408_op.operator.loading import load_mxnet


def array(values, version=0):
    return Array(values.ctypes.data, values.shape, str(values.dtype), version)


def given(*arrays):
    """Return arrays for a pass on a GPU."""
    return Given([each.address for each in arrays], [each.version for each in arrays])


class Case:
    """A symbol with random weights, and inputs of these shapes; with `whole` numbers all sums of a
    small network are exact."""

    def __init__(self, symbol, whole=False, dtype="float32", seed=408, **shapes):
        self.symbol, self.shapes, self.dtype, self.whole = symbol, shapes, dtype, whole
        self.rng = np.random.default_rng(seed)
        arguments, self.output_shapes, states = symbol.infer_shape(**shapes)
        self.arrays = {}
        for name, shape in zip(symbol.list_arguments(), arguments):
            self.arrays[name] = self._random(name, shape)
        for name, shape in zip(symbol.list_auxiliary_states(), states):
            self.arrays[name] = self.rng.uniform(0.5, 1.5, shape).astype(np.float32)
        self.version = 0

    def _random(self, name, shape):
        if name in self.shapes and self.dtype == "uint8":
            return self.rng.integers(0, 256, shape).astype(np.uint8)
        if self.whole:
            return self.rng.integers(-3, 4, shape).astype(np.float32)
        scale = 1 if name in self.shapes or len(shape) < 2 else np.prod(shape[1:]) ** -0.5
        return (scale * self.rng.uniform(-1, 1, shape)).astype(np.float32)

    def network(self, *clock, on="gpu"):
        parameters = [name for name in self.arrays if name not in self.shapes]
        return Network(self.symbol.tojson(), list(self.arrays), parameters, *clock, on=on)

    def run(self, network):
        """Return the outputs, which hold NaN before."""
        found = [np.full(shape, np.nan, np.float32) for shape in self.output_shapes]
        inputs = [array(each, self.version) for each in self.arrays.values()]
        network.compute(inputs, [array(each) for each in found])
        return found

    def expected(self):
        """Return MXNet's outputs on the CPU."""
        mx = load_mxnet()
        held = {name: mx.nd.array(values, dtype="float32") for name, values in self.arrays.items()}
        states = {name: held.pop(name) for name in self.symbol.list_auxiliary_states()}
        executor = self.symbol.bind(mx.cpu(), held, aux_states=states, grad_req="null")
        return [each.asnumpy() for each in executor.forward(is_train=False)]


def error(found, expected):
    """Return the error of the worst element, relative to the largest one."""
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return np.inf
    return np.abs(found - expected).max() / max(1e-30, np.abs(expected).max())


def check_together(cases, below, on=("gpu",)):
    """Compare the outputs of cases by name with MXNet's, exactly those of whole numbers; the
    kernels of all are compiled together."""
    machine, networks = MachineOfMany("fast"), {}
    with operator_fuzz.emulating(machine):
        for name, case in cases.items():
            networks[name] = case.network()
            case.run(networks[name])
        machine.compile()
        for name, case in cases.items():
            # Constants derived from parameters used uninitialised arrays.
            case.version += 1
            expected = case.expected()
            for each in on:
                network = networks[name] if each == "gpu" else case.network(on=each)
                for number, (found, right) in enumerate(zip(case.run(network), expected)):
                    assert error(found, right) <= (0 if case.whole else below), (name, each, number)


def _lenet(sym):
    x = sym.Convolution(sym.Variable("data"), kernel=(5, 5), num_filter=4, name="conv1")
    x = sym.Pooling(sym.Activation(x, act_type="relu"), kernel=(2, 2), stride=(2, 2))
    x = sym.Convolution(x, kernel=(3, 3), num_filter=6, no_bias=True, name="conv2")
    x = sym.FullyConnected(sym.Activation(x, act_type="relu"), num_hidden=10, name="fc")
    return x


def _unit(sym, x, filters, name, stride=1):
    """Return a residual unit of two convolutions with normalisation."""
    conv = {"num_filter": filters, "no_bias": True}
    strided = {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride)}
    y = sym.Convolution(x, **conv, **strided, name=f"{name}_a")
    y = sym.Activation(sym.BatchNorm(y, name=f"{name}_bn1", fix_gamma=False), act_type="relu")
    y = sym.Convolution(y, **conv, kernel=(3, 3), pad=(1, 1), name=f"{name}_b")
    y = sym.BatchNorm(y, name=f"{name}_bn2", fix_gamma=False)
    if stride > 1:
        x = sym.Convolution(x, **conv, kernel=(1, 1), stride=(2, 2), name=f"{name}_c")
        x = sym.BatchNorm(x, name=f"{name}_bn3")
    return sym.Activation(x + y, act_type="relu")


def _resnet(sym):
    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=6, name="first")
    x = sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1))
    x = _unit(sym, _unit(sym, x, 6, "one"), 6, "two")
    x = _unit(sym, x, 8, "three", stride=2)
    x = sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    return sym.softmax(sym.FullyConnected(x, num_hidden=5, name="fc"))


def _inception(sym):
    x = sym.Variable("data")
    parts = [
        sym.Activation(
            sym.Convolution(x, kernel=(k, k), pad=(k // 2, k // 2), num_filter=m, name=f"conv{k}"),
            act_type="relu",
        )
        for k, m in ((1, 3), (3, 4), (5, 2))
    ]
    pooled = sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg")
    x = sym.BatchNorm(sym.concat(*parts, pooled), name="bn")
    x = sym.concat(sym.Activation(x, act_type="relu"), x)
    return sym.Convolution(x, kernel=(1, 1), num_filter=7, name="last")


def _mobilenet(sym):
    x = sym.Variable("data")
    for number, stride in enumerate((1, 2)):
        name = f"unit{number}"
        y = sym.Convolution(x, kernel=(1, 1), num_filter=8, no_bias=True, name=f"{name}_a")
        y = sym.clip(sym.BatchNorm(y, name=f"{name}_bn1"), 0, 6)
        y = sym.Convolution(
            y,
            kernel=(3, 3),
            pad=(1, 1),
            stride=(stride, stride),
            num_filter=8,
            num_group=8,
            no_bias=True,
            name=f"{name}_b",
        )
        y = sym.clip(sym.BatchNorm(y, name=f"{name}_bn2"), 0, 6)
        y = sym.Convolution(y, kernel=(1, 1), num_filter=4, no_bias=True, name=f"{name}_c")
        y = sym.BatchNorm(y, name=f"{name}_bn3")
        x = y + x if stride == 1 else y
    return sym.Flatten(sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))


def _densenet(sym):
    """Return a net in which each layer reads all before it; one concatenation begins two others."""
    x = sym.Variable("data")
    for number in range(3):
        y = sym.Activation(sym.BatchNorm(x, name=f"bn{number}"), act_type="relu")
        y = sym.Convolution(y, kernel=(3, 3), pad=(1, 1), num_filter=2, name=f"conv{number}")
        x = sym.concat(x, y)
    pooled = sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg")
    other = sym.Pooling(sym.concat(x, x * 2), kernel=(3, 3), stride=(2, 2), pool_type="max")
    x = sym.concat(sym.concat(x, y), y)
    x = sym.Flatten(sym.concat(pooled, other, sym.Pooling(x, kernel=(3, 3), stride=(2, 2))))
    return sym.FullyConnected(x, num_hidden=4, name="fc")


NETWORKS = {
    "lenet": (_lenet, (5, 1, 16, 14)),
    "resnet": (_resnet, (3, 3, 15, 13)),
    "inception": (_inception, (3, 4, 9, 7)),
    "densenet": (_densenet, (3, 3, 9, 8)),
    "mobilenet": (_mobilenet, (3, 4, 9, 11)),
}


def small(mx, name, **options):
    """Return one of these networks with random arrays."""
    make, shape = NETWORKS[name]
    return Case(make(mx.sym), data=shape, **options)
