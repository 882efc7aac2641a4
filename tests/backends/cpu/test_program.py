"""Each kind of step against NumPy in float64, for all instruction sets; every number of threads
gives the same bits. Arrays are next to forbidden memory."""

import ctypes
import itertools
import math

import numpy as np
import pytest
from studies import guarded

from ece408_op.backends.cpu import native, program
from ece408_op.backends.cpu.program import Border, Kind, Operand, Pool, Read, Reduce
from ece408_op.errors import InvalidProblem, UnsupportedProblem
from ece408_op.problem import ConvProblem

# The member of `Step.of` for each kind.
MEMBERS = (
    *("convolve", "convolve", "convolve", "pointwise", "strided", "pooled", "reduced"),
    *("softmaxed", "lrn", "resized", "convolve", "pooled", "batch", "batch", "softmaxed"),
)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)
# A number of elements that is worth several threads.
MANY = 40_003


def _step(kind, inputs, out, images=None, /, **fields):
    """Return a step that reads arrays 0, 1 ... and writes the next; `images`: how far apart."""
    made, images = program.Step(kind=kind), images or {}
    for k in range(program.MOST_INPUTS):
        given = inputs[k] if k < len(inputs) else None
        made.inputs[k] = Operand()
        if given is not None:
            made.inputs[k] = Operand(12, images.get(k, 0), k, program.TYPES[given.dtype.name])
    made.out = Operand(12, images.get("out", 0), len(inputs), program.TYPES[out.dtype.name])
    member = getattr(made.of, MEMBERS[kind])
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            for k, each in enumerate(value):
                getattr(member, name)[k] = each
        else:
            setattr(member, name, value)
    return made


def _call(steps, arrays, threads, isa, timed=False):
    """Run a program; the arrays begin 12 bytes after their bases."""
    addresses = [None if a is None else a.ctypes.data - 12 for a in arrays]
    bases = (ctypes.c_void_p * len(arrays))(*addresses)
    given = (program.Step * len(steps))(*steps)
    return program.run(given, len(steps), bases, threads, isa, timed)


def _computed(step, inputs, out):
    """Yield each instruction set, and the output, the same bits for all numbers of threads."""
    side = "end" if out.size % 2 else "start"
    placed = [None if a is None else guarded.place(a, side, read_only=True) for a in inputs]
    for isa in native.isas():
        found = []
        for threads in (1, 2, 3):
            y = guarded.place(out, side)
            _call([step], [*placed, y], threads, isa)
            assert guarded.canary_intact(y, side), isa
            found.append(y)
        for y in found[1:]:
            assert y.tobytes() == found[0].tobytes(), isa
        yield isa, found[0]


def _check(step, inputs, expected, name, out=None, exact=False, error=1e-6):
    """The error is relative to the largest number; NaN and infinities are in their places."""
    out = np.full(expected.shape, np.nan, np.float32) if out is None else out
    with np.errstate(over="ignore", invalid="ignore"):
        expected = expected.astype(out.dtype)
    finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
    most = 0 if exact else error * float(finite.max(initial=0))
    for isa, y in _computed(step, inputs, out):
        np.testing.assert_allclose(y, expected, rtol=0, atol=most, err_msg=f"{name}, {isa}")


def _numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def _op(name, *arguments, p=0.0, q=0.0):
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return program.Op(program.TERMS.index(name), (ctypes.c_int32 * 4)(*padded), 0, p, q)


def _alike(count):
    return [program.Reading(1, 1, 1, Read.ALIKE)] * count


