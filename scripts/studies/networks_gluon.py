"""Networks of GluonCV 0.10 and GluonNLP 0.10, on small images, clips and sentences."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ece408_op.operator.loading import load_mxnet

from .emulated_networks import CASES, Case, Inputs

mx = load_mxnet()
# GluonCV asks for these old names.
np.int, np.float = int, float  # type: ignore[attr-defined]


def _get(name: str, options: dict[str, Any]) -> Any:
    from gluoncv import model_zoo

    # Networks that do not know this option ignore it, or take any keyword for a block's.
    try:
        return model_zoo.get_model(name, pretrained=False, pretrained_base=False, **options)
    except TypeError:
        return model_zoo.get_model(name, pretrained=False, **options)


def _add(kind: str, *names: str, data: tuple[int, ...], **options: Any) -> None:
    for name in names:
        build = functools.partial(_get, name, options)
        CASES[name] = Case(f"GluonCV, {kind}", build, {"data": data}, "gluoncv")


_SMALL, _MIDDLE, _LARGE = (2, 3, 32, 32), (2, 3, 64, 64), (1, 3, 96, 96)
_add(
    "classification",
    *("cifar_resnet20_v2", "cifar_resnext29_32x4d", "cifar_residualattentionnet56"),
    *("mobilenet0.25", "mobilenetv2_0.5", "mobilenetv3_small", "resnet18_v1b", "resnet50_v1d"),
    *("resnet18_v2", "resnext50_32x4d", "se_resnet50_v1", "shufflenet_v1", "shufflenet_v2"),
    "vgg11_bn",
    data=_SMALL,
)
_add(
    "classification",
    *("dla34", "hrnet_w18_small_v1_c", "resnest14", "resnest50", "alexnet"),
    data=_MIDDLE,
)
_add("classification", "nasnet_4_1056", "xception", data=_LARGE)
_add(
    "classification",
    *("densenet121", "squeezenet1.1", "googlenet", "inceptionv3"),
    data=(1, 3, 224, 224),
)
_add("classification", "residualattentionnet56", data=(1, 3, 224, 224))
_add(
    "segmentation",
    *("fcn_resnet50_voc", "psp_resnet50_ade", "deeplab_resnet50_citys", "danet_resnet50_citys"),
    data=(1, 3, 64, 64),
    crop_size=64,
    base_size=64,
)
_add("segmentation", "icnet_resnet50_citys", data=_LARGE, crop_size=96, base_size=96)
_add("segmentation", "fastscnn_citys", data=_LARGE, crop_size=96, base_size=96)
_add("segmentation", "hrnet_w18_small_v1_s", data=(1, 3, 64, 64))
_add("detection", "ssd_512_mobilenet1.0_voc", "ssd_512_resnet18_v1_voc", data=_LARGE)
_add("detection", "ssd_300_vgg16_atrous_voc", data=(1, 3, 300, 300))
_add("detection", "yolo3_mobilenet0.25_voc", "yolo3_darknet53_voc", data=(1, 3, 64, 64))
_add(
    "detection",
    *("center_net_resnet18_v1b_voc", "center_net_mobilenetv3_small_duc_voc"),
    *("center_net_dla34_voc", "center_net_resnet18_v1b_dcnv2_voc"),
    data=(1, 3, 64, 64),
)
_add(
    "pose",
    *("simple_pose_resnet18_v1b", "mobile_pose_mobilenetv3_small", "mobile_pose_resnet18_v1b"),
    data=(1, 3, 64, 48),
)
_add("pose", "alpha_pose_resnet101_v1b_coco", data=(1, 3, 64, 64))
_add("depth", "monodepth2_resnet18_kitti_stereo_640x192", data=_MIDDLE)
_add(
    "action recognition, clips",
    *("i3d_resnet50_v1_kinetics400", "i3d_slow_resnet101_f16s4_kinetics700"),
    *("i3d_nl5_resnet50_v1_kinetics400", "r2plus1d_resnet18_kinetics400"),
    data=(1, 3, 8, 32, 32),
)
_add("action recognition, clips", "p3d_resnet50_kinetics400", data=(1, 3, 16, 64, 64))
_add("action recognition, clips", "i3d_inceptionv1_kinetics400", data=(1, 3, 16, 32, 32))
_add("action recognition, clips", "c3d_kinetics400", data=(1, 3, 16, 112, 112))
_add("action recognition, clips", "slowfast_4x16_resnet50_kinetics400", data=(1, 3, 36, 64, 64))


def _proposing(name: str) -> Any:
    """A detector that looks at few proposals."""
    net = _get(name, {})
    net.rpn._test_pre_nms, net.rpn._test_post_nms = 60, 6
    net._rpn_test_post_nms = net._rcnn_max_dets = 6
    return net


for _name in (
    *("faster_rcnn_resnet50_v1b_voc", "faster_rcnn_fpn_resnet50_v1b_coco"),
    "mask_rcnn_fpn_resnet18_v1b_coco",
):
    CASES[_name] = Case(
        "GluonCV, detection", functools.partial(_proposing, _name), {"data": _LARGE}, "gluoncv"
    )


CASES["siamrpn_alexnet_v2_otb15"] = Case(
    "GluonCV, tracking",
    functools.partial(_get, "siamrpn_alexnet_v2_otb15", {}),
    {"template": (1, 3, 127, 127), "search": (1, 3, 287, 287)},
    "gluoncv",
)


def _bert_encoder() -> Any:
    from gluonnlp.model import bert

    return bert.BERTEncoder(
        units=48, hidden_size=96, num_layers=3, num_heads=4, max_length=32, dropout=0.1
    )


def _bert(**options: Any) -> Any:
    from gluonnlp.model import BERTModel

    sizes = {"vocab_size": 90, "token_type_vocab_size": 2, "units": 48, "embed_size": 48}
    parts = {"use_decoder": False, "use_classifier": False}
    return BERTModel(_bert_encoder(), **sizes, **parts, **options)


def _bert_classifier() -> Any:
    from gluonnlp.model import BERTClassifier

    return BERTClassifier(_bert(), num_classes=3, dropout=0.1)


def _roberta() -> Any:
    from gluonnlp.model import RoBERTaModel

    sizes = {"vocab_size": 90, "units": 48, "embed_size": 48}
    return RoBERTaModel(_bert_encoder(), use_decoder=False, **sizes)


def _distilbert() -> Any:
    from gluonnlp.model import DistilBERTModel

    return DistilBERTModel(_bert_encoder(), vocab_size=90, units=48, embed_size=48)


def _transformer_encoder() -> Any:
    from gluonnlp.model import TransformerEncoder

    return TransformerEncoder(
        units=48, hidden_size=96, num_layers=2, num_heads=4, max_length=32, dropout=0.1
    )


def _convolutional_encoder() -> Any:
    from gluonnlp.model import ConvolutionalEncoder

    return ConvolutionalEncoder(
        embed_size=12, num_filters=(8, 12, 16), ngram_filter_sizes=(1, 2, 3), num_highway=2
    )


_WORDS, _TYPES, _LENGTHS = "words", "types", "lengths"


def _sentences(tokens: int, *names: str) -> Inputs:
    rng = np.random.default_rng(408)
    given = {
        _WORDS: rng.integers(0, 90, (2, tokens)).astype(np.float32),
        _TYPES: rng.integers(0, 2, (2, tokens)).astype(np.float32),
        _LENGTHS: np.array([tokens, tokens - 5], np.float32),
    }
    return {name: given[name] for name in names or given}


def _add_text(name: str, kind: str, build: Any, inputs: Inputs) -> None:
    CASES[name] = Case(f"GluonNLP, {kind}", build, inputs, "gluonnlp")


_add_text("bert", "BERT", _bert, _sentences(12))
_add_text("bert_pooler_off", "BERT", functools.partial(_bert, use_pooler=False), _sentences(20))
_add_text(
    "bert_int_words",
    "BERT, words as int32",
    _bert,
    {
        name: value.astype(np.int32) if name != _LENGTHS else value
        for name, value in _sentences(12).items()
    },
)
_add_text("bert_classifier", "BERT with a classifier", _bert_classifier, _sentences(12))
_add_text("roberta", "RoBERTa", _roberta, _sentences(12, _WORDS, _LENGTHS))
_add_text("distilbert", "DistilBERT", _distilbert, _sentences(12, _WORDS, _LENGTHS))
_add_text("transformer_encoder", "transformer", _transformer_encoder, {"words": (2, 12, 48)})
_add_text(
    "convolutional_encoder", "characters' encoder", _convolutional_encoder, {"words": (9, 4, 12)}
)
