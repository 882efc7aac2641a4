"""Random nodes of MXNet's operators that networks support on the GPU.

A new operator needs an entry in `NODES`.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, Callable


class Unfit(Exception):
    """No node of the operator accepts an array of this shape."""


@dataclass
class Draw:
    """The source of randomness, and the names drawn: the network's inputs beside "data"."""

    sym: Any
    rng: Any
    inputs: list[str] = field(default_factory=list)
    count: int = 0

    def name(self, kind):
        self.count += 1
        return f"{kind}{self.count}"

    def maybe(self, chance=0.5):
        return self.rng.random() < chance

    def axis(self, shape, more=0):
        axes = len(shape) + more
        return self.rng.randint(-axes, axes - 1)

    def variable(self, shape):
        """Return a parameter, or a further input of the network."""
        name = self.name("other")
        if self.maybe(0.3):
            self.inputs.append(name)
        return self.sym.Variable(name, shape=tuple(shape))

    def partner(self, x, shape):
        """Return an array of the same shape."""
        sym = self.sym
        made = [self.variable, lambda shape: x, lambda shape: sym.tanh(x), lambda shape: x * 2]
        if len(shape) > 1:
            made.append(lambda shape: sym.FullyConnected(x, num_hidden=shape[-1], flatten=False))
        return self.rng.choice(made)(shape)


def _plain(draw, function, x, shape):
    return function(x)


def _with(**options):
    """Draw attributes from lists of values, in which `None` means unset, and "axis" an axis of the
    array."""

    def make(draw, function, x, shape):
        asked = {}
        for name, values in options.items():
            value = draw.axis(shape) if values == "axis" else draw.rng.choice(values)
            if value is not None:
                asked[name] = value
        return function(x, **asked)

    return make


_scalar = _with(scalar=[-2.0, -1.0, -0.5, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 1e-3, 1e4])


def _of_two(draw, function, x, shape):
    other = draw.partner(x, shape)
    return function(x, other) if draw.maybe() else function(other, x)


def _spread(draw, function, x, shape):
    if draw.maybe(0.2):
        return _of_two(draw, function, x, shape)
    other = draw.variable(draw.rng.choice([1, size]) for size in shape)
    if draw.maybe(0.2):
        axes = tuple(axis for axis in range(len(shape)) if draw.maybe()) or (0,)
        other = draw.sym.max(x, axis=axes, keepdims=True)
    if draw.maybe(0.2):
        x = draw.sym.slice_axis(x, axis=draw.axis(shape), begin=0, end=1)
    return function(x, other) if draw.maybe() else function(other, x)


def _of_many(draw, function, x, shape):
    others = [draw.partner(x, shape) for _ in range(draw.rng.choice([0, 1, 2, 3, 7]))]
    found = [x, *others]
    draw.rng.shuffle(found)
    return function(*found)


def _leaky(draw, function, x, shape):
    kind = draw.rng.choice(["leaky", "elu", "selu", "gelu", "prelu", "prelu", "rrelu"])
    if kind == "prelu":
        sizes = [(1,), *((size,) for size in shape[1:2])]
        gamma = draw.sym.Variable(draw.name("gamma"), shape=draw.rng.choice(sizes))
        return function(x, gamma, act_type=kind)
    made = function(x, act_type=kind, slope=draw.rng.choice([0.1, 0.25, -0.5, 1.5]))
    return made[0] if kind == "rrelu" else made


def _windows(draw, axes, largest=3, **more):
    rng = draw.rng
    found = {"kernel": tuple(rng.randint(1, largest) for _ in range(axes))}
    found["stride"] = tuple(rng.randint(1, 3) for _ in range(axes))
    found["pad"] = tuple(rng.randint(0, min(2, k - 1) or 1) for k in found["kernel"])
    for name, most in more.items():
        found[name] = tuple(rng.choice([1, 1, rng.randint(1, most)]) for _ in range(axes))
    return {name: each for name, each in found.items() if name == "kernel" or draw.maybe(0.8)}


def _divisor(draw, number):
    found = [k for k in range(1, number + 1) if number % k == 0]
    return draw.rng.choice([1, *found])


def _convolution(draw, function, x, shape):
    options = _windows(draw, len(shape) - 2, 5, dilate=2)
    others = (options.get(name, (1 - k,) * 3) for k, name in enumerate(("dilate", "pad")))
    for size, kernel, dilate, pad in zip(shape[2:], options["kernel"], *others):
        if dilate * (kernel - 1) >= size + 2 * pad:
            raise Unfit
    groups = _divisor(draw, shape[1])
    options["num_filter"] = groups * draw.rng.choice([1, 2, 3, 5])
    if draw.maybe():
        options["num_group"] = groups
    return function(x, **options, no_bias=draw.rng.choice([True, False]))


