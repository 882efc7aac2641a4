"""Each operator on the CPU and in the emulator, against MXNet's on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_networks import Case, check_together

from ece408_op.network import why_not

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 2e-6


def _operators(sym):
    """Return symbols on "data" of shape (3, 4, 5, 6) by name: few launches for many operators."""
    label = sym.Variable("label")
    x, y = sym.Variable("data"), sym.Variable("weight", shape=(1, 4, 1, 1))

    def act(kind):
        return sym.Activation(x, act_type=kind)

    def leaky(kind, **attributes):
        return sym.LeakyReLU(x, act_type=kind, **attributes)

    return {
        "activations": [
            act("relu") + 2 * act("tanh") + 3 * act("sigmoid"),
            act("softrelu") - act("softsign") + sym.relu(x) * sym.tanh(2 - x) + sym.sigmoid(x),
            sym.clip(x, -0.5, 0.25) - sym.exp(x) / sym.sqrt(3 + x) + sym.clip(x, 0.1, np.inf),
            sym.clip(x, 1, -1),
        ],
        "leaky": [
            leaky("leaky", slope=0.3) + 2 * leaky("elu", slope=0.7) + 3 * leaky("selu"),
            leaky("gelu") - leaky("rrelu", lower_bound=0.1, upper_bound=0.4)[0],
        ],
        "prelu": [sym.LeakyReLU(x, sym.Variable("gamma", shape=(4,)), act_type="prelu")],
        "scalars": [(1 - x) / 3 + 2 * x - 0.5, 1 / (x + 3), x - -0.5, -1 - -x],
        "arithmetic": [sym.elemwise_add(x, x * x) - sym.add_n(x, 2 * x, 3 * x) / (2 + x)],
        "spread": [
            sym.broadcast_add(x, y),
            sym.broadcast_mul(sym.broadcast_sub(x, y), sym.broadcast_div(x, 3 + y)),
            sym.broadcast_mul(x, sym.mean(x, axis=(2, 3), keepdims=True)),
            sym.broadcast_mul(x, sym.mean(x, axis=1, keepdims=True)),
            sym.broadcast_mul(x, sym.mean(sym.mean(x, axis=1, keepdims=True), 3, keepdims=True)),
        ],
        "norm": [sym.BatchNorm(x, fix_gamma=False, name="a"), sym.BatchNorm(x, axis=3, name="b")],
        "pool": [
            sym.Pooling(x, kernel=(2, 3), stride=(2, 1), pad=(1, 1), pool_type="max"),
            sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg"),
        ],
        "pool_borders": [
            sym.Pooling(
                *(x,),
                kernel=(3, 2),
                stride=(2, 3),
                pad=(1, 0),
                pool_type="avg",
                pooling_convention="full",
                count_include_pad=include,
            )
            for include in (True, False)
        ],
        "global": [
            sym.Pooling(x, global_pool=True, pool_type=kind, kernel=(1, 1))
            for kind in ("avg", "max")
        ],
        "means": [sym.mean(x, axis=(2, 3)), sym.mean(x, axis=1, keepdims=True), sym.sum(x, axis=3)],
        "softmax": [sym.softmax(x), sym.softmax(x, axis=1, temperature=2), sym.log_softmax(x)],
        "softmaxes": [sym.SoftmaxActivation(x, mode="channel"), sym.SoftmaxActivation(x)],
        "lrn": [sym.LRN(x, nsize=3, alpha=0.1, knorm=1)],
        "views": [sym.Flatten(x) + 1, sym.reshape(x, shape=(0, -3, -1)) + 1],
        "moves": [sym.transpose(x, axes=(0, 2, 3, 1)), sym.swapaxes(x, dim1=1, dim2=3)],
        "pads": [
            sym.Pad(x, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 3, 1), constant_value=2)
            for mode in ("constant", "edge", "reflect")
        ],
        "concats": [sym.concat(x, x + 1, 2 * x, dim=1), sym.concat(x, x, dim=3)],
        "splits": [
            *(part * 2 for part in sym.split(x, num_outputs=2, axis=1)),
            *sym.split(x, num_outputs=3, axis=3),
        ],
        "scaled": [
            sym.UpSampling(x, scale=3, sample_type="nearest"),
            sym.UpSampling(
                sym.split(sym.expand_dims(x, 1), num_outputs=1, axis=1, squeeze_axis=True),
                scale=2,
                sample_type="nearest",
            ),
            sym.contrib.AdaptiveAvgPooling2D(x, output_size=1),
        ],
        "resized": [
            sym.contrib.BilinearResize2D(x, height=height, width=width, align_corners=aligned)
            for height, width, aligned in ((8, 13, True), (3, 9, False), (1, 2, True))
        ],
        "deconvolution": [
            sym.Deconvolution(
                *(x,),
                num_filter=6,
                kernel=(3, 2),
                stride=(2, 3),
                pad=(1, 0),
                adj=(1, 2),
                num_group=2,
                no_bias=False,
                name="d",
            )
        ],
        "labels": [
            sym.SoftmaxOutput(x, label, **options) for options in ({}, {"preserve_shape": True})
        ],
        "one_label": [sym.SoftmaxOutput(sym.Flatten(x), label, name="softmax")],
        "label_image": [sym.SoftmaxOutput(x, label, multi_output=True)],
        "kept": [
            sym.hard_sigmoid(x) + sym.Dropout(x) * sym.BlockGrad(x) + sym.Cast(x, dtype="float32")
        ],
    }


def test_an_operator_computes_what_mxnet_does(mx):
    labels = {"labels": (3, 4, 5), "one_label": (3,), "label_image": (3, 5, 6)}
    cases = {}
    for name, outputs in _operators(mx.sym).items():
        shapes = {"data": (3, 4, 5, 6), **({"label": labels[name]} if name in labels else {})}
        cases[name] = Case(mx.sym.Group(outputs), **shapes)
    check_together(cases, BELOW, on=("gpu", "cpu"))


def test_the_largest_where_some_are_no_numbers(mx):
    """Max propagates NaN and pooling ignores it; the maximum of infinities is infinite."""
    x = mx.sym.Variable("data")
    kernels = ({"global_pool": True}, {"kernel": (70,)}, {"kernel": (9,), "stride": (2,)})
    pooled = [mx.sym.Pooling(x, pool_type="max", **each) for each in kernels]
    case = Case(mx.sym.Group([mx.sym.max(x, axis=2), *pooled]), data=(1, 4, 70))
    data = case.arrays["data"][0]
    data[0, 3], data[1, 69], data[2] = np.nan, np.nan, -np.inf
    expected = case.expected()
    assert np.isnan(expected[0]).sum() == 2
    for on in ("gpu", "cpu"):
        for pair in zip(case.run(case.network(on=on)), expected):
            np.testing.assert_array_equal(*pair, err_msg=on)


def test_a_negative_zero_is_kept_where_mxnet_keeps_it(mx):
    x = mx.sym.Variable("data")
    outputs = [mx.sym.relu(x), mx.sym.Activation(x, act_type="relu"), mx.sym.clip(x, 0, 1)]
    outputs += [each(x, zero) for each in (mx.sym.maximum, mx.sym.minimum) for zero in (0.0, -0.0)]
    case = Case(mx.sym.Group(outputs), data=(2, 9))
    case.arrays["data"][:, :4] = -0.0, 0.0, -1, 1
    for on in ("gpu", "cpu"):
        for found, expected in zip(case.run(case.network(on=on)), case.expected()):
            np.testing.assert_array_equal(found, expected, err_msg=on)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected), err_msg=on)


def test_why_an_operator_is_not_computed_is_said():
    cases = {
        ("Convolution", "kernel", "(3, 3)"): None,
        (
            "Convolution",
            "kernel",
            "(3, 3, 3)",
        ): "a kernel of 3 dimensions is not computed; only 1-D",
        ("Convolution", "kernel", "three"): "Convolution: cannot read kernel=three",
        ("Convolution", "pad", "(1, 1)"): "Convolution: required attribute kernel is not given",
        ("Pooling", "pool_type", "lp"): "pool_type lp is not computed",
        ("Pooling", "layout", "NHWC"): "layout NHWC is not computed; only NCHW is",
        ("Activation", "act_type", "log_sigmoid"): "act_type log_sigmoid is not computed",
        ("Reshape", "reverse", "True"): "reverse is not computed",
        ("Cast", "dtype", "float16"): None,
        ("Cast", "dtype", "int32"): "dtype int32 is not computed; float32, float16 are",
        ("softmax", "use_length", "True"): "use_length is not computed",
        ("_contrib_BilinearResize2D", "height", "8"): None,
        ("_contrib_BilinearResize2D", "scale_width", "2"): "scale_width is not computed; only",
        ("_contrib_BilinearResize2D", "mode", "like"): "mode like is not computed; only size is",
        ("topk", "k", "1"): "operator topk is not computed",
        ("Custom", "op_type", "mine"): "operator mine is not computed",
    }
    for (op, name, value), reason in cases.items():
        found = why_not(op, {name: value})
        assert (found is None) == (reason is None), op
        assert found is None or found.startswith(reason)
    own = {"op_type": "ece408_conv", "kernel": "(3, 3)", "num_filter": "4", "layer": "a"}
    assert why_not("Custom", own) is None
