"""Random networks around convolutions, run in every way of MXNet's, compared with its own.

A `Program` is a list of steps that can run on NDArrays and on Symbols, with MXNet's Convolution or
ours. Its imperative results on NDArrays with MXNet's own operator are the reference for every other
way with ours: executors with and without gradients, groups of contexts, nested hybridized blocks in
all static modes, and exported blocks.

    python tests/helpers/random_graphs.py --graphs 1000 --first 0
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import programs

import ece408_op
from ece408_op.backends.cpu import native
from ece408_op.operator.loading import load_mxnet

# Seconds for one network in all ways; a slower process is ended.
MOST_SECONDS = 300
# Largest difference, relative to the largest value of an array.
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}
# How often MXNet's own operator is repeated if ours was wrong: some of its failures depend on the
# timing of its threads.
NATIVE_RUNS = 20
# How often MXNet's own rounding error is measured, with inputs and convolutions that differ in
# their last bits: small changes decide, for example, which of two near-equal values is the maximum.
NEARBY_RUNS = 16
GROUPS = "executors, groups of contexts"
STATIC_MODES = {
    "dynamic": {},
    "static memory": {"static_alloc": True},
    "static memory and shapes": {"static_alloc": True, "static_shape": True},
}
SEVERAL_OUTPUTS = "operators with several outputs"
Shape = tuple[int, ...]
# Takes a namespace (mx.nd, mx.sym), its convolution, and the step's inputs and parameters.
Run = Callable[..., Any]


@dataclass
class Step:
    inputs: list[int]
    outputs: list[int]
    parameters: list[str]
    run: Run


@dataclass
class Program:
    """A network: its steps, the shapes of its arrays and parameters, and its outputs."""

    rng: np.random.Generator
    dtype: str
    steps: list[Step] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    parameters: dict[str, Shape] = field(default_factory=dict)
    averages: dict[str, Shape] = field(default_factory=dict)
    heads: list[int] = field(default_factory=list)
    features: Counter = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)
    # Whether gradients of two steps are accumulated.
    adds: bool = False

    @property
    def request(self) -> str:
        """MXNet's request for gradients."""
        return "add" if self.adds else "write"

    def evaluate(
        self, F: Any, convolution: Any, arrays: dict[int, Any], parameters: Any, steps: Any = None
    ) -> list[Any]:
        """Run the steps, which add to the arrays; return the outputs that are known then."""
        for step in self.steps if steps is None else steps:
            given = [arrays[number] for number in step.inputs]
            given += [parameters[name] for name in step.parameters]
            found = step.run(F, convolution(F), *given)
            arrays.update(zip(step.outputs, found if len(step.outputs) > 1 else [found]))
        return [arrays[number] for number in self.heads if number in arrays]

    def symbol(self, mx: Any, convolution: Any, groups: Sequence[str] = ()) -> Any:
        """Return the network as a Symbol, its parameters variables by name, averages auxiliary.

        `groups` are context groups of the steps, in order.
        """
        variables: dict[str, Any] = {}
        with mx.AttrScope(**({"ctx_group": groups[0]} if groups else {})):
            arrays = {0: mx.sym.Variable("data")}
        for number, step in enumerate(self.steps):
            group = {"ctx_group": groups[number % len(groups)]} if groups else {}
            with mx.AttrScope(**group):
                # A parameter belongs to the first step that reads it.
                for name in step.parameters:
                    variables.setdefault(name, mx.sym.Variable(name))
                heads = self.evaluate(mx.sym, convolution, arrays, variables, [step])
        return mx.sym.Group(heads)


