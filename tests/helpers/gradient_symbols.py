"""Symbols whose gradients are compared with MXNet's, on "data" of `SHAPE`."""

import numpy as np
from gpu_networks import error

BELOW = 1e-5
SHAPE = (3, 4, 5, 7)


def layers(sym):
    """Return symbols of layers by name, on "data" of `SHAPE`."""
    x, other = sym.Variable("data"), sym.Variable("other", shape=SHAPE)
    small = sym.Reshape(x, shape=(0, 0, -1))

    def norm(x, name, **options):
        return sym.BatchNorm(x, name=name, fix_gamma=False, eps=1e-3, **options)

    def pool(x, *windows, **options):
        kernel, stride, pad = windows
        return sym.Pooling(x, kernel=kernel, stride=stride, pad=pad, **options)

    convolved = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "num_group": 2, "num_filter": 6}
    scaled = norm(x, "c")
    averages = {f"moving_{each}": sym.Variable(f"a_{each}") for each in ("mean", "var")}

    def grown(x, name):
        point = {"kernel": (1, 1), "num_filter": 2, "no_bias": True}
        return sym.concat(x, sym.Convolution(sym.relu(norm(x, name)), **point, name=name))

    block, one = grown(grown(grown(x, "a"), "b"), "c"), {"kernel": (1, 1), "global_pool": True}
    return {
        "convolution": sym.Convolution(x, dilate=(1, 2), **convolved, name="conv"),
        "rows": sym.Convolution(small, num_filter=5, kernel=(3,), no_bias=True, name="conv"),
        "deconvolution": sym.Deconvolution(x, adj=(1, 0), **convolved, no_bias=False, name="d"),
        "dense": sym.FullyConnected(x, num_hidden=9, name="fc"),
        "dense_rows": sym.FullyConnected(x, num_hidden=3, flatten=False, name="fc"),
        "norm": norm(x, "a"),
        "norm_fixed": sym.BatchNorm(x, name="a", momentum=0.7),
        "norm_last": norm(x, "a", axis=-1),
        "norm_global": norm(x, "a", use_global_stats=True, axis=2),
        "norm_global_fixed": sym.BatchNorm(x, name="a", use_global_stats=True),
        "norm_relu": sym.relu(norm(x, "a")),
        "norm_sum_relu": sym.Activation(other + norm(x, "a"), act_type="relu"),
        "norm_clip": sym.clip(norm(x, "a"), -0.5, 1),
        "norm_added": sym.tanh(norm(x, "a")) + sym.BlockGrad(norm(x, "b")) * x,
        "norms": norm(sym.tanh(norm(x, "a", **averages)) * other, "b", **averages) + norm(x, "c"),
        "norm_convolution": norm(sym.Convolution(x, **convolved, name="zero"), "a"),
        "norm_pixels": norm(sym.Convolution(x, **convolved, name="conv"), "a", axis=2),
        "block": sym.relu(norm(block, "d")),
        "norms_sum_relu": sym.relu(norm(x, "a") + sym.BatchNorm(other, name="b")),
        # The normalisation has another use.
        "norm_relu_twice": sym.broadcast_mul(sym.relu(scaled), scaled),
        "pool_max": pool(x, (2, 3), (2, 1), (1, 1)),
        "pool_max_apart": pool(x, (2, 2), (3, 3), (0, 0)),
        "pool_max_full": pool(x, (3, 3), (2, 2), (0, 1), pooling_convention="full"),
        # The last window has no element.
        "pool_max_none": pool(x, (2, 1), (1, 4), (0, 0), pooling_convention="full"),
        "pool_rows": pool(small, (3,), (2,), (1,)),
        "pool_avg": pool(x, (3, 3), (1, 2), (1, 0), pool_type="avg"),
        "pool_inside": pool(x, (3, 2), (2, 2), (1, 1), pool_type="avg", count_include_pad=False),
        "pool_sum": pool(x, (2, 2), (1, 1), (0, 1), pool_type="sum"),
        "global": sym.Group([sym.Pooling(x, **one, pool_type=k) for k in ("avg", "max", "sum")]),
    }