_erf = np.vectorize(math.erf)
# Operators by name: in float64, their constants, and whether they are rounded once.
OPERATORS = {
    "relu": (lambda x, p, q: np.where(x <= 0, 0, x), 0, 0, True),
    "sigmoid": (lambda x, p, q: 1 / (1 + np.exp(-x)), 0, 0, False),
    "tanh": (lambda x, p, q: np.tanh(x), 0, 0, False),
    "softsign": (lambda x, p, q: x / (1 + np.abs(x)), 0, 0, False),
    "softrelu": (lambda x, p, q: np.where(x > 20, x, np.log1p(np.exp(x))), 0, 0, False),
    "exp": (lambda x, p, q: np.exp(x), 0, 0, False),
    "log": (lambda x, p, q: np.log(x), 0, 0, False),
    "sqrt": (lambda x, p, q: np.sqrt(x), 0, 0, True),
    "square": (lambda x, p, q: x * x, 0, 0, True),
    "abs": (lambda x, p, q: np.abs(x), 0, 0, True),
    "negative": (lambda x, p, q: -x, 0, 0, True),
    "erf": (lambda x, p, q: _erf(x), 0, 0, False),
    "elu": (lambda x, p, q: np.where(x > 0, x, p * np.expm1(x)), 0.7, 0, False),
    "selu": (lambda x, p, q: p * np.where(x > 0, x, q * np.expm1(x)), 1.05, 1.67, False),
    "gelu": (lambda x, p, q: 0.5 * x * (1 + _erf(x * p)), math.sqrt(0.5), 0, False),
    "leaky": (lambda x, p, q: np.where(x > 0, x, x * p), 0.25, 0, True),
    "prelu": (lambda a, b, p, q: np.where(a > 0, a, a * b), 0, 0, True),
    "clip": (lambda x, p, q: np.where(x > q, q, np.where(x < p, p, x)), -0.5, 1, True),
    "affine": (lambda x, p, q: p * x + q, 0.3, -0.4, False),
    "constant": (lambda x, p, q: np.full(x.shape, p), 0.75, 0, True),
    "round_half": (lambda x, p, q: x.astype(np.float16), 0, 0, True),
    "add": (lambda a, b, p, q: a + b, 0, 0, True),
    "subtract": (lambda a, b, p, q: a - b, 0, 0, True),
    "multiply": (lambda a, b, p, q: a * b, 0, 0, True),
    "divide": (lambda a, b, p, q: a / b, 0, 0, True),
    "plus": (lambda x, p, q: x + p, 0.75, 0, True),
    "minus": (lambda x, p, q: x - p, 0.75, 0, True),
    "minus_from": (lambda x, p, q: p - x, 0.75, 0, True),
    "times": (lambda x, p, q: x * p, 0.75, 0, True),
    "over": (lambda x, p, q: x / p, 0.75, 0, True),
    "over_from": (lambda x, p, q: p / x, 0.75, 0, True),
    "maximum": (lambda x, p, q: np.where(x <= p, p, x), 0.25, 0, True),
    "minimum": (lambda x, p, q: np.where(x >= p, p, x), 0.25, 0, True),
    "power": (lambda x, p, q: np.power(x, p), 1.5, 0, False),
    "inverse_deviation": (lambda x, p, q: 1 / np.sqrt(x + p), 1e-9, 0, True),
    "scaled_deviation": (lambda a, b, p, q: b / np.sqrt(a + p), 1e-9, 0, True),
    "multiply_add": (lambda a, b, c, p, q: a * b + c, 0, 0, False),
    "subtract_product": (lambda a, b, c, p, q: a - b * c, 0, 0, False),
    "shifted": (lambda a, b, c, d, p, q: a + (d - b) * c, 0, 0, False),
    "where": (lambda a, b, c, p, q: np.where(a > 0, b, c), 0, 0, True),
}


def test_operators(rng):
    """Also with exchanged constants, as bounds may be."""
    assert tuple(OPERATORS) == program.TERMS
    for name, (of, first, second, exact) in OPERATORS.items():
        count = of.__code__.co_argcount - 2
        inputs = [_numbers(rng, MANY) for _ in range(count)]
        for k, x in enumerate(inputs):
            x[k * 5 : k * 5 + 5], x[100:105], x[-5:] = SPECIAL, SPECIAL, SPECIAL[::-1]
        wide = [x.astype(np.float64) for x in inputs]
        fields = {"elements": MANY, "inputs": count, "ops": 1, "readings": _alike(count)}
        if "deviation" not in name:
            first, second = float(np.float32(first)), float(np.float32(second))
        for p, q in ((first, second), (second, first)):
            with np.errstate(all="ignore"):
                expected = of(*wide, p, q)
            op = _op(name, *range(count), p=p, q=q)
            step = _step(Kind.POINTWISE, inputs, inputs[0], **fields, op=[op])
            _check(step, inputs, expected, f"{name}, p {p}, q {q}", exact=exact)


