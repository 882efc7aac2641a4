"""Kernels of training in the emulator, against float64 and the CPU's steps."""

import ctypes
import itertools
import math

import numpy as np
import pytest
from one_plan import on_gpu

from ece408_op.backends.cpu import native, program
from ece408_op.network.builder import Batch, Windows
from ece408_op.network.machines.cpu_steps import CpuSteps
from ece408_op.network.machines.emulated import emulated
from ece408_op.network.values import ARENA, Buffer, Value

pytestmark = pytest.mark.usefixtures("emulated")

# Images, channels and pixels: one split with and without vectors, several splits, channels last,
# and one of each.
SHAPES = [(3, 2, 44), (2, 5, 49), (1, 3, 1), (7, 1, 1400), (2, 2, 2099), (300, 11, 1), (1, 2, 8)]
WINDOWS = [((2, 3), (2, 1), (1, 1)), ((3, 3), (2, 2), (1, 0)), ((2, 1), (3, 4), (0, 0))]
LOST = (np.nan, -np.inf, np.inf)
EPSILON, BELOW = 1e-2, 3e-6
# Arrays of a GPU's steps, for at most 16 channels.
ALONE = ("factor", "addend", "zeros", "new_mean", "new_variance", "moving_mean", "moving_variance")
ALONE = dict.fromkeys(ALONE, np.zeros(16, np.float32))


def _on_cpu(plan, read, made):
    """Compute a plan of the CPU's from arrays by name, into those in `made`."""
    arrays = {**read, **made}
    numbers = {name: number for number, name in enumerate(arrays)}

    def places(names, count):
        found = [numbers.get(name, -1) for name in (*names, *[""] * count)[:count]]
        return b"".join(program.PLACE.pack(0, 0, number, 0) for number in found)

    inputs, also = places(plan.inputs, program.MOST_INPUTS), places(plan.also, program.MOST_ALSO)
    step = program.steps_of([(plan.kind, inputs, places(["y"], 1), also, plan.of)])
    bases = (ctypes.c_void_p * len(arrays))(*(each.ctypes.data for each in arrays.values()))
    program.run(step, 1, bases, 1, native.isas()[0])
    return made


def _computed(name, arguments, read, made, offset=0):
    """Return arrays of the shapes in `made`, as a GPU's step and as the CPU's computes them."""
    gpu, cpu = emulated().lowering("float32"), CpuSteps(native.isas()[0], False)
    empty = {each: np.full(shape, np.nan, np.float32) for each, shape in made.items()}
    found = on_gpu(getattr(gpu, name)(*arguments), {**ALONE, **read, **empty}, offset)
    expected = _on_cpu(getattr(cpu, name)(*arguments), read, empty)
    return {each: found[each] for each in made}, expected


def _value(*shape):
    return Value(Buffer(ARENA, 4 * math.prod(shape)), shape)