class Generator:
    """Draws a program from a seed: about `length` random steps."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([408, seed])
        dtype = "float64" if self.rng.random() < 0.1 else "float32"
        self.program = Program(self.rng, dtype)
        self.program.adds = bool(np.random.default_rng([408, seed, 1]).random() < 0.3)
        self.program.features["gradients that are added"] = int(self.program.adds)
        self._count = 0

    def make(self) -> Program:
        program, rng = self.program, self.rng
        batch, channels = int(rng.integers(1, 4)), int(rng.choice([1, 3, 4, 8, 16]))
        program.shapes.append((batch, channels, self._up_to(5, 13), self._up_to(5, 13)))
        counts = {
            self._convolution: 8,
            self._normalisation: 2,
            self._activation: 3,
            self._pooling: 2,
            self._split: 3,
            self._sum: 3,
            self._product: 1,
            self._concatenation: 2,
            **dict.fromkeys((self._slice, self._statistics, self._recurrent, self._loop), 1),
            **dict.fromkeys((self._one_dimension, self._transposed, self._identity), 1),
            **dict.fromkeys((self._same_name, self._zeros), 1),
        }
        # MXNet's control flow copies inputs in blocked layouts before they are computed: next to
        # its transposed convolutions it is wrong, even with its own convolution. Next to recurrent
        # layers, its gradients are sometimes NaN, and sometimes the process ends.
        for each in [[self._loop], [self._transposed, self._recurrent]][rng.integers(2)]:
            del counts[each]
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        for _ in range(self._up_to(3, 15)):
            kinds[rng.integers(len(kinds))]()
        if not program.features["convolutions"]:
            self._convolution()
        self._choose_heads()
        return program

    def _up_to(self, first: int, end: int) -> int:
        return int(self.rng.integers(first, end))

    def _any(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def _chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    # --- inputs of steps

    def _pick(self) -> tuple[int, Shape]:
        """Pick an array, more likely a recent one; return its number and shape."""
        shapes = self.program.shapes
        number = len(shapes) - 1 - min(int(self.rng.geometric(0.5)) - 1, len(shapes) - 1)
        return number, shapes[number]

    def _other(self, number: int, fits: Callable[[Shape], bool]) -> list[int]:
        """Return another array that fits, or none."""
        found = [i for i, s in enumerate(self.program.shapes) if i != number and fits(s)]
        return [self._any(found)] if found else []

    def _parameter(self, kind: str, shape: Shape, is_average: bool = False) -> str:
        self._count += 1
        name = f"{kind}{self._count}"
        (self.program.averages if is_average else self.program.parameters)[name] = shape
        return name

    def _name(self, kind: str) -> str:
        self._count += 1
        self.program.names.append(f"{kind}{self._count}")
        return self.program.names[-1]

    def _step(
        self,
        feature: str,
        inputs: list[int],
        shapes: list[Shape],
        run: Run,
        parameters: Iterable[str] = (),
    ) -> list[int]:
        program = self.program
        first = len(program.shapes)
        outputs = list(range(first, first + len(shapes)))
        program.shapes.extend(shapes)
        program.steps.append(Step(inputs, outputs, list(parameters), run))
        program.features[feature] += 1
        if len(outputs) > 1:
            program.features[SEVERAL_OUTPUTS] += 1
        return outputs

    # --- convolutions

    def _convolution(self, source: int | None = None) -> None:
        rng = self.rng
        x = self._pick()[0] if source is None else source
        batch, channels, *sizes = self.program.shapes[x]
        groups = int(rng.choice([g for g in (1, 1, 2, channels) if channels % g == 0]))
        filters = groups * self._up_to(1, max(2, 17 // groups))
        kernel = tuple(int(k) for k in rng.choice([1, 1, 2, 3, 3, 5], 2))
        known = [s for n, s in self.program.parameters.items() if n[0] == "w" and len(s) == 4]
        fitting = [s for s in known if channels % s[1] == 0 and s[0] % (channels // s[1]) == 0]
        if fitting and self._chance(0.4):
            filters, part, *kernel = self._any(fitting)
            kernel, groups = tuple(kernel), channels // part
        stride, dilate = (tuple(int(n) for n in rng.choice([1, 1, 1, 2], 2)) for _ in range(2))
        extents = [d * (k - 1) + 1 for d, k in zip(dilate, kernel)]
        pad = tuple(self._up_to(0, 3) for _ in range(2))
        pad = tuple(max(p, (e - s + 1) // 2) for p, e, s in zip(pad, extents, sizes))
        out = [(s + 2 * p - e) // st + 1 for s, p, e, st in zip(sizes, pad, extents, stride)]
        keywords = {
            "kernel": kernel, "stride": stride, "dilate": dilate, "pad": pad,
            "num_filter": filters, "num_group": groups, "no_bias": self._chance(0.5),
        }  # fmt: skip
        takes = [self._weight((filters, channels // groups, *kernel))]
        if not keywords["no_bias"]:
            takes.append(self._bias(filters))
        name = self._name("c")

        def run(F, convolution, x, *given):
            arrays = [take(F, each) for (_, take), each in zip(takes, given)]
            return convolution(x, *arrays, name=name, **keywords)

        names = [name for name, _ in takes]
        self._step("convolutions", [x], [(batch, filters, *out)], run, names)

    def _weight(self, shape: Shape) -> tuple[str, Callable]:
        """Draw a weight: a new one, another layer's, or a computed one."""
        features, parameters = self.program.features, self.program.parameters
        shared = [n for n, s in parameters.items() if n.startswith("w") and s == shape]
        if shared and self._chance(0.6):
            features["shared weights"] += 1
            return self._any(shared), _itself
        kind = self.rng.random()
        if kind < 0.1:
            features["weights that are output k of an operator"] += 1
            return self._part("w", shape, 3)
        if kind < 0.2:
            features["weights that are computed"] += 1
        return self._parameter("w", shape), (lambda F, w: w * 0.5) if kind < 0.2 else _itself

    def _bias(self, filters: int) -> tuple[str, Callable]:
        if self._chance(0.15):
            self.program.features["biases that are output k of an operator"] += 1
            return self._part("b", (filters,), 2)
        return self._parameter("b", (filters,)), _itself

    def _part(self, kind: str, shape: Shape, count: int) -> tuple[str, Callable]:
        """Draw a parameter, and one of `count` outputs of an operator on it."""
        name = self._parameter(kind, (shape[0] * count, *shape[1:]))
        k = self._up_to(0, count)
        return name, lambda F, given: F.SliceChannel(given, num_outputs=count, axis=0)[k]

    def _transposed(self) -> None:
        """Add MXNet's own operator whose results are in blocked layout."""
        x, (batch, channels, height, width) = self._pick()
        filters = int(self.rng.choice([8, 16]))
        w = self._parameter("d", (channels, filters, 2, 2))

        def run(F, convolution, x, w):
            return F.Deconvolution(x, w, kernel=(2, 2), num_filter=filters, no_bias=True)

        shape = (batch, filters, height + 1, width + 1)
        self._step("transposed convolutions of MXNet's", [x], [shape], run, [w])

    def _one_dimension(self) -> None:
        x, (batch, channels, height, width) = self._pick()
        filters = self._up_to(1, 9)
        w = self._parameter("w", (filters, channels, 3))
        name = self._name("l")

        def run(F, convolution, x, w):
            keywords = {"kernel": (3,), "pad": (1,), "num_filter": filters, "no_bias": True}
            y = convolution(F.reshape(x, shape=(0, 0, -1)), w, name=name, **keywords)
            return F.reshape(y, shape=(0, 0, height, width))

        shape = (batch, filters, height, width)
        self._step("one-dimensional convolutions", [x], [shape], run, [w])

    # --- operators with several outputs

    def _split(self) -> None:
        x, shape = self._pick()
        axis = int(self.rng.choice([a for a in (1, 1, 2, 3) if shape[a] > 1] or [0]))
        counts = [n for n in (2, 3, 4) if shape[axis] % n == 0]
        if not counts:
            return
        count = int(self.rng.choice(counts))

        def run(F, convolution, x):
            found = F.SliceChannel(x, num_outputs=count, axis=axis)
            return [found[k] for k in range(count)]

        part = _with(shape, axis, shape[axis] // count)
        outputs = self._step(SEVERAL_OUTPUTS, [x], [part] * count, run)
        if self._chance(0.7):
            self._convolution(outputs[self._up_to(1, count)])

    def _recurrent(self) -> None:
        x, (batch, channels, height, width) = self._pick()
        size = self._up_to(1, 4)
        count = size * channels + size * size + 2 * size
        names = [self._parameter("r", (count,)), self._parameter("s", (1, batch, size))]
        options = {"num_layers": 1, "mode": "rnn_tanh", "state_outputs": True}

        def run(F, convolution, x, w, state):
            steps = F.transpose(F.reshape(x, shape=(0, 0, -1)), axes=(2, 0, 1))
            found = F.RNN(steps, w, state, state_size=size, **options)
            back = F.reshape(F.transpose(found[0], axes=(1, 2, 0)), shape=(0, 0, height, width))
            return [back, F.reshape(F.transpose(found[1], axes=(1, 2, 0)), shape=(0, 0, 1, 1))]

        shapes = [(batch, size, height, width), (batch, size, 1, 1)]
        outputs = self._step("recurrent layers with their state", [x], shapes, run, names)
        self._convolution(outputs[1])

    def _loop(self) -> None:
        x, shape = self._pick()
        _, channels, height, width = shape
        w = self._parameter("w", (channels, channels, 3, 3))
        inside, name = self._chance(0.7), self._name("c")
        keywords = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels, "no_bias": True}

        def run(F, convolution, x, w):
            def body(step, states):
                y = F.reshape(step, shape=(1, channels, height, width)) + states[0]
                if inside:
                    y = convolution(y, w, name=name, **keywords)
                return F.reshape(y, shape=(channels, height, width)), [F.tanh(y)]

            state = F.slice_axis(x, axis=0, begin=0, end=1)
            found, states = F.contrib.foreach(body, x, [state])
            if not inside:
                found = convolution(found, w, name=name, **keywords)
            return [F.reshape(found, shape=(-1, channels, height, width)), states[0]]

        self._step("control flow", [x], [shape, (1, channels, height, width)], run, [w])
        self.program.features["convolutions inside control flow"] += inside

    def _normalisation(self, statistics: bool = False) -> None:
        """Add one of several values per channel: a variance of few magnifies roundings. With
        `statistics` its averages are outputs, too."""
        x, shape = self._pick()
        if shape[0] * shape[2] * shape[3] < 16:
            x, shape = 0, self.program.shapes[0]
        names = [self._parameter(kind, shape[1:2]) for kind in ("gamma", "beta")]
        names += [self._parameter(kind, shape[1:2], True) for kind in ("mean", "var")]
        fix, epsilon = self._chance(0.5), float(self.rng.choice([1e-3, 1e-5]))
        options = {"fix_gamma": fix, "eps": epsilon, "name": self._name("n")}

        def run(F, convolution, x, *given):
            found = F.BatchNorm(x, *given, output_mean_var=statistics, **options)
            if not statistics:
                return found
            spread = F.broadcast_add(x, F.reshape(found[1], shape=(1, -1, 1, 1)))
            return [found[0], F.broadcast_mul(spread, F.reshape(found[2], shape=(1, -1, 1, 1)))]

        feature = "normalisation" + " with its averages" * statistics
        self._step(feature, [x], [shape] * (1 + statistics), run, names)

    def _statistics(self) -> None:
        self._normalisation(statistics=True)

    # --- the rest

    def _activation(self) -> None:
        x, shape = self._pick()
        kind = self._any(["clip", "sigmoid", "relu", "relu"])

        def run(F, convolution, x):
            return F.clip(x, -0.5, 1.0) if kind == "clip" else F.Activation(x, act_type=kind)

        self._step("activations", [x], [shape], run)

    def _pooling(self) -> None:
        x, shape = self._pick()
        whole = self._chance(0.2)
        kernel = tuple(self._up_to(1, min(4, size + 1)) for size in shape[2:])
        stride = tuple(self._up_to(1, 3) for _ in range(2))
        kind = self._any(["max", "avg"])
        out = [(s - k) // t + 1 for s, k, t in zip(shape[2:], kernel, stride)]
        window: dict[str, Any] = {"kernel": kernel, "stride": stride}
        if whole:
            out, window = [1, 1], {"kernel": (1, 1), "global_pool": True}

        def run(F, convolution, x):
            return F.Pooling(x, pool_type=kind, **window)

        self._step("pooling", [x], [(*shape[:2], *out)], run)

    def _binary(self, feature: str, *operators: str) -> None:
        x, shape = self._pick()
        others = self._other(x, lambda other: other == shape)
        if others:
            operator = self._any(operators)
            run: Run = lambda F, convolution, x, y: getattr(F, operator)(x, y)  # noqa: E731
            self._step(feature, [x, *others], [shape], run)

    def _sum(self) -> None:
        self._binary("sums", "elemwise_add", "elemwise_add", "broadcast_add")

    def _product(self) -> None:
        self._binary("products", "elemwise_mul", "broadcast_mul")

    def _concatenation(self) -> None:
        x, shape = self._pick()
        for y in self._other(x, lambda other: _with(other, 1, shape[1]) == shape):
            whole = _with(shape, 1, shape[1] + self.program.shapes[y][1])
            run: Run = lambda F, convolution, x, y: F.Concat(x, y, dim=1)  # noqa: E731
            self._step("concatenations", [x, y], [whole], run)

    def _slice(self) -> None:
        x, shape = self._pick()
        axis = self._up_to(1, 4)
        begin = self._up_to(0, shape[axis])
        end = self._up_to(begin + 1, shape[axis] + 1)

        def run(F, convolution, x):
            return F.slice_axis(x, axis=axis, begin=begin, end=end)

        self._step("slices", [x], [_with(shape, axis, end - begin)], run)

    def _identity(self) -> None:
        """Add one of three, two of which look like guards."""
        x, shape = self._pick()
        run = self._any(
            [
                lambda F, convolution, x: F.clip(x, -np.inf, np.inf),
                lambda F, convolution, x: F.reshape(x, shape=(-2,)),
                lambda F, convolution, x: F.identity(x),
            ]
        )
        self._step("identities", [x], [shape], run)

    def _same_name(self) -> None:
        """Add a node of another kind with the name of an earlier one, or of one that we might
        add."""
        x, shape = self._pick()
        if not self.program.names:
            return
        name = self._any(self.program.names) + self._any(["", "_conv", "_plain", "_data"])

        def run(F, convolution, x):
            return F.Activation(x, act_type="relu", name=name)

        self._step("names that clash", [x], [shape], run)

    def _zeros(self) -> None:
        """Return zeros whose batch is inferred, through a convolution, from the array it is added
        to."""
        x, shape = self._pick()
        channels = shape[1]
        w = self._parameter("w", (channels, channels, 3, 3))
        keywords = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels, "no_bias": True}
        name, program = self._name("c"), self.program

        def run(F, convolution, x, w):
            rows = 0 if "symbol" in F.__name__ else shape[0]
            state = F.zeros(shape=(rows, *shape[1:]), dtype=program.dtype)
            return x + convolution(state, w, name=name, **keywords)

        self._step("shapes known from outputs", [x], [shape], run, [w])

    def _choose_heads(self) -> None:
        program = self.program
        last = len(program.shapes) - 1
        used = {number for step in program.steps for number in step.inputs}
        ends = [n for n in range(1, last + 1) if n not in used]
        more = [self._up_to(1, last + 1) for _ in range(self._up_to(0, 3))]
        program.heads = list(dict.fromkeys([*ends, *more]))
        program.features["several heads"] += len(program.heads) > 1