def _deconvolution(draw, function, x, shape):
    options = _windows(draw, len(shape) - 2, 4, dilate=2)
    groups = _divisor(draw, shape[1])
    options |= {"num_group": groups, "num_filter": groups * draw.rng.randint(1, 4)}
    if draw.maybe(0.3):
        strides = options.get("stride", (1,) * (len(shape) - 2))
        options["adj"] = tuple(draw.rng.randint(0, each - 1) for each in strides)
    if draw.maybe(0.1):
        options["target_shape"] = tuple(size + 2 for size in shape[2:])
    return function(x, **options, no_bias=draw.rng.choice([True, False]))


def _pooling(draw, function, x, shape):
    rng, options = draw.rng, _windows(draw, len(shape) - 2)
    if draw.maybe(0.3):
        options["global_pool"] = True
    options["pool_type"] = rng.choice(["max", "max", "avg", "avg", "sum", "lp"])
    if options["pool_type"] == "lp":
        options["p_value"] = 2
    options["pooling_convention"] = rng.choice(["valid", "full", "full", "same"])
    if options["pooling_convention"] == "same" and len(shape) != 3:
        del options["pooling_convention"]
    return function(x, **options, count_include_pad=rng.choice([True, False]))


def _dense(draw, function, x, shape):
    rng = draw.rng
    options = {"flatten": rng.choice([True, False]), "no_bias": rng.choice([True, False])}
    return function(x, num_hidden=rng.randint(1, 9), **options)


def _normalisation(draw, function, x, shape):
    rng = draw.rng
    options = {"axis": draw.axis(shape), "fix_gamma": rng.choice([True, False])}
    options |= {"eps": rng.choice([1e-3, 2e-5, 0.1]), "use_global_stats": rng.choice([True, False])}
    if draw.maybe(0.1):
        return function(x, **options, output_mean_var=True)[0]
    return function(x, **options)


def _reduced(draw, function, x, shape):
    axes = tuple(draw.rng.sample(range(len(shape)), draw.rng.randint(0, len(shape))))
    axes = tuple(draw.rng.choice([axis, axis - len(shape)]) for axis in axes)
    options = {"axis": axes[0] if len(axes) == 1 and draw.maybe() else axes}
    if draw.maybe(0.1):
        options["exclude"] = True
    return function(x, **options, keepdims=draw.rng.choice([True, False]))


def _softmax(draw, function, x, shape):
    options = {"axis": draw.axis(shape)} if draw.maybe(0.8) else {}
    if draw.maybe(0.3):
        options["temperature"] = draw.rng.choice([0.5, 2.0, 10.0])
    return function(x, **options)


def _with_labels(draw, function, x, shape):
    options = [{}, {"multi_output": True}, {"preserve_shape": True}, {"out_grad": True}]
    return function(x, **draw.rng.choice(options))


