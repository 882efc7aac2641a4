"""Networks with gradients: random arrays, MXNet's results, and ours."""

import numpy as np
from gpu_networks import array, given

from ece408_op.network.training import Training, TrainingProgram
from ece408_op.operator.loading import load_mxnet

_GUARD = 64


class TrainingCase:
    """A symbol with random arrays, and the gradients for its outputs. By default all arguments are
    wanted, except labels, which are numbers from -1 to 3."""

    def __init__(self, symbol, wanted=None, train=True, seed=408, lowest=-2.0, on="cpu", **shapes):
        self.symbol, self.train, self.on = symbol, train, on
        rng = np.random.default_rng(seed)
        arguments, outputs, states = symbol.infer_shape(**shapes)
        self.arrays, self.wanted = {}, wanted
        for name, shape in zip(symbol.list_arguments(), arguments):
            scale = np.prod(shape[1:]) ** -0.5 if name.endswith("weight") else 1
            self.arrays[name] = (scale * rng.uniform(lowest, 2, shape)).astype(np.float32)
            if name.endswith("label"):
                self.arrays[name] = rng.integers(-1, 4, shape).astype(np.float32)
        if wanted is None:
            self.wanted = [name for name in self.arrays if not name.endswith("label")]
        self.states = symbol.list_auxiliary_states()
        for name, shape in zip(self.states, states):
            self.arrays[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        self.heads = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in outputs]

    def bound(self, dtype, arrays=None):
        """Return MXNet's executor."""
        mx = load_mxnet()
        text = self.symbol.tojson()
        if dtype == "float64":
            text = text.replace('"dtype": "float32"', '"dtype": "float64"')
        held = {n: mx.nd.array(v, dtype=dtype) for n, v in (arrays or self.arrays).items()}
        states = {name: held.pop(name) for name in self.states}
        found = {name: mx.nd.zeros_like(held[name]) for name in self.wanted}
        wanted = {name: "write" if name in found else "null" for name in held}
        return mx.sym.load_json(text).bind(mx.cpu(), held, found, wanted, states)

    def expected(self, dtype="float32"):
        """Return MXNet's outputs, gradients and moving averages by name."""
        mx = load_mxnet()
        executor = self.bound(dtype)
        outputs = [each.asnumpy() for each in executor.forward(is_train=self.train)]
        heads = [mx.nd.array(each, dtype=dtype) for each in self.heads]
        executor.backward(heads, is_train=self.train)
        found = {name: executor.grad_dict[name].asnumpy() for name in self.wanted}
        states = {name: executor.aux_dict[name].asnumpy() for name in self.states}
        return outputs, found, states

    def slope(self, name, direction, step):
        """Return how fast the sum of the outputs times `heads` grows along a direction, by finite
        differences in float64."""
        ends = []
        for sign in (1, -1):
            moved = self.arrays[name].astype(np.float64) + sign * step * direction
            executor = self.bound("float64", {**self.arrays, name: moved})
            outputs = executor.forward(is_train=self.train)
            ends.append(sum((y.asnumpy() * h).sum() for y, h in zip(outputs, self.heads)))
        return (ends[0] - ends[1]) / (2 * step)

    def training(self, text=None):
        text = text or self.symbol.tojson()
        return Training(text, list(self.arrays), self.wanted, self.train, self.on)

    def record(self, training):
        """Return a forward pass."""
        return Recorded(self, training, [array(each) for each in self.arrays.values()])

    def found(self, text=None):
        """Return our outputs, gradients and moving averages."""
        recorded = self.record(self.training(text))
        return recorded.outputs, *recorded.backward()


class Recorded:
    """The outputs of a forward pass, and what it saves, with a guard behind."""

    def __init__(self, case, training, inputs):
        self.case, self.inputs, self.training = case, inputs, training
        # Inputs are addresses.
        self.held = list(case.arrays.values())
        self.program = training.program(inputs)
        self.outputs = [np.full(shape, np.nan, np.float32) for shape in self.program.output_shapes]
        self.saved = self._room()
        self._run(self.program.forward, inputs, [array(each) for each in self.outputs])
        if isinstance(self.saved, np.ndarray):
            assert np.isnan(self.saved[-_GUARD:]).all()

    def _room(self):
        if not isinstance(self.program, TrainingProgram):
            return self.program.room()
        return np.full(self.program.saved_bytes // 4 + _GUARD, np.nan, np.float32)

    def _run(self, function, *groups):
        if isinstance(self.saved, np.ndarray):
            function(*groups, self.saved.ctypes.data)
        else:
            function(given(*(each for group in groups for each in group)), self.saved)

    def backward(self):
        """Return the gradients and the new moving averages, by name."""
        results = [np.full(shape, np.nan, np.float32) for shape in self.program.result_shapes]
        heads, before = [array(each) for each in self.case.heads], np.array(self.saved)
        self._run(self.program.backward, self.inputs, heads, [array(each) for each in results])
        assert np.array(self.saved).tobytes() == before.tobytes()
        wanted = self.case.wanted
        averages = results[len(wanted) :]
        return dict(zip(wanted, results)), dict(zip(self.training.averages, averages))