def _itself(F: Any, given: Any) -> Any:
    return given


def _with(shape: Shape, axis: int, size: int) -> Shape:
    """Return the shape with another size of an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


# --- running a program


class Values:
    """Data, parameters, averages and gradients of the outputs for a program, in NumPy."""

    def __init__(self, program: Program) -> None:
        def random(shape: Shape, scale: float = 1.0) -> np.ndarray:
            return (program.rng.standard_normal(shape) * scale).astype(program.dtype)

        self.data = [random(program.shapes[0]) for _ in range(2)]
        self.parameters = {
            name: random(shape, 1 / np.sqrt(max(1, np.prod(shape[1:], dtype=float))))
            for name, shape in program.parameters.items()
        }
        self.averages = {
            name: random(shape) if name.startswith("mean") else np.abs(random(shape)) + 0.5
            for name, shape in program.averages.items()
        }
        self.heads = [random(program.shapes[head]) for head in program.heads]

    def _with(self, function: Callable[[np.ndarray], np.ndarray], *names: str) -> Values:
        """Return the values with a function of the arrays of these names."""
        other = copy.copy(self)
        for name in names:
            arrays = getattr(self, name)
            if isinstance(arrays, dict):
                setattr(other, name, {key: function(x) for key, x in arrays.items()})
            else:
                setattr(other, name, [function(x) for x in arrays])
        return other

    def as_type(self, dtype: str) -> Values:
        """Return the same values in another dtype."""
        return self._with(lambda x: x.astype(dtype), *vars(self))

    def nearby(self, seed: int) -> Values:
        """Return values that differ in their last bits."""
        rng = np.random.default_rng(seed)

        def near(x: np.ndarray) -> np.ndarray:
            moved = x * (1 + 4 * np.finfo(x.dtype).eps * rng.choice([-1, 1], x.shape))
            return moved.astype(x.dtype)

        return self._with(near, "data", "parameters")


@dataclass
class Results:
    """Outputs of inference on both data, and outputs, gradients and moving averages of a training
    step, or the gradients of two."""

    inference: list[list[np.ndarray]]
    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    averages: dict[str, np.ndarray]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name."""
        named = {f"gradient of {name}": array for name, array in self.gradients.items()}
        named.update((f"moving {name}", array) for name, array in self.averages.items())
        for call, outputs in enumerate(self.inference):
            named.update((f"inference {call}, output {i}", y) for i, y in enumerate(outputs))
        named.update((f"training, output {i}", y) for i, y in enumerate(self.outputs))
        return named