def others(sym):
    """Return symbols of other operators by name."""
    x, label = sym.Variable("data"), sym.Variable("label")
    channels = sym.Variable("channels", shape=(1, 4, 1, 1))
    apart, positive, internal = 3 + channels, sym.square(x) + 1, sym._internal

    def act(kind):
        return sym.Activation(x, act_type=kind)

    def leaky(kind, **attributes):
        return sym.LeakyReLU(x, act_type=kind, **attributes)

    turned = sym.SwapAxis(x, dim1=1, dim2=3)
    squeezed = sym.split(sym.expand_dims(x, 1), num_outputs=1, axis=1, squeeze_axis=True)
    parts = sym.SliceChannel(x, num_outputs=5, axis=2, squeeze_axis=True)
    return {
        "activations": act("relu") + 2 * act("tanh") + 3 * act("sigmoid"),
        "soft": act("softrelu") - act("softsign") + sym.softsign(x) * sym.sigmoid(x),
        "functions": sym.exp(x) - sym.abs(x) * sym.tanh(x) + sym.negative(x) * sym.erf(x),
        "roots": sym.log(positive) / sym.sqrt(positive) + sym.relu(x),
        "clips": sym.clip(x, -0.5, 0.25) - sym.hard_sigmoid(x, alpha=0.4) + sym.clip(x, 1, -1),
        "leaky": leaky("leaky", slope=0.3) + 2 * leaky("elu", slope=0.7) + leaky("gelu"),
        "prelu": sym.LeakyReLU(x, sym.Variable("gamma", shape=(4,)), act_type="prelu"),
        "prelu_one": sym.LeakyReLU(x, sym.Variable("gamma", shape=(1,)), act_type="prelu"),
        "scalars": (1 - x) / 3 + 2 * x - 0.5 + 1 / positive + (x - -0.5) * (positive**1.5),
        "bounds": internal._maximum_scalar(x, scalar=0.3) * internal._minimum_scalar(x, scalar=0.1),
        "arithmetic": (x + x * x) / (positive - x) + sym.add_n(x, 2 * x),
        "elementwise": sym.elemwise_div(
            sym.elemwise_mul(x, x), sym.elemwise_sub(positive, sym.elemwise_add(x, x) / 4)
        ),
        "spread": sym.broadcast_div(
            sym.broadcast_mul(sym.broadcast_add(x, channels), sym.broadcast_sub(channels, x)), apart
        ),
        "spread_names": sym.broadcast_plus(x, channels) * sym.broadcast_minus(x, channels),
        "constants": x * sym.BlockGrad(x) + sym.Cast(x, dtype="float32") * sym.ones_like(x),
        "reductions": sym.broadcast_mul(
            sym.mean(x, axis=(0, 2), keepdims=True), sym.max(x, axis=(1, 3), keepdims=True)
        ),
        "sums": sym.Group([sym.sum(x, axis=(1, 3)), sym.sum(x)]),
        # Both terms get the gradient of the sum, and x has another use.
        "sum_normalised": sym.BatchNorm(x + sym.tanh(x), fix_gamma=False) + x,
        "sum_convolved": sym.Convolution(x + sym.tanh(x), num_filter=4, kernel=(1, 1)) + x,
        "adaptive": sym.contrib.AdaptiveAvgPooling2D(x),
        "softmax": sym.softmax(x, axis=1, temperature=2) * sym.log_softmax(x),
        "softmax_channels": sym.SoftmaxActivation(x, mode="channel"),
        "softmax_rows": sym.SoftmaxActivation(sym.reshape(x, shape=(0, -1))),
        "softmax_output": sym.SoftmaxOutput(sym.Flatten(x), label, name="softmax"),
        "views": sym.Flatten(sym.reshape(x, shape=(0, -3, -1))) + sym.reshape_like(
            sym.Reshape(x, shape=(-1,)), sym.Flatten(x)
        ),
        "axes": sym.squeeze(sym.expand_dims(sym.transpose(x, axes=(0, 2, 3, 1)), 1)) * 2,
        "turns": sym.transpose(x) * sym.transpose(sym.swapaxes(turned, dim1=3, dim2=1)),
        "slices": sym.slice_axis(x, axis=-1, begin=-3, end=None) * 2,
        "slice_like": sym.slice_like(x, sym.Variable("like", shape=(2, 4, 3, 9)), axes=(0, 2)),
        "broadcast_like": sym.broadcast_like(channels, x) * x,
        "concat": sym.concat(x, x * 2, sym.slice_axis(x, axis=1, begin=1, end=3), dim=1) * 3,
        "concat_last": sym.Concat(x, sym.tanh(x), dim=-1) * 3,
        "split": sym.split(x, num_outputs=2, axis=1)[1] * 3,
        "splits": sym.Group([squeezed, parts[3] * parts[1]]),
        "scaled": sym.UpSampling(x, scale=3, sample_type="nearest"),
    }  # fmt: skip


def small(sym):
    """Return a network with shared weights, a residual unit, pooling and a concatenation."""
    weight = sym.Variable("shared_weight")

    def shared(x):
        options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 6, "no_bias": True}
        return sym.Convolution(x, weight, **options)

    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=6, name="first")
    x = sym.relu(sym.BatchNorm(shared(x), name="a") + x)
    x = sym.concat(shared(x), sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="max"))
    x = sym.BatchNorm(sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg"), name="b")
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=5, name="fc"), name="softmax")


def compare(found, expected):
    for number, (y, right) in enumerate(zip(found[0], expected[0])):
        assert error(y, right) < BELOW, number
    for made, right in zip(found[1:], expected[1:]):
        for name in made:
            # MXNet's is only rounding.
            assert error(made[name], right[name] * (name != "zero_bias")) < BELOW, name


def whole(case):
    """Make all numbers whole and small."""
    for name, values in case.arrays.items():
        case.arrays[name] = np.round(3 * values / np.abs(values).max()).astype(np.float32)
    case.heads = [np.round(2 * each) for each in case.heads]
    return case