def test_small_and_large_numbers():
    """Every number, also a small one, within some units of its own last place."""
    small = np.geomspace(1e-38, 1, 500)
    x = np.concatenate((np.linspace(-110, 95, 3001), small, -small, SPECIAL)).astype(np.float32)
    fields = {"elements": x.size, "inputs": 1, "readings": _alike(1), "ops": 1}
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cases = {"exp": np.exp(wide), "tanh": np.tanh(wide), "relu": np.where(x <= 0, 0, x)}
        cases["elu"] = np.where(wide > 0, wide, np.expm1(wide))
        cases = {name: each.astype(np.float32) for name, each in cases.items()}
    for name, expected in cases.items():
        step = _step(Kind.POINTWISE, [x], x, **fields, op=[_op(name, 0, p=1.0)])
        for isa, y in _computed(step, [x], np.empty_like(x)):
            message = f"{name}, {isa}"
            np.testing.assert_allclose(y, expected, rtol=5e-7, atol=1.5e-45, err_msg=message)
            signs = [np.signbit(each[~np.isnan(x)]) for each in (y, expected)]
            np.testing.assert_array_equal(*signs, err_msg=message)


def _stored(x, apart):
    """Return memory with x's images, `apart` elements apart, and zeros between them."""
    if not apart:
        return x
    memory = np.zeros((len(x) - 1) * apart + x[0].size, x.dtype)
    for k, image in enumerate(x):
        memory[k * apart : k * apart + image.size] = image.ravel()
    return memory


def test_readings_types_and_places_of_results(rng):
    """x * scale + shift + z * factor, where arrays have one element for each channel, and so on."""
    for number, (shape, types, apart, is_by_channels) in enumerate(
        itertools.product(
            ((3, 5, 7, 11), (1, 1, 1, 1), (2, 13, 1, 1), (5, 33, 17, 17)),
            (("float32", "float32", "float32"), ("uint8", "float16", "float16")),
            (0, 5),
            (False, True),
        )
    ):
        images, channels, height, width = shape
        per, pixels = channels * height * width, height * width
        x, z = (rng.integers(0, 9, shape).astype(types[0]) for _ in range(2))
        scale = rng.integers(0, 4, (channels, 1, 1)).astype(types[1])
        shift = (channels, 1, 1) if is_by_channels else (images, 1, 1, width)
        added = rng.integers(0, 4, shift).astype("float32")
        one = rng.integers(0, 4, (images, 1, 1, 1)).astype(types[1])
        inputs = [_stored(x, apart and per + apart), scale, added, z, one]
        out = _stored(np.full(shape, 7, types[2]), apart and per + 3)
        readings = [
            program.Reading(per, 1, per + apart, Read.IMAGES if apart else Read.ALIKE),
            by_channels := program.Reading(per * images, channels, pixels, Read.SHARED),
            by_channels if is_by_channels else program.Reading(per, width, 1, Read.SHARED),
            program.Reading(1, 1, 1, Read.ALIKE),
            program.Reading(per * images, images, per, Read.SHARED),
        ]
        places = {"out": per + 3} if apart else {}
        fields = {"elements": x.size, "per_image": per, "inputs": 5, "readings": readings}
        ops = [_op("multiply_add", 0, 1, 2), _op("multiply", 3, 4), _op("add", 5, 6)]
        step = _step(Kind.POINTWISE, inputs, out, places, ops=3, op=ops, **fields)
        wide = [a.astype(np.float64) for a in (x, scale, added, z, one)]
        expected = wide[0] * wide[1] + wide[2] + wide[3] * wide[4]
        stored = _stored(expected.astype(out.dtype), apart and per + 3)
        _check(step, inputs, stored, f"case {number}", out, exact=True)
        # Without operators the first input is copied.
        step = _step(Kind.POINTWISE, inputs, out, places, ops=0, **fields)
        copied = _stored(x.astype(out.dtype), apart and per + 3)
        _check(step, inputs, copied, f"copy {number}", out, exact=True)


def test_results_in_place_of_an_input(rng):
    x, z = _numbers(rng, 2, MANY)
    ops = [_op("add", 0, 1), _op("relu", 2), _op("subtract", 3, 0)]
    fields = {"elements": MANY, "inputs": 2, "readings": _alike(2), "ops": 3, "op": ops}
    step = _step(Kind.POINTWISE, [x, z], x, **fields)
    step.out.base = 0
    expected = np.maximum(x + z, 0) - x
    for isa, threads in itertools.product(native.isas(), (1, 2)):
        y = x.copy()
        _call([step], [y, z], threads, isa)
        np.testing.assert_array_equal(y, expected, err_msg=isa)


def _axis(rng, border):
    """Return size, first and held of an axis."""
    held = int(rng.choice([1, 2, 3, 7, 20, 33]))
    if rng.random() < 0.4:
        return held, 0, held
    if border == Border.MIRRORED:
        first, after = (int(rng.integers(0, held)) for _ in range(2))
        return held + first + after, first, held
    first = int(rng.integers(-held + 1, 4))
    return int(rng.integers(1, held + 6)), first, held


