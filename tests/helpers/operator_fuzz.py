"""Random chains of operators through `to_gpu` in the emulator, beside MXNet on the CPU.

python tests/helpers/operator_fuzz.py --cases 500 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import random
import sys

import numpy as np

import ece408_op
from ece408_op import settings
from ece408_op.operator.loading import load_mxnet

BELOW = 1e-5


def _kernel(rng, axes):
    return {
        "kernel": tuple(rng.randint(1, 3) for _ in range(axes)),
        "stride": tuple(rng.randint(1, 3) for _ in range(axes)),
        "pad": tuple(rng.randint(0, 1) for _ in range(axes)),
    }


def _axis(rng, shape):
    return rng.randint(-len(shape), len(shape) - 1)


def _reshaped(rng, shape):
    codes = [[0] * len(shape), [0, -1], [-1, shape[-1]], [-3, -2], [0, -3, -2], [-1], [1, -1]]
    return tuple(rng.choice(codes))


def _operators(sym):
    """By name what makes a node of random attributes on an array of a shape."""

    def named(function):
        return lambda rng, x, shape: function(x)

    def layer(function, **options):
        def make(rng, x, shape):
            axes = max(1, len(shape) - 2)
            windows = _kernel(rng, axes)
            return function(x, **windows, **{k: v(rng) for k, v in options.items()})

        return make

    def over_axes(function):
        def make(rng, x, shape):
            count = rng.randint(1, len(shape))
            axes = tuple(rng.sample(range(-len(shape), 0), count))
            return function(x, axis=axes, keepdims=rng.choice([True, False]))

        return make

    def two(function):
        def make(rng, x, shape):
            other = tuple(rng.choice([1, size]) for size in shape)
            return function(x, sym.Variable(f"other{rng.randint(0, 10**9)}", shape=other))

        return make

    def dense(rng, x, shape):
        return sym.FullyConnected(
            x, num_hidden=rng.randint(1, 9), flatten=rng.choice([True, False])
        )

    def concat(rng, x, shape):
        return sym.concat(x, dense(rng, x, shape) if rng.random() < 0.3 else x * 2, x,
                          dim=_axis(rng, shape))  # fmt: skip

    def norm(rng, x, shape):
        fixed = rng.choice([True, False])
        return sym.BatchNorm(x, axis=_axis(rng, shape), fix_gamma=fixed, eps=1e-3)

    def label(rng, x, shape):
        if len(shape) < 2:  # its label has no axes, which no array of MXNet's has
            raise ValueError
        options = rng.choice([{}, {"multi_output": True}, {"preserve_shape": True}])
        return sym.SoftmaxOutput(x, **options)

    def transposed(rng, x, shape):
        return sym.transpose(x, axes=tuple(rng.sample(range(len(shape)), len(shape))))

    def cut(rng, x, shape):
        axis = _axis(rng, shape)
        begin = rng.randint(0, shape[axis] - 1)
        return sym.slice_axis(x, axis=axis, begin=begin, end=rng.choice([None, begin + 1]))

    def parts(rng, x, shape):
        axis = _axis(rng, shape)
        counts = [n for n in (2, 3, 5) if shape[axis] % n == 0]
        count = rng.choice(counts or [1])
        return sym.split(x, axis=axis, num_outputs=count, squeeze_axis=count == shape[axis])[0]

    def leaky(rng, x, shape):
        kind = rng.choice(["leaky", "elu", "selu", "gelu", "prelu"])
        return sym.LeakyReLU(x, act_type=kind, slope=rng.choice([0.1, 0.25]))

    kinds = ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    found = {
        name: named(getattr(sym, name)) for name in ("relu", "tanh", "abs", "square", "Flatten")
    }
    found |= {
        name: two(getattr(sym, f"broadcast_{name}")) for name in ("add", "sub", "mul", "maximum")
    }
    found |= {name: over_axes(getattr(sym, name)) for name in ("mean", "sum", "max")}
    return found | {
        "Convolution": layer(sym.Convolution, num_filter=lambda rng: rng.randint(1, 9)),
        "Pooling": layer(
            sym.Pooling,
            pool_type=lambda rng: rng.choice(["max", "avg", "sum"]),
            global_pool=lambda rng: rng.random() < 0.3,
            pooling_convention=lambda rng: rng.choice(["valid", "full"]),
            count_include_pad=lambda rng: rng.choice([True, False]),
        ),
        "FullyConnected": dense,
        "concat": concat,
        "BatchNorm": norm,
        "SoftmaxOutput": label,
        "softmax": lambda rng, x, shape: sym.softmax(x, axis=_axis(rng, shape)),
        "log_softmax": lambda rng, x, shape: sym.log_softmax(x, axis=_axis(rng, shape)),
        "transpose": transposed,
        "swapaxes": lambda rng, x, shape: sym.swapaxes(
            x, dim1=_axis(rng, shape), dim2=_axis(rng, shape)
        ),
        "slice_axis": cut,
        "split": parts,
        "expand_dims": lambda rng, x, shape: sym.expand_dims(x, axis=_axis(rng, shape)),
        "squeeze": named(sym.squeeze),
        "reshape": lambda rng, x, shape: sym.reshape(x, shape=_reshaped(rng, shape)),
        "clip": lambda rng, x, shape: sym.clip(x, rng.uniform(-1, 1), rng.uniform(-1, 1)),
        "LeakyReLU": leaky,
        "Activation": lambda rng, x, shape: sym.Activation(x, act_type=rng.choice(kinds)),
        "L2": lambda rng, x, shape: x / (1 + sym.abs(x)),
        "residual": lambda rng, x, shape: x + sym.tanh(x),
        "sort": lambda rng, x, shape: sym.sort(x, axis=_axis(rng, shape)),
    }


def chain(mx, rng):
    """A random Symbol that MXNet can infer, the shape of its data, and its operators."""
    table = _operators(mx.sym)
    while True:
        axes = rng.randint(1, 6)
        batch = rng.choice([1, 2, 3, 5, rng.randint(1, 130)])
        most = {1: 40, 2: 30, 3: 11, 4: 9, 5: 4, 6: 3}[axes]
        shape = (batch, *(rng.randint(1, most) for _ in range(axes - 1)))
        x, names = mx.sym.Variable("data"), []
        wanted = rng.randint(1, 3)
        if rng.random() < 0.3 and axes in (3, 4):
            x = table["Convolution"](rng, x, shape)
        try:
            while len(names) < wanted:
                _, outputs, _ = x.infer_shape(data=shape)
                name = rng.choice(list(table))
                x = table[name](rng, x, outputs[0])
                names.append(name)
            found, outputs, _ = x.infer_shape(data=shape)
        except (mx.MXNetError, ValueError, IndexError, TypeError):
            continue
        if len(outputs) == 1 and outputs[0] and np.prod(outputs[0]) < 1e6 and all(map(all, found)):
            return x, shape, names


def difference(mx, symbol, shape, seed):
    """The largest error beside MXNet, relative to the largest value; `None` where MXNet raises."""
    values = np.random.default_rng(seed)
    arguments, _, states = symbol.infer_shape(data=shape)
    every = {
        name: mx.nd.array(values.standard_normal(size))
        for name, size in zip(symbol.list_arguments(), arguments)
    }
    aux = {
        name: mx.nd.array(values.uniform(0.5, 1.5, size))
        for name, size in zip(symbol.list_auxiliary_states(), states)
    }
    try:
        (expected,) = symbol.bind(mx.cpu(), every, aux_states=aux).forward(is_train=False)
        expected = expected.asnumpy()
    except mx.MXNetError:
        return None
    given = {name: each for name, each in every.items() if not name.endswith("label")}
    data = given.pop("data")
    network = ece408_op.to_gpu(symbol, given, aux)
    for _ in range(2):
        found = network(data).asnumpy()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not np.isfinite(expected).all():
        return 0.0
    return float(np.abs(found - expected).max() / max(1e-6, np.abs(expected).max()))


def run(seed, cases, progress=False):
    """Texts of what was wrong or raised, and how often each operator was computed."""
    mx = load_mxnet()
    rng, wrong, counts = random.Random(seed), [], collections.Counter()
    with settings.override(backend="emulator"):
        for number in range(cases):
            symbol, shape, names = chain(mx, rng)
            try:
                found = difference(mx, symbol, shape, number)
            except Exception as error:
                found = f"{type(error).__name__}: {str(error)[:300]}"
            if isinstance(found, str) or (found is not None and found > BELOW):
                wrong.append(f"seed {seed}, case {number}, {shape}, {names}: {found}")
            counts.update(names if found is not None else ())
            if progress and (number + 1) % 20 == 0:
                print(f"{number + 1} of {cases}, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return wrong, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    wrong, counts = run(asked.seed, asked.cases, progress=True)
    print("\n".join([*wrong, *(f"{name}: {count}" for name, count in sorted(counts.items()))]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
