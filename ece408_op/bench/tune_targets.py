"""Targets of `ece408 tune`: terms, shapes, problems, checkpoints and networks of MXNet's model
zoo."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..course import course_terms
from ..errors import CheckpointMismatch, InvalidSetting, InvalidSize, UnsupportedProblem
from ..operator import checkpoint
from ..operator.conv_attributes import ConvAttributes
from ..operator.graphs import graph_json
from ..operator.loading import load_mxnet
from ..problem import ConvProblem
from .shapes import BATCH, SHAPES

# Networks of MXNet's model zoo, one or two of each kind, and the side of their images.
ZOO = {
    "alexnet": 224,
    "densenet121": 224,
    "inceptionv3": 299,
    "mobilenet1.0": 224,
    "mobilenetv2_1.0": 224,
    "resnet18_v1": 224,
    "resnet18_v2": 224,
    "squeezenet1.0": 224,
    "vgg11": 224,
}
_ALL = "zoo"
# Staged calls split a batch into chunks of about this many images.
_CHUNK = 100


def problems(
    names: Iterable[str], batches: Sequence[int] = (), image: str | None = None
) -> list[ConvProblem]:
    """Return the distinct convolutions of these names, at each of the batches.

    A name is a term's, a shape's in `bench.shapes`, a problem such as `b100,c12,h33,w33,m24,k5`, a
    network's in `ZOO`, `zoo` for all networks and terms, or a checkpoint's prefix or symbol file,
    for which `image` gives channels, height and width, such as `3x224x224`. Without `batches` a
    problem keeps its own, and the others get the course's 10000 and the chunk of a staged call.

    Raises `InvalidSetting` for an unknown name or an invalid image, `InvalidSize` for a batch,
    `InvalidProblem`, and the errors of reading a checkpoint.
    """
    for batch in batches:
        if batch < 1:
            raise InvalidSize(f"{batch} is not a batch size; give 1 or more")
    found: dict[ConvProblem, None] = {}
    for name in names:
        for layer in layers(name, image):
            own = (layer.batch,) if "," in name else (_CHUNK, BATCH)
            for batch in batches or own:
                found[dataclasses.replace(layer, batch=batch, bias=False)] = None
    return list(found)


def layers(name: str, image: str | None = None) -> list[ConvProblem]:
    """Return all convolutions of a name, repeated ones too. Raises as `problems`."""
    if name in course_terms.TERMS:
        term = course_terms.TERMS[name]
        return convolutions(course_terms.network(term), (1, term.image_size, term.image_size))
    if name in SHAPES:
        return [SHAPES[name]]
    if "," in name:
        return [ConvProblem.parse(name)]
    if name == _ALL:
        return [layer for each in (*ZOO, *course_terms.TERMS) for layer in layers(each, image)]
    if name in ZOO:
        mx = load_mxnet()
        net = mx.gluon.model_zoo.vision.get_model(name)
        return convolutions(net(mx.sym.Variable("data")), (3, ZOO[name], ZOO[name]))
    path = Path(name if name.endswith(".json") else f"{name}-symbol.json")
    if not path.is_file():
        raise InvalidSetting(
            f"{name!r} is not a term ({', '.join(course_terms.TERMS)}), "
            f"a shape ({', '.join(SHAPES)}), a problem such as "
            f"b100,c12,h33,w33,m24,k5, a network ({', '.join(ZOO)}), {_ALL}, "
            f"or a checkpoint ({path} is missing)"
        )
    return convolutions(checkpoint.read_symbol(path), image_of(image, name))


def image_of(text: str | None, name: str) -> tuple[int, ...]:
    if text is None:
        raise InvalidSetting(
            f"{name} does not tell the size of its images; add --image, such as --image 3x224x224"
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise InvalidSetting(f"{text!r} is not channels, height and width such as 3x224x224")
    return tuple(map(int, text.split("x")))


def convolutions(symbol: Any, image: tuple[int, ...]) -> list[ConvProblem]:
    """Return the convolutions of a network, ours and MXNet's own, for a batch of 1 of such images.

    Its input is called data. Three-dimensional convolutions are omitted. Raises
    `CheckpointMismatch` when the network does not accept such images.
    """
    internals = symbol.get_internals()
    try:
        _, shapes, _ = internals.infer_shape_partial(data=(1, *image))
    except load_mxnet().MXNetError as error:
        raise CheckpointMismatch(
            f"the network does not accept images of {'x'.join(map(str, image))}; give their own "
            "channels, height and width"
        ) from error
    by_name = dict(zip(internals.list_outputs(), shapes))
    nodes = json.loads(symbol.tojson())["nodes"]
    found = []
    for node in nodes:
        attributes = node.get("attrs", {})
        if node["op"] == "Convolution" or graph_json.is_ours(node):
            producer, output, *_ = node["inputs"][0]
            x_shape = _shape(by_name, nodes[producer], output)
            own = {key: value for key, value in attributes.items() if key != "op_type"}
            try:
                found.append(ConvAttributes.parse(own).problem(x_shape, "float32"))
            except UnsupportedProblem:
                continue
    return found


def _shape(by_name: dict[str, Any], node: dict[str, Any], output: int) -> tuple[int, ...]:
    """Return the shape of one output of a node."""
    name = node["name"]
    names = [name] if node["op"] == "null" else [f"{name}_output", f"{name}_output{output}"]
    shape = next((by_name[each] for each in names if each in by_name), ())
    if not shape or 0 in shape:
        raise CheckpointMismatch(
            f"the shape of {name} cannot be inferred from the images; its input must be called data"
        )
    return tuple(shape)