def test_copies(rng):
    for number in range(60):
        border = Border(number % 3)
        axes = [_axis(rng, border) for _ in range(int(rng.integers(1, 5)))]
        if number < 3:
            axes = [(150, 0, 150), (131, 0, 131), (5, 0, 5)]
        # Strides of x by its axes in any order, and axes along which it is repeated.
        strides, stride = [0] * len(axes), 1
        for k in rng.permutation(len(axes)) if number % 2 else range(len(axes)):
            if rng.random() < 0.8:
                strides[k], stride = stride, stride * axes[k][2]
        x, at, inside = _numbers(rng, stride), 0, True
        for k, ((size, first, held), step) in enumerate(zip(axes, strides)):
            place = np.arange(size) - first
            if border == Border.NEAREST:
                place = np.clip(place, 0, held - 1)
            if border == Border.MIRRORED:
                place = np.abs(place)
                place = np.where(place >= held, 2 * (held - 1) - place, place)
            shape = [1] * k + [size] + [1] * (len(axes) - 1 - k)
            at = at + (place * step).reshape(shape)
            inside = inside & ((place >= 0) & (place < held)).reshape(shape)
        full = np.where(inside, x[np.where(inside, at, 0)], np.float32(0.5)).T.ravel()
        padded = [(*axis, step) for axis, step in zip(axes, strides)]
        padded += [(1, 0, 1, 0)] * (program.MOST_AXES - len(axes))
        named = dict(zip(("size", "first", "held", "stride"), zip(*padded)))
        fields = {"elements": full.size, "border": border, "fill": 0.5, **named}
        _check(_step(Kind.COPY, [x], x, **fields), [x], full, f"{number}: {padded}", exact=True)


def _pooled(x, rows, columns, kind, border):
    y = np.empty((*x.shape[:2], rows.count, columns.count))
    for i, j in itertools.product(range(rows.count), range(columns.count)):
        spans = [(n * w.stride - w.pad, w) for n, w in ((i, rows), (j, columns))]
        inside = [slice(max(a, 0), max(min(a + w.kernel, w.size), 0)) for a, w in spans]
        part = x[:, :, inside[0], inside[1]].astype(np.float64)
        if kind == Pool.LARGEST:
            least = np.finfo(np.float32).min
            y[:, :, i, j] = np.fmax(part, least).max(axis=(2, 3), initial=least)
            continue
        size = math.prod(
            max(min(a + w.kernel, w.size + w.pad * border) - (a if border else max(a, 0)), 0)
            for a, w in spans
        )
        total = part.sum(axis=(2, 3))
        y[:, :, i, j] = total if kind == Pool.SUM else total / size if size else 0
    return y


