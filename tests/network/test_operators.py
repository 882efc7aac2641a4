"""Each operator on the CPU and in the emulator, against MXNet's on the CPU."""

import numpy as np
import pytest
from gpu_networks import NETWORKS, Case, check_together, small
from gradient_symbols import SHAPE, layers, others

from ece408_op import settings
from ece408_op.network import network_program, why_not
from ece408_op.network.builder import Builder
from ece408_op.network.machines import gpu_steps

pytestmark = pytest.mark.usefixtures("emulated")

BELOW = 2e-6


def _others(sym):
    """Return symbols by name, beside those whose gradients are compared."""
    x, label = sym.Variable("data"), sym.Variable("label")

    def leaky(kind, **attributes):
        return sym.LeakyReLU(x, act_type=kind, **attributes)

    return {
        "leaky": [leaky("selu"), leaky("rrelu", lower_bound=0.1, upper_bound=0.4)[0]],
        "clip": [sym.clip(x, 0.1, np.inf)],
        "spread": [
            sym.broadcast_mul(x, sym.mean(x, axis=1, keepdims=True)),
            sym.broadcast_mul(x, sym.mean(sym.mean(x, axis=1, keepdims=True), 3, keepdims=True)),
        ],
        "lrn": [sym.LRN(x, nsize=3, alpha=0.1, knorm=1)],
        "pads": [
            sym.Pad(x, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 3, 1), constant_value=2)
            for mode in ("constant", "edge", "reflect")
        ],
        "pool_full": [
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
        "resized": [
            sym.contrib.BilinearResize2D(x, height=height, width=width, align_corners=aligned)
            for height, width, aligned in ((8, 13, True), (3, 9, False), (1, 2, True))
        ],
        "deconvolution_uneven": [
            sym.Deconvolution(x, num_filter=6, kernel=(3, 2), stride=(2, 3), adj=(1, 2), name="d")
        ],
        "labels": [
            sym.SoftmaxOutput(x, label, **options) for options in ({}, {"preserve_shape": True})
        ],
        "label_image": [sym.SoftmaxOutput(x, label, multi_output=True)],
        "dropout": [sym.Dropout(x) + 1],
    }


def _cases(mx):
    """Return a case of each operator by name."""
    labels = {"labels": (3, 4, 5), "softmax_output": (3,), "label_image": (3, 5, 7)}
    symbols = {name: mx.sym.Group(outputs) for name, outputs in _others(mx.sym).items()}
    symbols |= {**layers(mx.sym), **others(mx.sym)}
    # oneDNN's fusion of a convolution and BatchNorm is wrong unless the axis is 1.
    del symbols["norm_pixels"]
    shapes = {name: {"label": labels[name]} if name in labels else {} for name in symbols}
    return {name: Case(each, data=SHAPE, **shapes[name]) for name, each in symbols.items()}


def test_an_operator_computes_what_mxnet_does(mx):
    check_together(_cases(mx), BELOW, on=("gpu", "cpu"))


def test_half_precision(mx, monkeypatch):
    """In half precision arrays of images are float16, and so are their copies and parts."""
    types = set()

    class Watching(Builder):
        def emit(self, plan, y, read, *arguments, **named):
            types.add((plan.name, read["x"].dtype if "x" in read else None, y.dtype))
            return super().emit(plan, y, read, *arguments, **named)

    monkeypatch.setattr(network_program, "Builder", Watching)
    monkeypatch.setattr(gpu_steps, "_FEWEST_STORED", 1)
    cases = {**_cases(mx), **{name: small(mx, name) for name in NETWORKS}}
    del cases["pool_max_none"]  # the least float16 differs from the least float32
    # Every operator reads what another one has stored.
    for case in cases.values():
        case.symbol = case.symbol(data=mx.sym.Variable("data") * 1)
    large = mx.sym.mean(mx.sym.square(mx.sym.Variable("data") * 400), axis=1)
    cases["squares beyond float16"] = Case(large, data=SHAPE)
    with settings.override(precision="float16"):
        check_together(cases, 4e-3)
    stored = {name for name, x, y in types if (x, y) == ("float16", "float16")}
    assert stored >= {"grouped", "lrn", "pool", "resize", "strided_copy"}
    assert types >= {("softmax", "float16", "float32"), ("reduce_rows", "float16", "float32")}
    assert ("general", "float16", "float32") not in types


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
        "Convolution kernel=(3, 3)": None,
        "Convolution kernel=(3, 3, 3)": "a kernel of 3 dimensions is not computed; only 1-D",
        "Convolution kernel=three": "Convolution: cannot read kernel=three",
        "Convolution pad=(1, 1)": "Convolution: required attribute kernel is not given",
        "Pooling pool_type=lp": "pool_type lp is not computed",
        "Pooling layout=NHWC": "layout NHWC is not computed; only NCHW is",
        "Activation act_type=log_sigmoid": "act_type log_sigmoid is not computed",
        "Reshape reverse=True": "reverse is not computed",
        "Cast dtype=float16": None,
        "Cast dtype=int32": "dtype int32 is not computed; float32, float16 are",
        "softmax use_length=True": "use_length is not computed",
        "_contrib_BilinearResize2D height=8": None,
        "_contrib_BilinearResize2D scale_width=2": "scale_width is not computed; only",
        "_contrib_BilinearResize2D mode=like": "mode like is not computed; only size is",
        "topk k=1": "operator topk is not computed",
        "Custom op_type=mine": "operator mine is not computed",
    }
    for case, reason in cases.items():
        op, _, attribute = case.partition(" ")
        found = why_not(op, dict([attribute.split("=")]))
        assert (found is None) == (reason is None), case
        assert found is None or found.startswith(reason)
    own = {"op_type": "ece408_conv", "kernel": "(3, 3)", "num_filter": "4", "layer": "a"}
    assert why_not("Custom", own) is None