def _normalised(batch, scaled, adds, x, rng, offset=0):
    """Return the results of normalisation and its gradient, each as by the GPU, by the CPU and in
    float64."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    of_x, of_channels = x.shape, (batch.channels,)
    read = {"x": x, "beta": normal(*of_channels)}
    read |= {"gamma": normal(*of_channels)} if scaled else {}
    read |= {"added": normal(*of_x)} if adds else {}
    made = {"y": of_x, "mean": of_channels, "inverse": of_channels}
    forward = _computed("norm", (batch, read), read, made, offset)
    given = {**read, **{each: forward[1][each] for each in ("mean", "inverse")}}
    factor = given["inverse"] * read.get("gamma", np.float32(1))
    given |= {"dy": normal(*of_x), "factor": factor, "addend": read["beta"]}
    given |= {"positive": forward[1]["y"]} if batch.is_relu else {}
    made = {"y": of_x, "dgamma": of_channels, "dbeta": of_channels}
    made |= {"dadded": of_x} if adds else {}
    backward = _computed("norm_gradient", (batch, {*given, *made}), given, made, offset)
    with np.errstate(invalid="ignore"):
        exact = _exact(batch, given)
    return (*forward, exact[0]), (*backward, exact[1])


def _exact(batch, arrays):
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    axes, each, count = (0, 2), (slice(None), None), batch.images * batch.pixels
    mean = wide["x"].mean(axes)
    inverse = 1 / np.sqrt(wide["x"].var(axes) + batch.epsilon)
    whitened, gamma = (wide["x"] - mean[each]) * inverse[each], wide.get("gamma", 1 + 0 * mean)
    y = whitened * gamma[each] + wide["beta"][each] + wide.get("added", 0)
    lowest, highest = batch.bounds or (0 if batch.is_relu else -np.inf, np.inf)
    dy = np.where((y < lowest) | (y > highest), 0, wide["dy"])
    dbeta, dgamma = dy.sum(axes), (dy * whitened).sum(axes)
    dx = (dy - (dbeta[each] + whitened * dgamma[each]) / count) * (gamma * inverse)[each]
    forward = {"y": np.clip(y, lowest, highest), "mean": mean, "inverse": inverse}
    return forward, {"y": dx, "dgamma": dgamma, "dbeta": dbeta, "dadded": dy}


def test_normalisation_and_its_gradient(rng):
    # Whether it adds, relu, and bounds.
    kinds = [(False, False), (False, True), (True, True), (False, False, (-0.25, 0.75))]
    cases = [(of, adds, Batch(*of, EPSILON, *kind)) for of in SHAPES for adds, *kind in kinds]
    gpu, names = emulated().lowering("float32"), ((), ("added", "dadded"))
    steps = (gpu.norm, gpu.norm_gradient)
    emulated().load([step(of, names[adds]) for _, adds, of in cases for step in steps])
    for number, (shape, adds, batch) in enumerate(cases):
        x = rng.standard_normal(shape).astype(np.float32) + 2
        scaled, offset = number % 3 > 0, 4 * (number % 2)
        for gpu, cpu, exact in _normalised(batch, scaled, adds, x, rng, offset):
            for name, found in gpu.items():
                # Terms may cancel.
                terms = math.sqrt(x[:, 0].size) if name in ("dgamma", "dbeta") else 1
                most = BELOW * max(np.abs(exact[name]).max(), terms)
                for right in exact[name], exact[name] if batch.bounds else cpu[name]:
                    np.testing.assert_allclose(found, right, rtol=0, atol=most, err_msg=name)


@pytest.mark.slow
def test_a_small_deviation_beside_a_large_mean(rng):
    """The error is at most the CPU's and that of a rounded mean; also with a first element that is
    far away, and where all are equal."""
    for kind, shape in itertools.product(("plain", "first", "equal"), ((4, 3, 900), (2, 2, 4400))):
        x = (1000 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        if kind == "first":
            x[0, :, 0] = -1e4
        if kind == "equal":
            x[:] = 1e6 + 1
        for gpu, cpu, exact in _normalised(Batch(*shape, 1e-5, False), True, False, x, rng):
            for name, found in gpu.items():
                error, own = (np.abs(each - exact[name]).max() for each in (found, cpu[name]))
                assert error <= 1.5 * own + 1e-6 * np.abs(exact[name]).max(), (kind, name)


def test_elements_that_are_not_finite(rng):
    for shape in ((3, 4, 44), (3, 4, 2099), (300, 4, 1)):
        x = rng.standard_normal(shape).astype(np.float32)
        for channel, lost in enumerate(LOST):
            x[-1 if channel else 0, channel, 0] = lost
        for gpu, cpu, _ in _normalised(Batch(*shape, EPSILON, True), True, True, x, rng):
            for name, found in gpu.items():
                np.testing.assert_allclose(found, cpu[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_parts_of_more_channels(rng):
    """The results are those of whole arrays; dx is added to the array in its place."""
    gpu, vectors = emulated().lowering("float32"), ("mean", "inverse", "factor", "addend", "beta")
    plans = []
    for images, channels, pixels in SHAPES:
        batch = Batch(images, channels, pixels, EPSILON, True)
        x_apart = batch._replace(x_image=(channels + 3) * pixels)
        apart = x_apart._replace(y_image=(channels + 1) * pixels)
        norms = gpu.norm(x_apart, ()), gpu.norm(batch, ())
        plans.append((*norms, gpu.norm_gradient(batch, ()), gpu.norm_gradient(apart, ("onto",))))
    emulated().load([plan for each in plans for plan in each])
    for shape, (norm_apart, norm, gradient, gradient_apart) in zip(SHAPES, plans):
        channels = shape[1]
        sizes = dict.fromkeys((*vectors, "dgamma", "dbeta"), channels)
        sizes |= dict.fromkeys(("x", "y", "dy"), shape)
        normal = {each: rng.standard_normal(of).astype(np.float32) for each, of in sizes.items()}
        whole, parts = {**ALONE, **normal}, {**ALONE, **normal}
        for each, more in (("x", 3), ("y", 3), ("dy", 1)):
            parts[each] = np.pad(whole[each], ((0, 0), (0, more), (0, 0)), constant_values=np.nan)
        y = on_gpu(norm_apart, {**whole, "x": parts["x"]})["y"]
        np.testing.assert_array_equal(y, on_gpu(norm, whole)["y"])
        added = whole["y"] + on_gpu(gradient, whole)["y"]
        dx = on_gpu(gradient_apart, parts)["y"]
        np.testing.assert_allclose(dx[:, :channels], added, rtol=1e-6, atol=1e-6)
        assert np.isnan(dx[:, channels:]).all()


def _pooled(kind, border, kernel, stride, pad, full, x):
    """Return windows on x, and what they make of it on the CPU."""
    windows = Windows(kind, border, kernel, stride, pad)
    sizes = zip(x.shape[2:], kernel, stride, pad)
    outs = [(n + 2 * p - k + (s - 1) * full) // s + 1 for n, k, s, p in sizes]
    y = np.empty((*x.shape[:2], *outs), np.float32)
    plan = CpuSteps(native.isas()[0], False).pool(_value(*x.shape), _value(*y.shape), windows)
    return windows, _on_cpu(plan, {"x": x}, {"y": y})["y"]


def test_gradients_of_pooling(rng):
    """Many elements are equal; some windows are cut or empty, or are the whole plane."""
    cases, shape = [], (2, 3, 9, 11)
    every = enumerate((*WINDOWS, (shape[2:], (1, 1), (0, 0)), *LARGE))
    for (number, window), kind in itertools.product(every, ("max", "avg", "sum")):
        x = rng.integers(-2, 3, shape).astype(np.float32)
        x[1, 0] = np.where(x[1, 0] > 0, rng.choice(LOST, x[1, 0].shape), x[1, 0])
        x[1, 1] = LOST[number % 2]
        windows, y = _pooled(kind, bool(number % 2), *window, True, x)
        dy = rng.integers(-9, 10, y.shape).astype(np.float32)
        arguments = (_value(*shape), _value(*y.shape), windows)
        cases.append((arguments, {"x": x, "pooled": y, "dy": dy}))
    gradient = emulated().lowering("float32").pool_gradient
    emulated().load([gradient(*arguments) for arguments, _ in cases])
    for arguments, read in cases:
        found, expected = _computed("pool_gradient", arguments, read, {"y": shape})
        message = str(arguments[-1])
        np.testing.assert_allclose(found["y"], expected["y"], 1e-6, 1e-6, err_msg=message)


# Windows that a warp searches, and one whose elements do not fit into a byte.
LARGE = [((8, 9), (2, 1), (2, 1)), ((13, 20), (3, 3), (4, 9))]


def test_labels_as_zeros_and_ones(rng):
    labels = rng.integers(-1, 6, (3, 7)).astype(np.float32)
    labels[0, :2] = 1.5, np.nan
    found, expected = _computed("one_hot", (3, 5, 7), {"x": labels}, {"y": (3, 5, 7)})
    np.testing.assert_array_equal(found["y"], expected["y"])
