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
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
Shape = tuple[int, ...]
# Takes a namespace (mx.nd, mx.sym), a convolution, arrays by number and parameters by name.
Run = Callable[[Any, Any, dict[int, Any], dict[str, Any]], Any]


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
        self, F: Any, convolution: Any, data: Any, parameters: dict[str, Any], steps: Any = None
    ) -> dict[int, Any]:
        arrays = data if isinstance(data, dict) else {0: data}
        for step in self.steps if steps is None else steps:
            found = step.run(F, convolution, arrays, parameters)
            found = found if isinstance(found, (list, tuple)) else [found]
            arrays.update(zip(step.outputs, found))
        return arrays

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
                self.evaluate(mx.sym, convolution, arrays, variables, [step])
        return mx.sym.Group([arrays[number] for number in self.heads])


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
        side = int(rng.integers(5, 13))
        program.shapes.append((batch, channels, side, int(rng.integers(5, 13))))
        kinds = [
            *[self._convolution] * 8,
            *[self._normalisation] * 2,
            *[self._activation] * 3,
            *[self._pooling] * 2,
            *[self._split] * 3,
            *[self._sum] * 3,
            *(self._product, self._concatenation, self._concatenation, self._slice),
            *(self._statistics, self._recurrent, self._loop, self._one_dimension),
            *(self._transposed, self._identity, self._same_name, self._zeros),
        ]
        # MXNet's control flow copies inputs in blocked layouts before they are computed: next to
        # its transposed convolutions it is wrong, even with its own convolution. Next to recurrent
        # layers, its gradients are sometimes NaN, and sometimes the process ends.
        without = [[self._loop], [self._transposed, self._recurrent]][rng.integers(2)]
        kinds = [kind for kind in kinds if kind not in without]
        for _ in range(int(rng.integers(3, 15))):
            kinds[rng.integers(len(kinds))]()
        if not program.features["convolutions"]:
            self._convolution()
        self._choose_heads()
        return program

    # --- inputs of steps

    def _pick(self) -> int:
        """Pick an array, more likely a recent one."""
        count = len(self.program.shapes)
        return count - 1 - min(int(self.rng.geometric(0.5)) - 1, count - 1)

    def _pick_like(self, number: int, fits: Callable[[Shape, Shape], bool]) -> list[int]:
        shapes = self.program.shapes
        return [i for i, s in enumerate(shapes) if i != number and fits(s, shapes[number])]

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
        self, inputs: list[int], shapes: list[Shape], parameters: list[str], run: Run, feature: str
    ) -> list[int]:
        program = self.program
        first = len(program.shapes)
        outputs = list(range(first, first + len(shapes)))
        program.shapes.extend(shapes)
        program.steps.append(Step(inputs, outputs, parameters, run))
        program.features[feature] += 1
        return outputs

    def _chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    # --- convolutions

    def _convolution(self, source: int | None = None) -> None:
        rng = self.rng
        x = self._pick() if source is None else source
        batch, channels, height, width = self.program.shapes[x]
        groups = int(rng.choice([g for g in (1, 1, 2, channels) if channels % g == 0]))
        filters = groups * int(rng.integers(1, max(2, 17 // groups)))
        kernel = tuple(int(k) for k in rng.choice([1, 1, 2, 3, 3, 5], 2))
        known = [s for n, s in self.program.parameters.items() if n[0] == "w" and len(s) == 4]
        fitting = [s for s in known if channels % s[1] == 0 and s[0] % (channels // s[1]) == 0]
        if fitting and self._chance(0.4):
            filters, part, *kernel = fitting[int(rng.integers(len(fitting)))]
            kernel, groups = tuple(kernel), channels // part
        stride = tuple(int(s) for s in rng.choice([1, 1, 1, 2], 2))
        dilate = tuple(int(d) for d in rng.choice([1, 1, 1, 2], 2))
        extents = [d * (k - 1) + 1 for d, k in zip(dilate, kernel)]
        pad = tuple(int(rng.integers(0, 3)) for _ in range(2))
        pad = tuple(max(p, (e - s + 1) // 2) for p, e, s in zip(pad, extents, (height, width)))
        out = [
            (s + 2 * p - e) // st + 1 for s, p, e, st in zip((height, width), pad, extents, stride)
        ]
        keywords = {
            "kernel": kernel, "stride": stride, "dilate": dilate, "pad": pad,
            "num_filter": filters, "num_group": groups, "no_bias": self._chance(0.5),
        }  # fmt: skip
        weight, names = self._weight((filters, channels // groups, *kernel))
        inputs = [x]
        bias = None
        if not keywords["no_bias"]:
            bias, more, used = self._bias(filters)
            names, inputs = [*names, *more], [*inputs, *used]
        name = self._name("c")

        def run(F, convolution, t, p):
            arrays = (t[x], weight(F, p), None if bias is None else bias(F, t, p))
            return convolution(F)(*arrays, name=name, **keywords)

        self._step(inputs, [(batch, filters, *out)], names, run, "convolutions")

    def _weight(self, shape: Shape) -> tuple[Callable, list[str]]:
        """Draw a weight: a new one, another layer's, or a computed one."""
        features, parameters = self.program.features, self.program.parameters
        shared = [n for n, s in parameters.items() if n.startswith("w") and s == shape]
        if shared and self._chance(0.6):
            features["shared weights"] += 1
            name = shared[int(self.rng.integers(len(shared)))]
            return (lambda F, p: p[name]), [name]
        kind = self.rng.random()
        if kind < 0.1:
            features["weights that are output k of an operator"] += 1
            name = self._parameter("w", (shape[0] * 3, *shape[1:]))
            k = int(self.rng.integers(3))
            return (lambda F, p: F.SliceChannel(p[name], num_outputs=3, axis=0)[k]), [name]
        if kind < 0.2:
            features["weights that are computed"] += 1
            name = self._parameter("w", shape)
            return (lambda F, p: p[name] * 0.5), [name]
        name = self._parameter("w", shape)
        return (lambda F, p: p[name]), [name]

    def _bias(self, filters: int) -> tuple[Callable, list[str], list[int]]:
        if self._chance(0.15):
            self.program.features["biases that are output k of an operator"] += 1
            name = self._parameter("b", (2 * filters,))
            k = int(self.rng.integers(2))
            return (lambda F, t, p: F.SliceChannel(p[name], num_outputs=2, axis=0)[k]), [name], []
        name = self._parameter("b", (filters,))
        return (lambda F, t, p: p[name]), [name], []

    def _transposed(self) -> None:
        """Add MXNet's own operator whose results are in blocked layout."""
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        filters = int(self.rng.choice([8, 16]))
        w = self._parameter("d", (channels, filters, 2, 2))

        def run(F, convolution, t, p):
            return F.Deconvolution(t[x], p[w], kernel=(2, 2), num_filter=filters, no_bias=True)

        shape = (batch, filters, height + 1, width + 1)
        self._step([x], [shape], [w], run, "transposed convolutions of MXNet's")

    def _one_dimension(self) -> None:
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        filters = int(self.rng.integers(1, 9))
        w = self._parameter("w", (filters, channels, 3))
        name = self._name("l")

        def run(F, convolution, t, p):
            line = F.reshape(t[x], shape=(0, 0, -1))
            keywords = {"kernel": (3,), "pad": (1,), "num_filter": filters, "no_bias": True}
            y = convolution(F)(line, p[w], name=name, **keywords)
            return F.reshape(y, shape=(0, 0, height, width))

        self._step([x], [(batch, filters, height, width)], [w], run, "one-dimensional convolutions")

    # --- operators with several outputs

    def _split(self) -> None:
        x = self._pick()
        shape = self.program.shapes[x]
        axis = int(self.rng.choice([a for a in (1, 1, 2, 3) if shape[a] > 1] or [0]))
        counts = [n for n in (2, 3, 4) if shape[axis] % n == 0]
        if not counts:
            return
        count = int(self.rng.choice(counts))
        part = tuple(size // count if i == axis else size for i, size in enumerate(shape))

        def run(F, convolution, t, p):
            found = F.SliceChannel(t[x], num_outputs=count, axis=axis)
            return [found[k] for k in range(count)]

        outputs = self._step([x], [part] * count, [], run, "operators with several outputs")
        if self._chance(0.7):
            self._convolution(outputs[int(self.rng.integers(1, count))])

    def _statistics(self) -> None:
        """Add a normalisation whose averages are outputs, too."""
        x = self._pick_to_normalise()
        shape = self.program.shapes[x]
        names, run = self._normal(x, shape[1], statistics=True)
        self._step([x], [shape, shape], names, run, "normalisation with its averages")
        self.program.features["operators with several outputs"] += 1

    def _recurrent(self) -> None:
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        size = int(self.rng.integers(1, 4))
        count = size * channels + size * size + 2 * size
        w, state = self._parameter("r", (count,)), self._parameter("s", (1, batch, size))

        def run(F, convolution, t, p):
            steps = F.transpose(F.reshape(t[x], shape=(0, 0, -1)), axes=(2, 0, 1))
            found = F.RNN(
                steps, p[w], p[state], state_size=size, num_layers=1, mode="rnn_tanh",
                state_outputs=True,
            )  # fmt: skip
            back = F.reshape(F.transpose(found[0], axes=(1, 2, 0)), shape=(0, 0, height, width))
            return [back, F.reshape(F.transpose(found[1], axes=(1, 2, 0)), shape=(0, 0, 1, 1))]

        shapes = [(batch, size, height, width), (batch, size, 1, 1)]
        outputs = self._step([x], shapes, [w, state], run, "recurrent layers with their state")
        self.program.features["operators with several outputs"] += 1
        self._convolution(outputs[1])

    # --- control flow

    def _loop(self) -> None:
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        w = self._parameter("w", (channels, channels, 3, 3))
        inside, name = self._chance(0.7), self._name("c")
        keywords = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels, "no_bias": True}

        def run(F, convolution, t, p):
            def body(step, states):
                y = F.reshape(step, shape=(1, channels, height, width)) + states[0]
                if inside:
                    y = convolution(F)(y, p[w], name=name, **keywords)
                return F.reshape(y, shape=(channels, height, width)), [F.tanh(y)]

            state = F.slice_axis(t[x], axis=0, begin=0, end=1)
            found, states = F.contrib.foreach(body, t[x], [state])
            if not inside:
                found = convolution(F)(found, p[w], name=name, **keywords)
            return [F.reshape(found, shape=(-1, channels, height, width)), states[0]]

        shapes = [(batch, channels, height, width), (1, channels, height, width)]
        self._step([x], shapes, [w], run, "control flow")
        if inside:
            self.program.features["convolutions inside control flow"] += 1
        self.program.features["operators with several outputs"] += 1

    # --- the rest

    def _normal(self, x: int, channels: int, statistics: bool) -> tuple[list[str], Run]:
        names = [self._parameter(kind, (channels,)) for kind in ("gamma", "beta")]
        names += [self._parameter(kind, (channels,), True) for kind in ("mean", "var")]
        gamma, beta, mean, variance = names
        fix, epsilon = self._chance(0.5), float(self.rng.choice([1e-3, 1e-5]))
        label = self._name("n")

        def run(F, convolution, t, p):
            given = (t[x], p[gamma], p[beta], p[mean], p[variance])
            found = F.BatchNorm(
                *given, fix_gamma=fix, eps=epsilon, output_mean_var=statistics, name=label
            )
            if not statistics:
                return found
            spread = F.broadcast_add(t[x], F.reshape(found[1], shape=(1, -1, 1, 1)))
            return [found[0], F.broadcast_mul(spread, F.reshape(found[2], shape=(1, -1, 1, 1)))]

        return names, run

    def _pick_to_normalise(self) -> int:
        """Pick an array with several values per channel; a variance of few magnifies roundings."""
        x = self._pick()
        batch, _, height, width = self.program.shapes[x]
        return x if batch * height * width >= 16 else 0

    def _normalisation(self) -> None:
        x = self._pick_to_normalise()
        shape = self.program.shapes[x]
        names, run = self._normal(x, shape[1], statistics=False)
        self._step([x], [shape], names, run, "normalisation")

    def _activation(self) -> None:
        x, kind = self._pick(), int(self.rng.integers(4))

        def run(F, convolution, t, p):
            if kind == 0:
                return F.clip(t[x], -0.5, 1.0)
            if kind == 1:
                return F.Activation(t[x], act_type="sigmoid")
            return F.Activation(t[x], act_type="relu")

        self._step([x], [self.program.shapes[x]], [], run, "activations")

    def _pooling(self) -> None:
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        whole = self._chance(0.2)
        kernel = tuple(int(self.rng.integers(1, min(4, s + 1))) for s in (height, width))
        stride = tuple(int(self.rng.integers(1, 3)) for _ in range(2))
        kind = ["max", "avg"][int(self.rng.integers(2))]
        out = [(s - k) // t + 1 for s, k, t in zip((height, width), kernel, stride)]

        def run(F, convolution, t, p):
            if whole:
                return F.Pooling(t[x], global_pool=True, pool_type=kind, kernel=(1, 1))
            return F.Pooling(t[x], kernel=kernel, stride=stride, pool_type=kind)

        shape = (batch, channels, *((1, 1) if whole else out))
        self._step([x], [shape], [], run, "pooling")

    def _binary(self, operators: list[str], feature: str) -> None:
        x = self._pick()
        others = self._pick_like(x, lambda a, b: a == b)
        if not others:
            return
        y = others[int(self.rng.integers(len(others)))]
        operator = operators[int(self.rng.integers(len(operators)))]
        self._step(
            [x, y],
            [self.program.shapes[x]],
            [],
            lambda F, convolution, t, p: getattr(F, operator)(t[x], t[y]),
            feature,
        )

    def _sum(self) -> None:
        self._binary(["elemwise_add", "elemwise_add", "broadcast_add"], "sums")

    def _product(self) -> None:
        self._binary(["elemwise_mul", "broadcast_mul"], "products")

    def _concatenation(self) -> None:
        x = self._pick()
        others = self._pick_like(x, lambda a, b: (a[0], *a[2:]) == (b[0], *b[2:]))
        if not others:
            return
        y = others[int(self.rng.integers(len(others)))]
        batch, channels, height, width = self.program.shapes[x]
        shape = (batch, channels + self.program.shapes[y][1], height, width)
        run: Run = lambda F, convolution, t, p: F.Concat(t[x], t[y], dim=1)  # noqa: E731
        self._step([x, y], [shape], [], run, "concatenations")

    def _slice(self) -> None:
        x = self._pick()
        shape = self.program.shapes[x]
        axis = int(self.rng.integers(1, 4))
        begin = int(self.rng.integers(shape[axis]))
        end = int(self.rng.integers(begin + 1, shape[axis] + 1))
        part = tuple(end - begin if i == axis else size for i, size in enumerate(shape))
        run: Run = lambda F, convolution, t, p: F.slice_axis(  # noqa: E731
            t[x], axis=axis, begin=begin, end=end
        )
        self._step([x], [part], [], run, "slices")

    def _identity(self) -> None:
        x = self._pick()
        infinity = float("inf")
        kind = int(self.rng.integers(3))

        def run(F, convolution, t, p):
            # Two of them look like guards.
            if kind == 0:
                return F.clip(t[x], -infinity, infinity)
            return F.reshape(t[x], shape=(-2,)) if kind == 1 else F.identity(t[x])

        self._step([x], [self.program.shapes[x]], [], run, "identities")

    def _same_name(self) -> None:
        """Add a node of another kind with the name of an earlier one, or of one that we might
        add."""
        x = self._pick()
        if not self.program.names:
            return
        name = self.program.names[int(self.rng.integers(len(self.program.names)))]
        name += ["", "_conv", "_plain", "_data"][int(self.rng.integers(4))]
        run: Run = lambda F, convolution, t, p: F.Activation(  # noqa: E731
            t[x], act_type="relu", name=name
        )
        self._step([x], [self.program.shapes[x]], [], run, "names that clash")

    def _zeros(self) -> None:
        """Return zeros whose batch is inferred, through a convolution, from the array it is added
        to."""
        x = self._pick()
        batch, channels, height, width = self.program.shapes[x]
        w = self._parameter("w", (channels, channels, 3, 3))
        name, program = self._name("c"), self.program

        def run(F, convolution, t, p):
            rows = 0 if "symbol" in F.__name__ else batch
            state = F.zeros(shape=(rows, channels, height, width), dtype=program.dtype)
            y = convolution(F)(
                state, p[w], kernel=(3, 3), pad=(1, 1), num_filter=channels, no_bias=True, name=name
            )
            return t[x] + y

        self._step([x], [(batch, channels, height, width)], [w], run, "shapes known from outputs")

    def _choose_heads(self) -> None:
        program, rng = self.program, self.rng
        last = len(program.shapes) - 1
        used = {number for step in program.steps for number in step.inputs}
        ends = [n for n in range(1, last + 1) if n not in used]
        more = [int(rng.integers(1, last + 1)) for _ in range(int(rng.integers(0, 3)))]
        program.heads = list(dict.fromkeys([*ends, *more]))
        if len(program.heads) > 1:
            program.features["several heads"] += 1


# --- running a program


class Values:
    """Data, parameters and gradients of the outputs for a program, in NumPy."""

    def __init__(self, program: Program) -> None:
        rng = program.rng

        def random(shape: Shape, scale: float = 1.0) -> np.ndarray:
            return (rng.standard_normal(shape) * scale).astype(program.dtype)

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

    def as_type(self, dtype: str) -> Values:
        """Return the same values in another dtype."""
        other = copy.copy(self)
        other.data = [x.astype(dtype) for x in self.data]
        other.heads = [x.astype(dtype) for x in self.heads]
        other.parameters = {name: value.astype(dtype) for name, value in self.parameters.items()}
        other.averages = {name: value.astype(dtype) for name, value in self.averages.items()}
        return other

    def nearby(self, seed: int) -> Values:
        """Return values that differ in their last bits."""
        rng = np.random.default_rng(seed)

        def near(x: np.ndarray) -> np.ndarray:
            return (x * (1 + 4 * np.finfo(x.dtype).eps * rng.choice([-1, 1], x.shape))).astype(
                x.dtype
            )

        other = copy.copy(self)
        other.data = [near(x) for x in self.data]
        other.parameters = {name: near(value) for name, value in self.parameters.items()}
        return other


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


def _arrays(mx: Any, values: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: mx.nd.array(value, dtype=value.dtype) for name, value in values.items()}


def _numpy(mx: Any, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    # MXNet does not always tell readers of averages that an update is pending.
    mx.nd.waitall()
    return {name: array.asnumpy() for name, array in arrays.items()}


def imperative(
    mx: Any, program: Program, values: Values, convolution: Any, request: str = "write"
) -> Results:
    def run(data: Any) -> list[Any]:
        arrays = program.evaluate(mx.nd, convolution, data, {**parameters, **averages})
        return [arrays[number] for number in program.heads]

    parameters, averages = _arrays(mx, values.parameters), _arrays(mx, values.averages)
    inference = [[y.asnumpy() for y in run(mx.nd.array(x, dtype=x.dtype))] for x in values.data]
    data = mx.nd.array(values.data[0], dtype=program.dtype)
    inputs = {"data": data, **parameters}
    for array in inputs.values():
        array.attach_grad(request)
    for _ in range(1 + program.adds):
        with mx.autograd.record():
            heads = run(data)
        mx.autograd.backward(heads, [mx.nd.array(g, dtype=g.dtype) for g in values.heads])
    outputs = [y.asnumpy() for y in heads]
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
            shapes = {"data": values.data[0].shape}
            # Other shapes are inferred, except those of recurrent layers and computed weights.
            shapes.update((n, a.shape) for n, a in arrays.items() if n[0] in "rswb")
            executor = symbol.simple_bind(
                mx.cpu(), grad_req=grad_req, type_dict=types, **shapes, **options
            )
            executor.copy_params_from(arrays, auxiliary)
            gradients = executor.grad_dict
        else:
            gradients = {name: mx.nd.zeros_like(a) for name, a in arrays.items()}
            given = None if grad_req == "null" else gradients
            executor = symbol.bind(mx.cpu(), arrays, given, grad_req, auxiliary, **options)
        return executor, gradients

    executor, _ = bind("null")
    inference = []
    for x in values.data:
        outputs = executor.forward(is_train=False, data=mx.nd.array(x, dtype=x.dtype))
        inference.append([y.asnumpy() for y in outputs])
    executor, gradients = bind(program.request)
    for gradient in gradients.values():
        gradient[:] = 0
    for _ in range(1 + program.adds):
        outputs = [y.asnumpy() for y in executor.forward(is_train=True)]
        executor.backward([mx.nd.array(g, dtype=g.dtype) for g in values.heads])
    return Results(inference, outputs, _numpy(mx, gradients), _numpy(mx, executor.aux_dict))


def make_block(mx: Any, program: Program, convolution: Any, depth: int) -> Any:
    """Return the program as nested blocks of a few steps each."""

    class Part(mx.gluon.HybridBlock):
        """Some steps, and a child with the rest."""

        def __init__(self, first: int) -> None:
            super().__init__(prefix="")
            cut = len(program.steps) if first >= depth else None
            size = -(-len(program.steps) // (depth + 1))
            self._first = first * size
            self._steps = program.steps[first * size : cut or (first + 1) * size]
            self._taken = sorted({n for step in program.steps[first * size :] for n in step.inputs})
            made = {n for step in program.steps[first * size :] for n in step.outputs}
            passed = {n for n in (*self._taken, *program.heads) if n not in made}
            self.taken = sorted(passed) if first else [0]
            names = {name for step in self._steps for name in step.parameters}
            for name in sorted(names):
                shape = {**program.parameters, **program.averages}[name]
                request = "null" if name in program.averages else program.request
                parameter = _shared_parameter(self, name, shape, {"grad_req": request})
                setattr(self, name, parameter)
            self._names = names
            if cut is None:
                self.child = Part(first + 1)

        def hybrid_forward(self, F, *arrays, **parameters):
            known = dict(zip(self.taken, arrays))
            program.evaluate(F, convolution, known, parameters, self._steps)
            if len(self._children):
                return self.child(*(known[number] for number in self.child.taken))
            return [known[number] for number in program.heads]

    shared: dict[str, Any] = {}

    def _shared_parameter(block: Any, name: str, shape: Shape, options: dict[str, str]) -> Any:
        if name not in shared:
            shared[name] = block.params.get(
                name, shape=shape, dtype=program.dtype, allow_deferred_init=True, **options
            )
        return shared[name]

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
                shared[name].set_data(mx.nd.array(value, dtype=value.dtype))

    fill()
    block.hybridize(**static)

    def run(data: Any) -> list[Any]:
        found = block(data)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    inference = []
    for x in values.data:
        # Repeated calls take other code paths.
        for _ in range(_CALLS):
            found = run(mx.nd.array(x, dtype=x.dtype))
        inference.append([y.asnumpy() for y in found])
    data = mx.nd.array(values.data[0], dtype=program.dtype)
    data.attach_grad(program.request)
    for _ in range(1 + program.adds):
        with mx.autograd.record():
            heads = run(data)
        mx.autograd.backward(heads, [mx.nd.array(g, dtype=g.dtype) for g in values.heads])
    outputs = [y.asnumpy() for y in heads]
    with_gradients = [name for name in values.parameters if name in shared]
    gradients = {"data": data.grad, **{name: shared[name].grad() for name in with_gradients}}
    averages = {name: shared[name].data() for name in values.averages if name in shared}
    results = Results(inference, outputs, _numpy(mx, gradients), _numpy(mx, averages))
    fill()
    return results, block


def exported(mx: Any, program: Program, values: Values, block: Any) -> list[list[np.ndarray]]:
    """Return the outputs of the block after it is saved and loaded."""
    block(mx.nd.array(values.data[0], dtype=program.dtype))
    with tempfile.TemporaryDirectory() as folder:
        block.export(str(Path(folder) / "net"))
        again = mx.gluon.SymbolBlock.imports(
            str(Path(folder) / "net-symbol.json"), ["data"], str(Path(folder) / "net-0000.params")
        )
    found = []
    for x in values.data:
        heads = again(mx.nd.array(x, dtype=x.dtype))
        heads = heads if isinstance(heads, (list, tuple)) else [heads]
        found.append([y.asnumpy() for y in heads])
    return found


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
    lock = threading.Lock()

    def note(seed: int, lines: list[str], features: dict[str, int]) -> None:
        with lock:
            wrong.extend(f"graph {seed}: {line}" for line in lines)
            coverage.update(features)
            coverage["graphs"] += 1
            if progress is not None and (lines or coverage["graphs"] % 100 == 0):
                progress(
                    "".join(f"graph {seed}: {line}\n" for line in lines)
                    + f"{coverage['graphs']} of {count}, {len(wrong)} wrong"
                )

    def drive(job: int) -> None:
        with programs.Worker(MOST_SECONDS) as worker:
            for seed in range(first + count * job // jobs, first + count * (job + 1) // jobs):
                note(seed, *_beside_native(worker, seed))

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(drive, range(jobs)))
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