def test_pooling(rng):
    shapes = [(2, 3, 9, 11), (1, 2, 8, 7), (3, 40, 13, 20), (1, 5, 35, 112), (7, 1, 16, 17)]
    windows = [None, (2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2), (2, 3, 1), (7, 7, 0), (1, 2, 2)]
    for number, (kind, border, apart) in enumerate(itertools.product(Pool, (0, 1), (0, 7))):
        shape = shapes[number % len(shapes)]
        for which, window in enumerate(windows):
            # `None` is a window of the whole plane.
            kernel, stride, pad = window or (shape[2], 1, 0)
            across = (3, 2, 1) if window else (shape[3] + 2, 3, 1)
            # The last window may begin after the plane.
            axes = [
                program.Windows(n, (n + 2 * p - k) // s + 1 + which % 2, k, s, p)
                for n, k, s, p in ((shape[2], kernel, stride, pad), (shape[3], *across))
            ]
            x = rng.integers(-50, 50, shape).astype(np.float32)
            if kind == Pool.LARGEST:
                lost = rng.choice([np.nan, -np.inf, np.inf, -0.0], shape)
                x = np.where(rng.random(shape) < 0.2, lost, x).astype(np.float32)
            expected = _pooled(x, *axes, kind, border)
            per_image = (math.prod(shape[1:]), math.prod(expected.shape[1:]))
            images = {0: per_image[0] + apart, "out": per_image[1] + apart} if apart else {}
            inputs = [_stored(x, images.get(0, 0))]
            out = _stored(np.zeros(expected.shape, np.float32), images.get("out", 0))
            fields = {"kind": kind, "border": border, "images": shape[0], "channels": shape[1]}
            step = _step(*(Kind.POOL, inputs, out, images), **fields, rows=axes[0], columns=axes[1])
            stored = _stored(expected.astype(np.float32), images.get("out", 0))
            name = f"{kind.name}, {border}, {apart}, window {kernel} {stride} {pad}"
            _check(step, inputs, stored.reshape(out.shape), name, out, exact=True)


def test_reductions(rng):
    for outer, length, inner in (
        *((1, 1, 1), (3, 7, 1), (70, 49, 1), (1, MANY, 1)),
        *((900, 50, 1), (2, 3, 5), (4, 33, 130), (1, 300, 200)),
    ):
        x = _numbers(rng, outer, length, inner)
        for kind in Reduce:
            if kind != Reduce.SUM:
                lost = rng.choice([np.nan, np.inf, -np.inf], x.shape)
                x = np.where(rng.random(x.shape) < 1 / length, lost, x).astype(np.float32)
            wide = x.astype(np.float64)
            expected = wide.max(axis=1)
            if kind == Reduce.SUM:
                expected = wide.sum(axis=1) * 0.25
            if kind == Reduce.LARGEST_NUMBER:
                expected = np.fmax(wide, np.finfo(np.float32).min).max(axis=1)
            fields = {"kind": kind, "outputs": outer * inner, "length": length, "inner": inner}
            step = _step(Kind.REDUCE, [x], x, **fields, factor=0.25)
            name = f"{kind.name} of {x.shape}"
            _check(step, [x], expected, name, exact=kind != Reduce.SUM, error=2e-7)


def test_softmax(rng):
    for outer, length, inner in ((1, 3, 1), (5, 10, 1), (50, 1000, 1), (2, 7, 5), (3, 11, 1300)):
        for logarithm, scale in itertools.product((0, 1), (1.0, 0.4)):
            x = 5 * _numbers(rng, outer, length, inner)
            x[0, 0, 0], x[-1, -1, -1] = -np.inf, np.nan if length > 7 else 100
            wide = x.astype(np.float64) * np.float32(scale)
            with np.errstate(all="ignore"):
                wide -= np.fmax.reduce(wide, axis=1, keepdims=True)
                sums = np.exp(wide).sum(axis=1, keepdims=True)
                expected = wide - np.log(sums) if logarithm else np.exp(wide) / sums
            fields = {"rows": outer * inner, "length": length, "inner": inner}
            step = _step(Kind.SOFTMAX, [x], x, **fields, logarithm=logarithm, scale=scale)
            name = f"{x.shape}, logarithm {logarithm}, scale {scale}"
            _check(step, [x], expected, name)
            for isa, y in _computed(step, [x], np.empty_like(x)):
                step.out.base, here = 0, x.copy()
                _call([step], [here], 2, isa)
                step.out.base = 1
                np.testing.assert_array_equal(here, y, err_msg=f"{name}, {isa}, in place")


def test_normalisation_over_channels(rng):
    for shape, size, beta in itertools.product(
        ((1, 1, 3), (2, 7, 35), (3, 12, 1200)), (1, 3, 5), (0.75, 0.5)
    ):
        x = 3 * _numbers(rng, *shape)
        wide, half = x.astype(np.float64), size // 2
        padded = np.pad(wide**2, ((0, 0), (half, half), (0, 0)))
        sums = sum(padded[:, k : k + shape[1]] for k in range(size))
        expected = wide * (2 + 0.1 / size * sums) ** -beta
        fields = {"elements": x.size, "channels": shape[1], "plane": shape[2], "size": size}
        step = _step(Kind.LRN, [x], x, **fields, alpha=0.1, beta=beta, knorm=2.0)
        _check(step, [x], expected, f"{shape}, size {size}, beta {beta}")


def _source(size, out, aligned):
    """Return the first pixel and the next one's share, of positions in float32."""
    i, one = np.arange(out, dtype=np.float32), np.float32(1)
    if aligned:
        at = np.float32(size - 1) / np.float32(max(out - 1, 1)) * i if out > 1 else 0 * i
    else:
        scale = np.float32(size) / np.float32(out) if out > 1 else np.float32(0)
        at = np.maximum(scale * (i + one / 2) - one / 2, 0)
    first = at.astype(int)
    return first, np.minimum(first + 1, size - 1), (at - first).astype(np.float64)


def test_resizes(rng):
    sizes = ((5, 7, 10, 14), (8, 9, 3, 4), (4, 4, 1, 1), (1, 1, 3, 2), (30, 31, 61, 90))
    for (height, width, tall, wide), aligned in itertools.product(sizes, (0, 1)):
        x = _numbers(rng, 7, height, width)
        top, bottom, down = _source(height, tall, aligned)
        left, right, part = _source(width, wide, aligned)
        rows = x[:, top] * (1 - down)[:, None] + x[:, bottom] * down[:, None]
        expected = rows[:, :, left] * (1 - part) + rows[:, :, right] * part
        fields = {"planes": 7, "height": height, "width": width, "out_height": tall}
        step = _step(Kind.RESIZE, [x], x, **fields, out_width=wide, aligned=aligned)
        _check(step, [x], expected, f"{(height, width, tall, wide)}, aligned {aligned}")


LAYERS = (
    *("b2,c9,h13,w20,m23,k3,s2x2,p1x1,bias", "b2,c40,h7,w7,m100,k1", "b3,c16,h30,w31,m32,k3,p1x1"),
    *("b2,c6,h17,w19,m6,k3,p1x1,g6,bias", "b1,c3,h9,w9,m2,k3,s3x3", "b1,c1,h64,w80,m5,k5,p2x2"),
)


def _packing(problem, w, bias, packed, isa):
    """Return a step that packs weights, and the packed array."""
    library = native.library()
    library.ece408_packed_floats.restype = ctypes.c_int64
    given = ctypes.byref(native.as_struct(problem))
    floats = library.ece408_packed_floats(given, native.ISA_CODES[isa], -1)
    packed = guarded.place(np.full(floats + 16, np.nan, np.float32), "end")
    fields = {"problem": native.as_struct(problem), "kernel": -1}
    return _step(Kind.PACK, [w, bias], packed, **fields), packed


@pytest.mark.parametrize("isa", native.isas())
def test_convolutions(isa, rng):
    """Of whole numbers, and of weights that are not finite, with packed weights and without them,
    and with epilogues that not every kernel has."""
    for text, bounds, adds, packs, strict in itertools.product(
        LAYERS, ((-np.inf, np.inf), (0.0, 6.0)), (False, True), (False, True), (0, 1)
    ):
        problem = ConvProblem.parse(text)
        shapes = (problem.x_shape, problem.w_shape, (problem.filters,), problem.y_shape)
        x, w, bias, added = (rng.integers(-3, 4, s).astype(np.float32) for s in shapes)
        if adds and packs:
            w.flat[w.size // 2] = np.inf
        bias = bias if problem.bias else None
        expected = np.empty(problem.y_shape, np.float32)
        places = [None if a is None else a.ctypes.data for a in (x, w, bias, expected)]
        native.run("reference_forward", problem, *places, accumulate=False, threads=1)
        with np.errstate(invalid="ignore"):
            expected = np.clip(expected + added * adds, *bounds)
        steps, packed = [], None
        if packs:
            step, packed = _packing(problem, w, bias, packed, isa)
            _call([step], [w, bias, packed], 2, isa)
        inputs = [x, w, bias, added if adds else None, packed]
        fields = {"problem": native.as_struct(problem), "kernel": -1, "strict": strict}
        fields.update(lowest=bounds[0], highest=bounds[1])
        steps = [_step(Kind.CONVOLVE, inputs, x, **fields)]
        for threads in (1, 2):
            y = guarded.place(np.full(problem.y_shape, np.nan, np.float32), "end")
            _call(steps, [*inputs, y], threads, isa)
            name = f"{text}, bounds {bounds}, adds {adds}, packs {packs}, strict {strict}"
            np.testing.assert_array_equal(y, expected, err_msg=name)


@pytest.mark.parametrize("isa", native.isas())
def test_gradients_of_convolutions(isa, rng):
    """Of whole numbers; into an array, and added to it."""
    kinds = {Kind.DATA_GRADIENT: "backward_data", Kind.WEIGHT_GRADIENT: "backward_weight"}
    for text, strict, kind in itertools.product(LAYERS, (0, 1), kinds):
        problem = ConvProblem.parse(text)
        if kind == Kind.DATA_GRADIENT:
            shapes = problem.w_shape, problem.y_shape, problem.x_shape
        else:
            shapes = problem.x_shape, problem.y_shape, problem.w_shape
        a, b, held = (rng.integers(-3, 4, s).astype(np.float32) for s in shapes)
        expected = np.empty_like(held)
        places = [each.ctypes.data for each in (a, b, expected)]
        native.run(f"reference_{kinds[kind]}", problem, *places, accumulate=False, threads=1)
        fields = {"problem": native.as_struct(problem), "kernel": -1, "strict": strict}
        step, found = _step(kind, [a, b], a, **fields), np.full_like(held, np.nan)
        _call([step], [a, b, found], 2, isa)
        np.testing.assert_array_equal(found, expected, err_msg=text)
        step.inputs[2], total = step.out, held.copy()
        _call([step], [a, b, total], 2, isa)
        np.testing.assert_array_equal(total, held + expected, err_msg=text)


def _pool_gradient(x, dy, rows, columns, kind, border):
    dx = np.zeros(x.shape)
    for image, channel, i, j in np.ndindex(dy.shape):
        spans = [(n * w.stride - w.pad, w) for n, w in ((i, rows), (j, columns))]
        inside = [slice(max(a, 0), max(min(a + w.kernel, w.size), 0)) for a, w in spans]
        part, given = x[image, channel][tuple(inside)], dx[image, channel][tuple(inside)]
        if not part.size:
            continue
        if kind == Pool.LARGEST:
            given[np.unravel_index(part.argmax(), part.shape)] += dy[image, channel, i, j]
            continue
        size = math.prod(
            min(a + w.kernel, w.size + w.pad * border) - (a if border else max(a, 0))
            for a, w in spans
        )
        given += dy[image, channel, i, j] / (1 if kind == Pool.SUM else size)
    return dx


def test_gradients_of_pooling(rng):
    """Whole numbers, many of them equal: the first one gets a maximum's gradient."""
    windows = [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2), (2, 3, 1), (1, 4, 0), (1, 2, 2)]
    for (kernel, stride, pad), kind, border in itertools.product(windows, Pool, (0, 1)):
        x = rng.integers(-2, 3, (2, 3, 9, 11)).astype(np.float32)
        # The last window may begin after the plane.
        axes = [
            program.Windows(n, (n + 2 * p - k) // s + 2, k, s, p)
            for n, k, s, p in ((9, kernel, stride, pad), (11, 3, 2, 1))
        ]
        shape = (*x.shape[:2], axes[0].count, axes[1].count)
        dy = rng.integers(-9, 10, shape).astype(np.float32)
        y = _pooled(x, *axes, kind, border).astype(np.float32)
        expected = _pool_gradient(x, dy, *axes, kind, border)
        inputs = [dy, x, y] if kind == Pool.LARGEST else [dy, None, None]
        fields = {"kind": kind, "border": border, "images": 2, "channels": 3}
        fields |= {"rows": axes[0], "columns": axes[1]}
        step = _step(Kind.POOL_GRADIENT, inputs, x, **fields)
        name = f"{kind.name}, {border}, window {kernel} {stride} {pad}"
        _check(step, inputs, expected, name, exact=kind != Pool.AVERAGE)


def _with_more(step, inputs, y, more, isa, threads):
    """Run a step that has further results."""
    for number, each in enumerate(more):
        step.also[number] = Operand(base=-1)
        if each is not None:
            step.also[number] = Operand(12, 0, len(inputs) + 1 + number)
    _call([step], [*inputs, y, *more], threads, isa)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize(("scaled", "adds", "is_relu"), [*itertools.product((0, 1), repeat=3)])
def test_normalisation(isa, scaled, adds, is_relu, rng):
    """Against the formula in float64, and its gradient."""
    shape, axes = (5, 7, 23), (0, 2)
    x, added, dy = (_numbers(rng, *shape) for _ in range(3))
    x += 5
    gamma, beta = _numbers(rng, 2, 7)
    wide, of_channels = x.astype(np.float64), (1, 7, 1)
    mean, variance = wide.mean(axes), wide.var(axes)
    inverse = 1 / np.sqrt(variance + 0.01)
    whitened = (wide - mean.reshape(of_channels)) * inverse.reshape(of_channels)
    factor = (gamma if scaled else np.ones(7)).reshape(of_channels)
    expected = whitened * factor + beta.reshape(of_channels) + added * adds
    passed = np.where(expected > 0, dy, 0) if is_relu else dy.astype(np.float64)
    expected = np.maximum(expected, 0) if is_relu else expected
    dbeta, dgamma = passed.sum(axes), (passed * whitened).sum(axes)
    rest = (whitened * dgamma.reshape(of_channels) + dbeta.reshape(of_channels)) / (5 * 23)
    dx = (passed - rest) * inverse.reshape(of_channels) * factor
    batch = {"images": 5, "channels": 7, "pixels": 23, "epsilon": 0.01, "is_relu": is_relu}
    inputs = [x, beta, gamma if scaled else None, added if adds else None]
    results = []
    for threads in (1, 3):
        y, also = np.full(shape, np.nan, np.float32), list(np.full((2, 7), np.nan, np.float32))
        _with_more(_step(Kind.NORM, inputs, y, **batch), inputs, y, also, isa, threads)
        last = [gamma if scaled else None, y if is_relu else None]
        read, made = [x, dy, *also, *last], np.full(shape, np.nan, np.float32)
        more = [*np.full((2, 7), np.nan, np.float32), np.full(shape, np.nan, np.float32)]
        more[2] = more[2] if adds else None
        step = _step(Kind.NORM_GRADIENT, read, made, **batch)
        _with_more(step, read, made, more, isa, threads)
        results.append([y, *also, made, *more[: 2 + adds]])
    right = [expected, mean, inverse, dx, dgamma, dbeta, passed]
    for number, (one, several) in enumerate(zip(*results)):
        assert one.tobytes() == several.tobytes(), number
        most = 3e-6 * np.abs(right[number]).max()
        np.testing.assert_allclose(one, right[number], rtol=0, atol=most, err_msg=str(number))


def test_labels_as_zeros_and_ones(rng):
    labels = rng.integers(-1, 6, (3, 7)).astype(np.float32)
    labels[0, :2] = 1.5, np.nan
    expected = (labels[:, None] == np.arange(5)[:, None]).astype(np.float32)
    step = _step(Kind.ONE_HOT, [labels], expected, rows=3, length=5, inner=7)
    _check(step, [labels], expected, "labels", exact=True)


def _plus(count, source, target):
    fields = {"elements": count, "inputs": 1, "ops": 1, "readings": _alike(1)}
    x = np.empty(0, np.float32)
    step = _step(Kind.POINTWISE, [x], x, **fields, op=[_op("plus", 0, p=1.0)])
    step.inputs[0].base, step.out.base = source, target
    return step


def test_steps_run_in_order_and_are_timed():
    """That later steps are found shows that the structures have the library's sizes."""
    arrays = [np.full(5, k, np.float32) for k in range(4)]
    steps = [_plus(5, 0, 1), _plus(5, 1, 2), _plus(5, 2, 3)]
    assert _call(steps, arrays, 1, "baseline") is None
    np.testing.assert_array_equal(arrays[3], np.full(5, 3, np.float32))
    seconds = _call(steps, arrays, 1, "baseline", timed=True)
    assert len(seconds) == 3
    assert all(0 <= each < 10 for each in seconds)


def test_the_failing_step_is_named():
    x = np.zeros(5, np.float32)
    arrays = [x, np.zeros(5, np.float32), np.zeros(5, np.float32)]
    wrong = _plus(5, 1, 2)
    wrong.kind = 77
    with pytest.raises(InvalidProblem, match="step 1 of a program, of kind 77, failed"):
        _call([_plus(5, 0, 1), wrong, _plus(5, 1, 2)], arrays, 1, "baseline")
    assert [each[0] for each in arrays] == [0, 1, 0]
    problem = ConvProblem.parse("b1,c1,h3,w3,m1,k3,p1")
    fields = {"problem": native.as_struct(problem), "kernel": native.kernels().index("direct")}
    step = _step(Kind.DATA_GRADIENT, [x, x], x, **fields)
    with pytest.raises(UnsupportedProblem, match="step 0 of a program, DATA_GRADIENT, failed"):
        _call([step], arrays, 1, "baseline")
    # Images apart, where a step reads contiguous ones.
    fields = {"outputs": 1, "length": 5, "inner": 1, "kind": Reduce.SUM}
    with pytest.raises(InvalidProblem, match="step 0 of a program, REDUCE, failed"):
        _call([_step(Kind.REDUCE, [x], x, {0: 9}, **fields)], arrays, 1, "baseline")


def test_errno_stays():
    """MXNet takes it for an error of its own when it reads the number inf."""
    x, y = np.full(3, 1e30, np.float32), np.empty(3, np.float32)
    step = _step(Kind.POINTWISE, [x], y, elements=3, inputs=1, ops=1)
    step.of.pointwise.op[0] = program.Op(program.TERMS.index("power"), p=50.5)
    place = ctypes.CDLL(None).__errno_location
    place.restype = ctypes.POINTER(ctypes.c_int)
    errno = place()
    for isa in native.isas():
        errno[0] = 0
        _call([step], [x, y], 1, isa)
        assert (errno[0], y.tolist()) == (0, [np.inf] * 3), isa