def _ours(F: Any) -> Any:
    return ece408_op.Convolution


def _native(F: Any) -> Any:
    return F.Convolution


def _rounded(seed: int) -> Any:
    """MXNet's own convolution of NDArrays with each result off by up to a unit in the last place,
    as if summed in another order."""
    rng = np.random.default_rng(seed)

    def rounded(F: Any) -> Any:
        def convolution(*arrays: Any, **keywords: Any) -> Any:
            found = F.Convolution(*arrays, **keywords)
            noise = np.finfo(found.dtype).eps * rng.choice([-1, 0, 1], found.shape)
            return found * F.array(1 + noise, dtype=found.dtype)

        return convolution

    return rounded


def _array(mx: Any, value: np.ndarray) -> Any:
    return mx.nd.array(value, dtype=value.dtype)


def _arrays(mx: Any, values: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: _array(mx, value) for name, value in values.items()}


def _numpy(mx: Any, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    # MXNet does not always tell readers of averages that an update is pending.
    mx.nd.waitall()
    return {name: array.asnumpy() for name, array in arrays.items()}


def _outputs(block: Any, *given: Any) -> list[Any]:
    found = block(*given)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _trained(mx: Any, program: Program, values: Values, run: Callable, data: Any) -> list[Any]:
    """Do one training step, or two whose gradients are added; return the outputs."""
    for _ in range(1 + program.adds):
        with mx.autograd.record():
            heads = run(data)
        mx.autograd.backward(heads, [_array(mx, g) for g in values.heads])
    return [y.asnumpy() for y in heads]


def imperative(
    mx: Any, program: Program, values: Values, convolution: Any, request: str = "write"
) -> Results:
    parameters, averages = _arrays(mx, values.parameters), _arrays(mx, values.averages)

    def run(data: Any) -> list[Any]:
        return program.evaluate(mx.nd, convolution, {0: data}, {**parameters, **averages})

    inference = [[y.asnumpy() for y in run(_array(mx, x))] for x in values.data]
    inputs = {"data": _array(mx, values.data[0]), **parameters}
    for array in inputs.values():
        array.attach_grad(request)
    outputs = _trained(mx, program, values, run, inputs["data"])
    gradients = _numpy(mx, {name: array.grad for name, array in inputs.items()})
    if program.adds and request == "write":
        gradients = {name: 2 * array for name, array in gradients.items()}
    return Results(inference, outputs, gradients, _numpy(mx, averages))


def executors(
    mx: Any, program: Program, values: Values, symbol: Any, simple: bool, groups: Sequence[str]
) -> Results:
    options = {"group2ctx": {"a": mx.cpu(0), "b": mx.cpu(1)}} if groups else {}

    def bind(grad_req: str) -> tuple[Any, dict[str, Any]]:
        arrays = _arrays(mx, {"data": values.data[0], **values.parameters})
        arrays = {name: arrays[name] for name in symbol.list_arguments()}
        auxiliary = _arrays(mx, values.averages)
        auxiliary = {name: auxiliary[name] for name in symbol.list_auxiliary_states()}
        if simple:
            types = {name: np.dtype(program.dtype).type for name in arrays}
            # Other shapes are inferred, except those of recurrent layers and computed weights.
            shapes = {n: a.shape for n, a in arrays.items() if n == "data" or n[0] in "rswb"}
            executor = symbol.simple_bind(
                mx.cpu(), grad_req=grad_req, type_dict=types, **shapes, **options
            )
            executor.copy_params_from(arrays, auxiliary)
            return executor, executor.grad_dict
        gradients = {name: mx.nd.zeros_like(a) for name, a in arrays.items()}
        given = None if grad_req == "null" else gradients
        return symbol.bind(mx.cpu(), arrays, given, grad_req, auxiliary, **options), gradients

    executor, _ = bind("null")
    inference = []
    for x in values.data:
        outputs = executor.forward(is_train=False, data=_array(mx, x))
        inference.append([y.asnumpy() for y in outputs])
    executor, gradients = bind(program.request)
    for gradient in gradients.values():
        gradient[:] = 0
    for _ in range(1 + program.adds):
        outputs = [y.asnumpy() for y in executor.forward(is_train=True)]
        executor.backward([_array(mx, g) for g in values.heads])
    return Results(inference, outputs, _numpy(mx, gradients), _numpy(mx, executor.aux_dict))


def make_block(mx: Any, program: Program, convolution: Any, depth: int) -> Any:
    """Return the program as nested blocks of a few steps each, and their parameters by name."""
    size = -(-len(program.steps) // (depth + 1))
    shared: dict[str, Any] = {}

    class Part(mx.gluon.HybridBlock):
        """Some steps, and a child with the rest."""

        def __init__(self, first: int) -> None:
            super().__init__(prefix="")
            left = program.steps[first * size :]
            self._steps = left if first >= depth else left[:size]
            made = {n for step in left for n in step.outputs}
            read = {n for step in left for n in step.inputs}.union(program.heads)
            self.taken = sorted(read - made) if first else [0]
            for name in sorted({name for step in self._steps for name in step.parameters}):
                if name not in shared:
                    shape = {**program.parameters, **program.averages}[name]
                    request = "null" if name in program.averages else program.request
                    options = {"grad_req": request, "allow_deferred_init": True}
                    shared[name] = self.params.get(
                        name, shape=shape, dtype=program.dtype, **options
                    )
                setattr(self, name, shared[name])
            if first < depth:
                self.child = Part(first + 1)

        def hybrid_forward(self, F, *arrays, **parameters):
            known = dict(zip(self.taken, arrays))
            heads = program.evaluate(F, convolution, known, parameters, self._steps)
            if not len(self._children):
                return heads
            return self.child(*(known[number] for number in self.child.taken))

    block = Part(0)
    block.initialize()
    return block, shared


_CALLS = 6


def blocks(
    mx: Any, program: Program, values: Values, convolution: Any, static: dict[str, bool], depth: int
) -> tuple[Results, Any]:
    block, shared = make_block(mx, program, convolution, depth)

    def fill() -> None:
        for name, value in {**values.parameters, **values.averages}.items():
            if name in shared:
                shared[name].set_data(_array(mx, value))

    fill()
    block.hybridize(**static)
    run = functools.partial(_outputs, block)
    inference = []
    for x in values.data:
        # Repeated calls take other code paths.
        for _ in range(_CALLS):
            found = run(_array(mx, x))
        inference.append([y.asnumpy() for y in found])
    data = _array(mx, values.data[0])
    data.attach_grad(program.request)
    outputs = _trained(mx, program, values, run, data)
    with_gradients = [name for name in values.parameters if name in shared]
    gradients = {"data": data.grad, **{name: shared[name].grad() for name in with_gradients}}
    averages = {name: shared[name].data() for name in values.averages if name in shared}
    results = Results(inference, outputs, _numpy(mx, gradients), _numpy(mx, averages))
    fill()
    return results, block


def exported(mx: Any, program: Program, values: Values, block: Any) -> list[list[np.ndarray]]:
    """Return the outputs of the block after it is saved and loaded."""
    block(_array(mx, values.data[0]))
    with tempfile.TemporaryDirectory() as folder:
        block.export(str(Path(folder) / "net"))
        again = mx.gluon.SymbolBlock.imports(
            str(Path(folder) / "net-symbol.json"), ["data"], str(Path(folder) / "net-0000.params")
        )
    return [[y.asnumpy() for y in _outputs(again, _array(mx, x))] for x in values.data]


# --- comparing


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest value; NaN if there is one."""
    largest = float(np.max(np.abs(expected), initial=0.05))
    return float(np.max(np.abs(found - expected), initial=0.0)) / largest


def _compare(found: Results, expected: Results, tolerance: Callable[[str], float]) -> Iterator[str]:
    """Return a line for each array that differs by more than its tolerance."""
    ours, theirs = found.arrays(), expected.arrays()
    if not ours.keys() <= theirs.keys():
        yield f"there are {', '.join(ours.keys() - theirs.keys())}"
        return
    for name, array in ours.items():
        if array.shape != theirs[name].shape:
            yield f"{name}: shape {array.shape} for {theirs[name].shape}"
            continue
        error = _error(array, theirs[name])
        # Also if it is NaN.
        if not error <= tolerance(name):
            yield f"{name}: off by {error:.3g} of the largest value"


def check(mx: Any, seed: int, ours: Any = _ours) -> tuple[list[str], Counter]:
    """Check one random network; return a line per error, and its features."""
    program = Generator(seed).make()
    expected = Expected(mx, program, Values(program))
    features = Counter(dict.fromkeys(program.features, 1))
    wrong: list[str] = []
    for way, run in ways(mx, program, expected.values, ours, features):
        # MXNet's own often fails, and pending work then fails later.
        if way == GROUPS and expected.failures(run, _native):
            continue
        features[way] += 1
        wrong.extend(f"{way}: {line}" for line in expected.failures(run, ours))
    return wrong, features


class Expected:
    """A program's imperative results with MXNet's own convolution, and their accuracy."""

    def __init__(self, mx: Any, program: Program, values: Values) -> None:
        self.values = values
        self._mx, self._program = mx, program
        self._native = imperative(mx, program, values, _native)
        self._exact: Results | None = None
        self._errors: dict[str, float] = {}

    def failures(self, run: Callable[[Any], Results], convolution: Any) -> list[str]:
        """Return the errors of `run`: results that are neither near MXNet's own nor exact."""
        try:
            found = run(convolution)
            # The next wait would raise unreported failures.
            self._mx.nd.waitall()
        except Exception as error:
            with contextlib.suppress(self._mx.MXNetError):
                self._mx.nd.waitall()
            text = str(error).strip().splitlines()
            return [f"{type(error).__name__}: {text[-1] if text else ''}"]
        tolerance = TOLERANCE[self._program.dtype]
        lines = list(_compare(found, self._native, lambda *_: tolerance))
        if not lines:
            return []
        if self._exact is None:
            self._exact = self._in_double()
            self._errors = self._rounding(self._exact.arrays())
        return list(
            _compare(found, self._exact, lambda name: max(tolerance, 8 * self._errors[name]))
        )

    def _rounding(self, exact: dict[str, np.ndarray]) -> dict[str, float]:
        """Return MXNet's own error, also if its inputs and convolutions differ in the last bits: a
        cancelling result may be right by chance."""
        results = [self._native]
        for seed in range(NEARBY_RUNS):
            values = self.values.nearby(seed)
            results.append(imperative(self._mx, self._program, values, _rounded(seed)))
        found = [result.arrays() for result in results]
        return {name: max(_error(each[name], exact[name]) for each in found) for name in exact}

    def _in_double(self) -> Results:
        program, dtype = self._program, self._program.dtype
        try:
            program.dtype = "float64"
            return imperative(self._mx, program, self.values.as_type("float64"), _native)
        finally:
            program.dtype = dtype


def ways(
    mx: Any, program: Program, values: Values, ours: Any, features: Counter
) -> Iterator[tuple[str, Callable[[Any], Results]]]:
    """Yield the ways to run a program with a convolution, some at random, with their names."""
    rng = program.rng
    yield "calls on NDArrays", lambda each: imperative(mx, program, values, each, program.request)
    swapped, simple = rng.random() < 0.5, rng.random() < 0.5
    features["swapped" if swapped else "made with Convolution"] += 1

    def run_executors(convolution: Any, simple: bool, groups: Sequence[str] = ()) -> Results:
        is_swapped = swapped and convolution is ours
        symbol = program.symbol(mx, _native if is_swapped else convolution, groups)
        symbol = ece408_op.swap(symbol) if is_swapped else symbol
        return executors(mx, program, values, symbol, simple, groups)

    way = f"executors, {'simple_bind' if simple else 'bind'}"
    yield way, lambda each: run_executors(each, simple)
    static, depth = list(STATIC_MODES)[rng.integers(3)], int(rng.integers(0, 3))
    features["nested blocks"] += bool(depth)

    def run_blocks(convolution: Any) -> Results:
        return blocks(mx, program, values, convolution, STATIC_MODES[static], depth)[0]

    yield f"hybridized, {static}", run_blocks
    if rng.random() < 0.3:

        def run_exported(convolution: Any) -> Results:
            results, block = blocks(mx, program, values, convolution, STATIC_MODES[static], depth)
            results.inference = exported(mx, program, values, block)
            return results

        yield "exported", run_exported
    if rng.random() < 0.3 and "control flow" not in program.features:
        groups = list(rng.choice(["a", "b"], 3))
        yield GROUPS, lambda each: run_executors(each, True, groups)


# --- many programs, in separate processes: MXNet's own operators end some with a signal


def checked(seed: int, convolution: str) -> tuple[list[str], Counter]:
    """Check a seed in this process."""
    if "ECE408_TEST_LIBRARY" in os.environ:
        native.LIBRARY = Path(os.environ["ECE408_TEST_LIBRARY"]).resolve()
    return check(load_mxnet(), seed, _native if convolution == "native" else _ours)


def run(
    first: int, count: int, jobs: int = 1, progress: Callable[[str], object] | None = None
) -> tuple[list[str], Counter]:
    """Check `count` networks from seed `first` on; return errors, and the networks' features."""
    wrong: list[str] = []
    coverage: Counter = Counter()
    seeds = range(first, first + count)
    for seed, found in programs.shared_out(_beside_native, seeds, jobs, MOST_SECONDS):
        lines = [f"graph {seed}: {line}" for line in found[0]]
        wrong += lines
        coverage.update(found[1], graphs=1)
        if progress is not None and (lines or coverage["graphs"] % 100 == 0):
            progress("\n".join([*lines, f"{coverage['graphs']} of {count}, {len(wrong)} wrong"]))
    return wrong, coverage


def _beside_native(worker: programs.Worker, seed: int) -> tuple[list[str], dict[str, int]]:
    """Return a seed's failures in ways in which MXNet's own operator does not fail, and its
    features."""
    try:
        lines, features = worker(checked, seed, "ours")
        if not lines:
            return lines, features
    except Exception as error:  # also if MXNet's own network fails
        lines, features = [f"{type(error).__name__}: {error}"], Counter()
    failing, died = set(), False
    # In a separate process MXNet plans memory as usual.
    with programs.Worker(MOST_SECONDS) as own:
        try:
            for _ in range(NATIVE_RUNS):
                wrong, _ = own(checked, seed, "native")
                failing |= {line.partition(":")[0] for line in wrong}
        except Exception:
            died = True
    if not features:
        return [] if died else lines, {"(MXNet's own dies as well)": int(died)}
    left = [line for line in lines if line.partition(":")[0] not in failing]
    return left, {**features, "(MXNet's own fails as well)": int(len(left) < len(lines))}


def table(coverage: Counter) -> str:
    width = max(map(len, coverage))
    return "\n".join(f"{what.ljust(width)}  {count}" for what, count in coverage.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random networks with our operator.")
    parser.add_argument("--graphs", type=int, default=300, help="how many (default 300)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args()

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    wrong, coverage = run(options.first, options.graphs, options.jobs, progress)
    print(table(coverage))
    print(*wrong, sep="\n")
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
