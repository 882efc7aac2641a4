"""Reader and writer of checkpoints in MXNet's format, including the course's."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointMismatch, CheckpointMissing
from ..files.cachedir import atomic_path
from .gpu_support import refuse_current_context
from .graphs import graph_json
from .graphs.graph_json import Graph, Node, Place, as_ours, as_text
from .loading import load_mxnet

# The operator that the course's students implement inside MXNet.
COURSE_OPERATOR = "New"
# The operator of older files whose nodes hold the parts for the GPU.
_OLD_PART = "ece408_network"


@dataclass(frozen=True)
class Checkpoint:
    """A network, its parameters, and the prefix of their files."""

    prefix: Path
    symbol: Any
    arg_params: dict[str, Any]
    aux_params: dict[str, Any]


def load_checkpoint(prefix: str | Path, epoch: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """`mx.model.load_checkpoint`, also for networks with the course's operator `New`.

    Reads PREFIX-symbol.json and PREFIX-EPOCH.params, with four digits for EPOCH; `New`, which MXNet
    does not have, becomes `ece408_conv`. Returns the Symbol and the dicts of arguments and
    auxiliary states, in their stored types.

    Raises `CheckpointMissing` and `CheckpointMismatch`, and `NoUsableGpu` under `with mx.gpu():` if
    MXNet has no code for the GPU.
    """
    refuse_current_context()
    symbol_file = Path(f"{prefix}-symbol.json")
    parameter_file = Path(f"{prefix}-{epoch:04d}.params")
    loaded = read(Path(prefix), symbol_file, parameter_file)
    return loaded.symbol, loaded.arg_params, loaded.aux_params


def read(prefix: Path, symbol_file: Path, parameter_file: Path) -> Checkpoint:
    """Load the checkpoint from two files with any names. Otherwise as `load_checkpoint`."""
    for path in (symbol_file, parameter_file):
        if not path.is_file():
            raise CheckpointMissing(f"{path} is not there; check the folder, prefix and epoch")
    return Checkpoint(prefix, read_symbol(symbol_file), *_read_parameters(parameter_file))


def read_symbol(path: Path) -> Any:
    """Load the network in a symbol file, which may use `New`. Raises `CheckpointMismatch`."""
    mx = load_mxnet()
    try:
        return mx.sym.load_json(_replace_course_operator(path.read_text(encoding="utf-8")))
    except (mx.MXNetError, ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{path} is not a network that MXNet can read: {_last_line(error)}"
        ) from error


def _replace_course_operator(text: str) -> str:
    """Return the network's JSON with `New` replaced by `ece408_conv`.

    `New` has no bias; its weight is the second input.
    """
    graph = json.loads(text)
    for number, node in enumerate(graph["nodes"]):
        if node["op"] == COURSE_OPERATOR:
            # MXNet's versions use three names for the attributes.
            key = next((key for key in ("attrs", "param", "attr") if key in node), "attrs")
            graph["nodes"][number] = as_ours(node, node.pop(key, {}), no_bias="True")
    return as_text(graph)


def _read_parameters(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    mx = load_mxnet()
    try:
        arrays = mx.nd.load(str(path))
    # MXNet's message may quote bytes that are not text; this raises ValueError.
    except (mx.MXNetError, ValueError) as error:
        raise CheckpointMismatch(
            f"{path} is not a parameter file, or is cut short; copy it again"
        ) from error
    if not isinstance(arrays, dict):
        raise CheckpointMismatch(f"{path} holds arrays without names; expected a dict")
    params: dict[str, dict[str, Any]] = {"arg": {}, "aux": {}}
    for key, array in arrays.items():
        kind, _, name = key.partition(":")
        if kind not in params or not name:
            raise CheckpointMismatch(f"{path} holds {key!r}; expected arg:NAME or aux:NAME")
        params[kind][name] = array
    return params["arg"], params["aux"]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def check_parameters(checkpoint: Checkpoint, inputs: dict[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointMismatch` unless every parameter is present and has the required shape.

    `inputs` are the shapes of the network's inputs by name; labels may be omitted.
    """
    mx = load_mxnet()
    symbol = checkpoint.symbol
    try:
        shapes, _, aux_shapes = symbol.infer_shape_partial(**inputs)
    except (mx.MXNetError, TypeError, ValueError) as error:
        raise CheckpointMismatch(
            f"{checkpoint.prefix}: the network does not take input of {inputs}: {_last_line(error)}"
        ) from error
    wanted = dict(zip(symbol.list_arguments(), shapes))
    wanted.update(zip(symbol.list_auxiliary_states(), aux_shapes))
    given = {**checkpoint.arg_params, **checkpoint.aux_params}
    for name, shape in wanted.items():
        if name in inputs or name.endswith("_label"):
            continue
        if name not in given:
            raise CheckpointMismatch(
                f"{checkpoint.prefix}: parameter {name} is missing from the parameter file"
            )
        if given[name].shape != shape:
            raise CheckpointMismatch(
                f"{checkpoint.prefix}: parameter {name} has shape {given[name].shape}, but the "
                f"network needs {shape}"
            )


def save_parameters(path: Path, arg_params: dict[str, Any]) -> None:
    """Write a parameter file in MXNet's format, as float16: half the size, the same predictions.

    Raises `CacheUnwritable`.
    """
    mx = load_mxnet()
    with atomic_path(path) as temporary:
        arrays = {f"arg:{name}": value.astype("float16") for name, value in arg_params.items()}
        mx.nd.save(str(temporary), arrays)


def save_symbol(path: Path, symbol: Any) -> None:
    """Write a network in MXNet's format. Raises `CacheUnwritable`."""
    with atomic_path(path) as temporary:
        temporary.write_text(symbol.tojson() + "\n", encoding="utf-8")


def install(mxnet: Any) -> None:
    """Make MXNet read files of older versions, in which a node holds each part."""
    for module in (mxnet.symbol, mxnet.symbol.symbol):
        module.load_json = _reading(module.load_json)
        module.load = _loading(module.load)


def _reading(method: Any) -> Any:
    @functools.wraps(method)
    def load_json(json_str: Any) -> Any:
        if isinstance(json_str, str) and f'"{_OLD_PART}"' in json_str:
            json_str = as_text(_opened(json.loads(json_str)))
        return method(json_str)

    return load_json


def _loading(method: Any) -> Any:
    @functools.wraps(method)
    def load(fname: Any) -> Any:
        from mxnet import MXNetError
        from mxnet.symbol import load_json

        try:
            return method(fname)
        except MXNetError as error:
            # MXNet does not have that operator.
            if _OLD_PART not in str(error):
                raise
            with open(fname, encoding="utf-8") as file:
                return load_json(file.read())

    return load


def _opened(graph: Graph) -> Graph:
    """Return the graph with the marked contents of such nodes in their place."""
    nodes: list[Node] = []
    moved: list[Place] = []
    for number, node in enumerate(graph["nodes"]):
        node = graph_json.inputs_moved(node, moved)
        if node["op"] != _OLD_PART:
            moved.append(len(nodes))
            nodes.append(node)
            continue
        inner, sources = node["subgraphs"][0], iter(node["inputs"])
        places: list[Place] = []
        for each in inner["nodes"]:
            if each["op"] == "null":
                places.append([next(sources)])
                continue
            places.append(len(nodes))
            each = graph_json.inputs_moved(each, places)
            nodes.append(graph_json.with_attributes(each, {graph_json.MARK: str(number)}))
        moved.append([graph_json.follow(head, places) for head in inner["heads"]])
    return graph_json.rebuilt(graph, nodes, moved)
