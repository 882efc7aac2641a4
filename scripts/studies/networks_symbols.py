"""Networks as people write them by symbols or small blocks, narrow, on small inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.operator.loading import load_mxnet

from .emulated_networks import network

mx = load_mxnet()
sym = mx.sym
_draw = np.random.default_rng(408)


def _conv(x: Any, filters: int, kernel: int = 3, stride: int = 1, **options: Any) -> Any:
    """Convolution, BatchNorm and an activation, which `act` names or leaves out by `None`."""
    act = options.pop("act", "relu")
    pad = options.pop("pad", kernel // 2)
    sizes = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2}
    x = sym.Convolution(x, num_filter=filters, no_bias=True, **sizes, **options)
    x = sym.BatchNorm(x, fix_gamma=False, eps=2e-5)
    if act == "prelu":
        return sym.LeakyReLU(x, act_type="prelu")
    return x if act is None else sym.Activation(x, act_type=act)


def _pool(x: Any, kernel: int = 2, stride: int = 2, kind: str = "max", **options: Any) -> Any:
    return sym.Pooling(x, kernel=(kernel,) * 2, stride=(stride,) * 2, pool_type=kind, **options)


def _mean(x: Any) -> Any:
    return sym.Flatten(sym.Pooling(x, kernel=(7, 7), global_pool=True, pool_type="avg"))


def _dense(x: Any, units: int, act: str | None = None) -> Any:
    x = sym.FullyConnected(x, num_hidden=units)
    return sym.Activation(x, act_type=act) if act else x


def _classes(x: Any, classes: int = 10) -> Any:
    return sym.SoftmaxOutput(_dense(x, classes), name="softmax")


def _plain(x: Any, filters: int, kernel: int = 3, stride: int = 1, **options: Any) -> Any:
    """Convolution with a bias and relu."""
    act = options.pop("act", "relu")
    pad = options.pop("pad", (kernel // 2 * (options.get("dilate", (1, 1))[0]),) * 2)
    sizes = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": pad}
    x = sym.Convolution(x, num_filter=filters, **sizes, **options)
    return sym.Activation(x, act_type=act) if act else x


# Classification in the old styles.


@network("LeNet by symbols", data=(4, 1, 28, 28))
def lenet() -> Any:
    x = sym.Variable("data")
    for filters in (8, 16):
        x = _pool(sym.Activation(sym.Convolution(x, num_filter=filters, kernel=(5, 5)), "tanh"))
    return _classes(_dense(sym.Flatten(x), 50, "tanh"))


@network("AlexNet by symbols, LRN and groups", data=(1, 3, 67, 67))
def alexnet_lrn() -> Any:
    x = _plain(sym.Variable("data"), 16, 11, 4, pad=(0, 0))
    x = _pool(sym.LRN(x, alpha=0.0001, beta=0.75, knorm=2, nsize=5), 3, 2)
    x = _pool(sym.LRN(_plain(x, 32, 5, num_group=2), nsize=5), 3, 2)
    x = _pool(_plain(_plain(x, 32), 32, num_group=2), 3, 2, pooling_convention="full")
    x = sym.Dropout(_dense(sym.Flatten(x), 64, "relu"), p=0.5)
    return _classes(x)


@network("Inception-BN by symbols", data=(1, 3, 64, 64))
def inception_bn() -> Any:
    def module(x: Any, a: int, b: int, c: int, kind: str) -> Any:
        kept = sym.Pooling(x, kernel=(3, 3), stride=(1, 1), pad=(1, 1), pool_type=kind)
        towers = [_conv(x, a, 1), _conv(_conv(x, b, 1), b), _conv(_conv(_conv(x, c, 1), c), c)]
        return sym.Concat(*towers, _conv(kept, a, 1))

    def smaller(x: Any, a: int, b: int) -> Any:
        towers = [_conv(_conv(x, a, 1), a, 3, 2), _conv(_conv(_conv(x, b, 1), b), b, 3, 2)]
        pooled = sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
        return sym.Concat(*towers, pooled)

    x = sym.Pooling(_conv(sym.Variable("data"), 8, 7, 2), kernel=(2, 2), stride=(2, 2))
    x = module(module(x, 8, 8, 8, "avg"), 8, 12, 8, "avg")
    x = module(smaller(x, 12, 8), 8, 12, 12, "avg")
    return _classes(_mean(module(smaller(x, 16, 12), 16, 16, 12, "max")))


@network("Capsules, routed by agreement", data=(2, 1, 20, 20))
def capsules() -> Any:
    def squashed(x: Any, axis: int) -> Any:
        square = sym.sum(sym.square(x), axis=axis, keepdims=True)
        return sym.broadcast_mul(square / (1 + square) / sym.sqrt(square + 1e-9), x)

    x = _plain(_plain(sym.Variable("data"), 16, 5, pad=(0, 0)), 32, 5, 2, pad=(0, 0))
    x = squashed(sym.Reshape(x, shape=(0, -1, 1, 8, 1)), 3)  # (2, 144, 1, 8, 1)
    weight = sym.Variable("capsule_weight", shape=(1, 144, 5, 6, 8))
    votes = sym.sum(sym.broadcast_mul(sym.SwapAxis(x, dim1=3, dim2=4), weight), axis=4)
    logits = sym.mean(votes, axis=3, keepdims=True) * 0
    for turn in range(2):
        coupled = sym.broadcast_mul(sym.softmax(logits, axis=2), votes)
        found = squashed(sym.sum(coupled, axis=1, keepdims=True), 3)
        if turn == 0:
            agreed = sym.sum(sym.broadcast_mul(votes, found), axis=3, keepdims=True)
            logits = logits + agreed
    return sym.sqrt(sym.sum(sym.square(found), axis=(1, 3)))


# Faces.


@network("InsightFace, ResNet-E with PReLU", data=np.round(_draw.uniform(0, 255, (2, 3, 32, 32))))
def face_resnet() -> Any:
    x = (sym.Variable("data") - 127.5) * 0.0078125
    x = _conv(sym.identity(x, name="id"), 16, act="prelu")
    for filters in (16, 24, 32):
        y = _conv(sym.BatchNorm(x, fix_gamma=False, eps=2e-5), filters, act="prelu")
        y = _conv(y, filters, 3, 2, act=None)
        gate = sym.Pooling(y, global_pool=True, pool_type="avg", kernel=(7, 7))
        gate = sym.Convolution(gate, num_filter=filters // 8, kernel=(1, 1))
        gate = sym.LeakyReLU(gate, act_type="prelu")
        gate = sym.Activation(sym.Convolution(gate, num_filter=filters, kernel=(1, 1)), "sigmoid")
        x = sym.broadcast_mul(y, gate) + _conv(x, filters, 1, 2, act=None)
    x = sym.Dropout(sym.BatchNorm(x, fix_gamma=False, eps=2e-5), p=0.4)
    return sym.BatchNorm(sym.FullyConnected(x, num_hidden=64), fix_gamma=True, eps=2e-5)


@network("MobileFaceNet", data=(2, 3, 28, 28))
def mobile_face() -> Any:
    def separable(x: Any, few: int, many: int, stride: int) -> Any:
        y = _conv(_conv(x, many, 1, act="prelu"), many, 3, stride, num_group=many, act="prelu")
        y = _conv(y, few, 1, act=None)
        return y + x if stride == 1 else y

    x = _conv((sym.Variable("data") - 0.5) * 2, 16, 3, 2, act="prelu")
    x = separable(separable(x, 16, 16, 1), 24, 32, 2)
    x = _conv(separable(x, 24, 48, 1), 48, 1, act="prelu")
    x = _conv(x, 48, 7, pad=0, num_group=48, act=None)
    return sym.L2Normalization(_dense(sym.Flatten(x), 32), mode="instance")


@network("MTCNN, proposals", data=(1, 3, 37, 41))
def mtcnn_proposals() -> Any:
    x = sym.Variable("data")
    for filters in (10, 16, 32):
        x = sym.Convolution(x, num_filter=filters, kernel=(3, 3))
        x = sym.LeakyReLU(x, act_type="prelu")
        x = _pool(x, pooling_convention="full") if filters == 10 else x
    score, box = (sym.Convolution(x, num_filter=n, kernel=(1, 1)) for n in (2, 4))
    return sym.Group([sym.SoftmaxActivation(score, mode="channel"), box])


# Detection and dense prediction.


@network("SSD by symbols", data=(1, 3, 64, 64))
def ssd() -> Any:
    x = _pool(_conv(_conv(sym.Variable("data"), 12), 16))
    layers = [_conv(_pool(x), 24)]
    while len(layers) < 3:
        layers.append(_conv(_conv(layers[-1], 12, 1), 24, 3, 2))
    layers[0] = 20 * sym.L2Normalization(layers[0], mode="channel")
    scores: list[Any] = []
    boxes: list[Any] = []
    anchors: list[Any] = []
    for k, layer in enumerate(layers):
        for found, each in ((scores, 4 * 4), (boxes, 4 * 4)):
            y = sym.Convolution(layer, num_filter=each, kernel=(3, 3), pad=(1, 1))
            found.append(sym.Flatten(sym.transpose(y, axes=(0, 2, 3, 1))))
        sizes = (0.2 + 0.2 * k, 0.3 + 0.2 * k)
        anchor = mx.contrib.sym.MultiBoxPrior(layer, sizes=sizes, ratios=(1, 2, 0.5), clip=True)
        anchors.append(sym.Flatten(anchor))
    score = sym.Reshape(sym.Concat(*scores, dim=1), shape=(0, -1, 4))
    score = sym.SoftmaxActivation(sym.transpose(score, axes=(0, 2, 1)), mode="channel")
    anchor = sym.Reshape(sym.Concat(*anchors, dim=1), shape=(0, -1, 4))
    box = sym.Concat(*boxes, dim=1)
    return mx.contrib.sym.MultiBoxDetection(
        score, box, anchor, nms_threshold=0.5, variances=(0.1, 0.1, 0.2, 0.2), nms_topk=40
    )


@network("Faster R-CNN by symbols", data=(1, 3, 64, 64), im_info=np.array([[64.0, 64, 1]]))
def faster_rcnn() -> Any:
    x = _pool(_plain(_pool(_plain(sym.Variable("data"), 12)), 16))
    y = _plain(x, 16)
    score = sym.Convolution(y, num_filter=2 * 9, kernel=(1, 1))
    box = 0.1 * sym.Convolution(y, num_filter=4 * 9, kernel=(1, 1))
    score = sym.softmax(sym.Reshape(score, shape=(0, 2, -1, 0)), axis=1)
    score = sym.Reshape(score, shape=(0, 18, -1, 0))
    sizes = {"feature_stride": 4, "scales": (2, 4, 8), "rpn_min_size": 4}
    counts = {"rpn_pre_nms_top_n": 60, "rpn_post_nms_top_n": 6}
    info = sym.Variable("im_info")
    rois = mx.contrib.sym.Proposal(score, box, info, threshold=0.7, **sizes, **counts)
    x = sym.ROIPooling(x, rois, pooled_size=(5, 5), spatial_scale=0.25)
    x = _dense(sym.Flatten(x), 32, "relu")
    return sym.Group([rois, sym.softmax(_dense(x, 4)), _dense(x, 16)])


@network("FCN-8s by symbols, with Crop", data=(1, 3, 48, 40))
def fcn_8s() -> Any:
    def larger(x: Any, scale: int) -> Any:
        sizes = {"kernel": (2 * scale,) * 2, "stride": (scale,) * 2}
        return sym.Deconvolution(x, num_filter=5, num_group=1, no_bias=True, **sizes)

    data = sym.Variable("data")
    x = _pool(_plain(data, 12, pad=(20, 20)))
    skips = []
    for filters in (16, 16, 24):
        x = _pool(_plain(x, filters), pooling_convention="full")
        skips.append(_plain(x, 5, 1, act=None))
    y = skips.pop()
    while skips:
        y = larger(y, 2)
        skip = skips.pop()
        y = sym.Crop(y, skip, offset=(1, 1)) + skip
    y = sym.Crop(larger(y, 4), data, offset=(12, 12))
    return sym.SoftmaxOutput(y, multi_output=True, use_ignore=True, name="softmax")


@network("U-Net", data=(1, 1, 48, 48))
def unet() -> Any:
    x, skips = sym.Variable("data"), []
    for filters in (8, 12, 16):
        x = _conv(_conv(x, filters), filters)
        skips.append(x)
        x = _pool(x)
    x = _conv(x, 24)
    while skips:
        x = sym.Deconvolution(x, num_filter=12, kernel=(2, 2), stride=(2, 2))
        x = _conv(_conv(sym.Concat(x, skips.pop()), 12), 12)
    return sym.sigmoid(sym.Convolution(x, num_filter=1, kernel=(1, 1)))


@network("Stacked hourglass", data=(1, 3, 32, 32))
def hourglass() -> Any:
    def bottle(x: Any) -> Any:
        return x + _conv(_conv(_conv(x, 8, 1), 8), 16, 1, act=None)

    def nested(x: Any, depth: int) -> Any:
        low = bottle(_pool(x))
        low = bottle(nested(low, depth - 1) if depth else low)
        return bottle(x) + sym.UpSampling(low, scale=2, sample_type="nearest", num_args=1)

    x, heads = _conv(sym.Variable("data"), 16, 7, 2), []
    for _ in range(2):
        y = _conv(nested(x, 2), 16, 1)
        heads.append(_plain(y, 6, 1, act=None))
        x = x + _plain(y, 16, 1, act=None) + _plain(heads[-1], 16, 1, act=None)
    return sym.Group(heads)


@network("FlowNet-C, correlation", left=(1, 3, 32, 32), right=(1, 3, 32, 32))
def flow_net() -> Any:
    weights = [sym.Variable(f"shared{k}_weight") for k in range(2)]
    sides = []
    for x in map(sym.Variable, ("left", "right")):
        for weight in weights:
            x = _plain(x, 12, 5, 2, weight=weight, no_bias=True, act=None)
            x = sym.LeakyReLU(x, slope=0.1)
        sides.append(x)
    x = sym.Correlation(*sides, kernel_size=1, max_displacement=3, stride1=1, stride2=1, pad_size=3)
    low = _plain(sym.Concat(sym.LeakyReLU(x, slope=0.1), _plain(sides[0], 8, 1)), 16, 3, 2)
    flow = _plain(low, 2, act=None)
    up = [
        sym.Deconvolution(each, num_filter=n, kernel=(4, 4), stride=(2, 2), pad=(1, 1))
        for each, n in ((flow, 2), (low, 12))
    ]
    return sym.Group([flow, _plain(sym.Concat(*up, sides[0]), 2, act=None)])


@network("Deformable convolution by symbols", data=(1, 3, 24, 24))
def deformable() -> Any:
    x = _conv(_conv(sym.Variable("data"), 12, 3, 2), 16)
    offset = 0.3 * sym.Convolution(x, num_filter=18, kernel=(3, 3), pad=(1, 1))
    x = mx.contrib.sym.DeformableConvolution(x, offset, num_filter=16, kernel=(3, 3), pad=(1, 1))
    return _classes(_mean(sym.Activation(x, "relu")))


# Images out.


@network("DCGAN, generator", noise=(2, 24, 1, 1))
def dcgan_generator() -> Any:
    x = sym.Variable("noise")
    for k, filters in enumerate((32, 24, 16)):
        sizes = {"kernel": (4, 4), "stride": (min(k, 1) + 1,) * 2, "pad": (min(k, 1),) * 2}
        x = sym.Deconvolution(x, num_filter=filters, no_bias=True, **sizes)
        x = sym.Activation(sym.BatchNorm(x, fix_gamma=True, eps=1e-5 + 1e-12), "relu")
    x = sym.Deconvolution(x, num_filter=3, kernel=(4, 4), stride=(2, 2), pad=(1, 1), no_bias=True)
    return sym.Activation(x, "tanh")


@network("DCGAN, discriminator", data=(2, 3, 32, 32))
def dcgan_discriminator() -> Any:
    x = sym.Variable("data")
    for k, filters in enumerate((12, 16, 24)):
        sizes = {"kernel": (4, 4), "stride": (2, 2), "pad": (1, 1)}
        x = sym.Convolution(x, num_filter=filters, no_bias=True, **sizes)
        x = sym.LeakyReLU(sym.BatchNorm(x) if k else x, act_type="leaky", slope=0.2)
    x = sym.Flatten(sym.Convolution(x, num_filter=1, kernel=(4, 4), no_bias=True))
    return sym.LogisticRegressionOutput(x, sym.Variable("label"), name="real")


@network("Style transfer", data=np.round(_draw.uniform(0, 255, (1, 3, 40, 36))))
def style_transfer() -> Any:
    def padded(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        width = (0, 0, 0, 0) + (kernel // 2,) * 4
        x = sym.Pad(x, mode="reflect", pad_width=width)
        return sym.Convolution(x, num_filter=filters, kernel=(kernel,) * 2, stride=(stride,) * 2)

    def normal(x: Any) -> Any:
        return sym.Activation(sym.InstanceNorm(x, eps=1e-5), "relu")

    x = normal(padded(sym.Variable("data") / 255, 8, 9))
    x = normal(padded(normal(padded(x, 12, 3, 2)), 16, 3, 2))
    for _ in range(2):
        x = x + sym.InstanceNorm(padded(normal(padded(x, 16, 3)), 16, 3))
    for filters in (12, 8):
        x = normal(padded(sym.UpSampling(x, scale=2, sample_type="nearest"), filters, 3))
    return (sym.tanh(padded(x, 3, 9)) + 1) * 127.5


@network("Super-resolution, sub-pixels", data=(1, 1, 20, 24))
def super_resolution() -> Any:
    x = _plain(_plain(sym.Variable("data"), 16, 5), 12)
    x = sym.Reshape(_plain(x, 4, act=None), shape=(0, -4, -1, 4, 0, 0))
    x = sym.Reshape(x, shape=(0, 0, -4, 2, 2, 0, 0))
    return sym.Reshape(sym.transpose(x, axes=(0, 1, 4, 2, 5, 3)), shape=(0, 0, -3, -3))