def _codes(draw, shape):
    """Return codes of `Reshape` for a shape."""
    rng, axes = draw.rng, len(shape)
    found = [[0] * axes, [0, -1], [-1, shape[-1]], [-1], [1, -1], [-2], [-1, 1], [0] * (axes - 1)]
    found[-1].append(-1)
    for at in range(axes - 1):
        found.append([0] * at + [-3] + rng.choice([[-2], [0] * (axes - at - 2)]))
    at = rng.randrange(axes)
    first = _divisor(draw, shape[at])
    parts = rng.choice([[first, shape[at] // first], [-1, first], [first, -1]])
    found.append([0] * at + [-4, *parts] + rng.choice([[-2], [0] * (axes - at - 1)]))
    return tuple(rng.choice(found))


def _reshape(draw, function, x, shape):
    return function(x, shape=_codes(draw, shape), **({"reverse": True} if draw.maybe(0.1) else {}))


def _squeeze(draw, function, x, shape):
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    if not ones or draw.maybe(0.3):
        return function(x)
    chosen = [axis for axis in ones if draw.maybe()] or ones[:1]
    return function(x, axis=tuple(draw.rng.choice([a, a - len(shape)]) for a in chosen))


def _transpose(draw, function, x, shape):
    axes = tuple(draw.rng.sample(range(len(shape)), len(shape)))
    return function(x, axes=axes) if draw.maybe(0.8) else function(x)


def _pad(draw, function, x, shape):
    rng = draw.rng
    mode = rng.choice(["constant", "edge", "reflect"])
    widths = [0, 0, 0, 0]
    for size in shape[2:]:
        most = min(3, size - 1) if mode == "reflect" else 3
        widths += [rng.randint(0, most), rng.randint(0, most)]
    options = {"constant_value": rng.choice([-1.0, 0.5, 2.0])} if draw.maybe() else {}
    return function(x, mode=mode, pad_width=tuple(widths), **options)


def _cut(draw, function, x, shape):
    axis = draw.axis(shape)
    size = shape[axis]
    begin = draw.rng.randrange(size)
    end = draw.rng.choice([None, draw.rng.randint(begin + 1, size)])
    if draw.maybe(0.3):
        begin -= size
    if end is not None and end < size and draw.maybe(0.3):
        end -= size
    return function(x, axis=axis, begin=begin, end=end)


def _split(draw, function, x, shape):
    rng, axis = draw.rng, draw.axis(shape)
    count = rng.choice([n for n in (1, 2, 3, 5, shape[axis]) if shape[axis] % n == 0 and n < 12])
    squeezed = count == shape[axis] and draw.maybe()
    parts = list(function(x, axis=axis, num_outputs=count, squeeze_axis=squeezed))
    rng.shuffle(parts)
    kept = parts[: rng.randint(1, count)]
    if len(kept) == 1:
        return kept[0]
    return draw.sym.add_n(*kept) if draw.maybe() else draw.sym.concat(*kept, dim=0)


def _upsampling(draw, function, x, shape):
    options = {"scale": draw.rng.choice([1, 2, 3]), "sample_type": "nearest"}
    if draw.maybe(0.1):
        return function(x, draw.variable(shape), num_args=2, **options)
    return function(x, num_args=1, **options)


def _resize(draw, function, x, shape):
    rng = draw.rng
    options = {"align_corners": False} if draw.maybe() else {}
    if draw.maybe(0.1):
        return function(x, scale_height=2.0, scale_width=0.5, mode="odd_scale", **options)
    return function(x, height=rng.randint(1, 12), width=rng.randint(1, 12), **options)


def _concat(draw, function, x, shape):
    axis, rng = draw.axis(shape), draw.rng
    found = [x]
    for _ in range(rng.randint(0, 3)):
        if draw.maybe():
            found.append(draw.partner(x, shape))
        else:
            sizes = list(shape)
            sizes[axis] = rng.randint(1, 4)
            found.append(draw.variable(sizes))
    rng.shuffle(found)
    return function(*found, dim=axis)


def _activation(draw, function, x, shape):
    kinds = ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    return function(x, act_type=draw.rng.choice(kinds))


def _clip(draw, function, x, shape):
    bounds = [draw.rng.choice([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 6.0]) for _ in range(2)]
    return function(x, *bounds)


def _cast(draw, function, x, shape):
    if draw.maybe(0.2):
        return draw.sym.Cast(function(x, dtype="float64"), dtype="float32")
    return function(x, dtype="float32")


@dataclass(frozen=True)
class Kind:
    """A kind of operator, for arrays with these numbers of `axes`; `exact`: small whole inputs give
    whole outputs, or clearly fractional ones."""

    make: Callable[..., Any]
    axes: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    exact: bool = True

    def node(self, draw, kind, x, shape):
        """Return a node of it on x, and the node's name. Raises `Unfit`."""
        if len(shape) not in self.axes:
            raise Unfit
        name = draw.name(kind)
        made = self.make(draw, functools.partial(_function(draw.sym, kind), name=name), x, shape)
        return made, name


def _function(sym, kind):
    if kind == "ece408_conv":
        return functools.partial(sym.Custom, op_type=kind)
    if kind.startswith("_contrib_"):
        return getattr(sym.contrib, kind.removeprefix("_contrib_"))
    return getattr(sym, kind, None) or getattr(sym._internal, kind)


def _slice_like(draw, function, x, shape):
    axes = tuple(axis for axis in range(len(shape)) if draw.maybe())
    if not axes or draw.maybe(0.3):
        return function(x, draw.variable(draw.rng.randint(1, size) for size in shape))
    sizes = (draw.rng.randint(1, n) if k in axes else n + 1 for k, n in enumerate(shape))
    other = draw.variable(sizes)
    return function(x, other, axes=tuple(draw.rng.choice([k, k - len(shape)]) for k in axes))


def _broadcast_like(draw, function, x, shape):
    axes = [axis for axis in range(len(shape)) if shape[axis] == 1 or draw.maybe()]
    for axis in axes:
        x = draw.sym.slice_axis(x, axis=axis, begin=0, end=1)
    if not axes or draw.maybe():
        return function(x, draw.variable(shape))
    sizes = [draw.rng.randint(1, 5) for _ in range(draw.rng.randint(1, 4))]
    others = [draw.rng.randint(-len(sizes), len(sizes) - 1) for _ in axes]
    mine = tuple(draw.rng.choice([axis, axis - len(shape)]) for axis in axes)
    return function(x, draw.variable(sizes), lhs_axes=mine, rhs_axes=tuple(others))


def _reshape_like(draw, function, x, shape):
    if draw.maybe():
        return function(draw.sym.Reshape(x, shape=(-1,)), x)
    begin = draw.rng.randint(0, len(shape) - 1)
    end = draw.rng.randint(begin + 1, len(shape))
    joined = draw.sym.Reshape(x, shape=(*shape[:begin], -1, *shape[end:]))
    places = {"rhs_begin": begin, "rhs_end": end - len(shape) if end < len(shape) else end}
    if end == len(shape) and draw.maybe():
        del places["rhs_end"]
    return function(joined, x, lhs_begin=begin, lhs_end=begin + 1, **places)


def _kinds(names, *options, **more):
    return dict.fromkeys(names.split(), Kind(*options, **more))


_IMAGES = (3, 4, 5)
NODES = {
    **_kinds("Convolution", _convolution, _IMAGES),
    **_kinds("ece408_conv", _convolution, (3, 4)),
    **_kinds("Deconvolution", _deconvolution, (3, 4)),
    **_kinds("FullyConnected", _dense),
    **_kinds("BatchNorm", _normalisation, exact=False),
    **_kinds("relu square abs negative", _plain),
    **_kinds("identity _copy BlockGrad stop_gradient Flatten flatten", _plain),
    **_kinds("sigmoid tanh softsign exp log sqrt erf", _plain, exact=False),
    **_kinds("_plus_scalar _minus_scalar _rminus_scalar _mul_scalar", _scalar),
    **_kinds("_maximum_scalar _minimum_scalar", _scalar),
    **_kinds("_div_scalar _rdiv_scalar _power_scalar", _scalar, exact=False),
    **_kinds("elemwise_add elemwise_sub elemwise_mul _add _sub _mul _Mul", _of_two),
    **_kinds("_plus _Plus _minus _Minus", _of_two),
    **_kinds("elemwise_div _div _Div", _of_two, exact=False),
    **_kinds("broadcast_add broadcast_plus broadcast_sub broadcast_minus", _spread),
    **_kinds("broadcast_mul", _spread),
    **_kinds("broadcast_div", _spread, exact=False),
    **_kinds("Activation", _activation, exact=False),
    **_kinds("LeakyReLU", _leaky, exact=False),
    **_kinds("clip", _clip),
    **_kinds("hard_sigmoid", _with(alpha=[None, 0.5], beta=[None, 0.1]), exact=False),
    **_kinds("add_n ElementWiseSum", _of_many),
    **_kinds("Cast cast", _cast),
    **_kinds("Dropout", _with(p=[0.1, 0.5], axes=[None, (0,)])),
    **_kinds("_contrib_AdaptiveAvgPooling2D", _with(output_size=[None, 1, 1, 2]), (4,), False),
    **_kinds("Pooling", _pooling, _IMAGES, exact=False),
    **_kinds("mean", _reduced, exact=False),
    **_kinds("sum max", _reduced),
    **_kinds("softmax log_softmax", _softmax, exact=False),
    **_kinds("SoftmaxOutput Softmax", _with_labels, (2, 3, 4, 5, 6), False),
    **_kinds("SoftmaxActivation", _with(mode=[None, "instance", "channel"]), exact=False),
    **_kinds("LRN", _with(nsize=[1, 3, 5], alpha=[None, 0.1], beta=[None, 0.5], knorm=[None, 1.0]),
             (4,), False),
    **_kinds("Reshape reshape", _reshape),
    **_kinds("expand_dims", lambda draw, function, x, shape:
             function(x, axis=draw.axis(shape, 1)), (1, 2, 3, 4, 5)),
    **_kinds("squeeze", _squeeze),
    **_kinds("zeros_like ones_like", _plain),
    **_kinds("slice_like", _slice_like),
    **_kinds("broadcast_like", _broadcast_like),
    **_kinds("reshape_like", _reshape_like),
    **_kinds("transpose", _transpose),
    **_kinds("SwapAxis swapaxes", _with(dim1="axis", dim2="axis")),
    **_kinds("Pad pad", _pad, (4, 5)),
    **_kinds("slice_axis", _cut),
    **_kinds("SliceChannel split", _split),
    **_kinds("UpSampling", _upsampling, (4,)),
    **_kinds("_contrib_BilinearResize2D", _resize, (4,), False),
    **_kinds("Concat concat", _concat),
}  # fmt: skip
