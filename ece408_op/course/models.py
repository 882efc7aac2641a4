"""The course's terms, their networks, and checkpoints in MXNet's format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import resources
from ..cachedir import atomic_path
from ..errors import CheckpointMismatch, CheckpointMissing, UnknownModel
from ..mxnet_import import load_mxnet

BASELINE = "baseline"
DEFAULT_TERM = "2019fa"


@dataclass(frozen=True)
class Term:
    """One configuration of the course.

    Its network: for each of `filters` a 5x5 convolution without bias, the first one followed by
    tanh and 2x2 max pooling; then dense layers of `hidden` (tanh) and 10 units, and softmax.
    """

    name: str
    image_size: int
    filters: tuple[int, ...]
    hidden: int
    models: tuple[str, ...]

    @property
    def default_model(self) -> str:
        """The model that milestones with an operator of our own run unless told otherwise."""
        return self.models[1]


TERMS = {
    term.name: term
    for term in (
        Term("2017fa", 28, (50,), 500, (BASELINE, "ece408-high", "ece408-low")),
        Term("2018sp", 64, (6, 16), 140, (BASELINE, "ece408")),
        Term("2019sp", 48, (6, 16), 140, (BASELINE, "ece408")),
        Term("2019fa", 70, (12, 24), 160, (BASELINE, "ece408")),
    )
}


def find_term(name: str) -> Term:
    """The term called `name`. Raises `UnknownModel`."""
    if name not in TERMS:
        raise UnknownModel(f"unknown term {name!r}; there are: {', '.join(TERMS)}")
    return TERMS[name]


def network(term: Term, convolution: str = "Convolution") -> Any:
    """The term's network as a Symbol.

    `convolution` is MXNet's own `Convolution`, or the name of a registered custom operator with
    its attributes.
    """
    sym = load_mxnet().sym
    net = sym.Variable("data")
    for index, filters in enumerate(term.filters, start=1):
        attributes = {"kernel": (5, 5), "num_filter": filters, "no_bias": True}
        name = f"conv{index}"
        if convolution == "Convolution":
            net = sym.Convolution(net, name=name, **attributes)
        else:
            net = sym.Custom(net, op_type=convolution, name=name, layer=name, **attributes)
        if index == 1:
            net = sym.Activation(net, act_type="tanh", name="tanh1")
            net = sym.Pooling(net, pool_type="max", kernel=(2, 2), stride=(2, 2), name="pool1")
    net = sym.flatten(net, name="flatten")
    net = sym.FullyConnected(net, num_hidden=term.hidden, name="fc1")
    net = sym.Activation(net, act_type="tanh", name="tanh2")
    net = sym.FullyConnected(net, num_hidden=10, name="fc2")
    return sym.SoftmaxOutput(net, name="softmax")


@dataclass(frozen=True)
class Checkpoint:
    """A network with its parameters, and the prefix of the files that they came from."""

    prefix: Path
    symbol: Any
    arg_params: dict[str, Any]
    aux_params: dict[str, Any]


def load_model(term: Term, model: str, folder: Path | None = None) -> Checkpoint:
    """A term's model, from `folder` or from those that come with the package.

    A model without a parameter file of its own has the baseline's. Parameters are checked
    against the symbol, for images of the term's size.

    Raises `UnknownModel`, `CheckpointMissing` or `CheckpointMismatch`.
    """
    if model not in term.models:
        raise UnknownModel(
            f"unknown model {model!r}; term {term.name} has: {', '.join(term.models)}"
        )
    folder = folder or resources.models_dir() / term.name
    prefix = folder / model
    symbol_file = folder / f"{model}-symbol.json"
    if not symbol_file.is_file():
        raise CheckpointMissing(
            f"no model {model}: {symbol_file} is not there; give the folder of its checkpoint, "
            "or install the package anew"
        )
    checkpoint = _read(prefix, symbol_file, _parameter_file(folder, model))
    image = (1, 1, term.image_size, term.image_size)
    check_parameters(checkpoint, {"data": image})
    return checkpoint


def _parameter_file(folder: Path, model: str) -> Path:
    for prefix in (model, BASELINE):
        pattern = re.compile(re.escape(prefix) + r"-\d{4}\.params")
        found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
        if found:
            return found[-1]
    raise CheckpointMissing(
        f"no parameters for model {model}: {folder / model}-0001.params (or another epoch) is "
        "not there"
    )


def _read(prefix: Path, symbol_file: Path, parameter_file: Path) -> Checkpoint:
    mx = load_mxnet()
    try:
        symbol = mx.sym.load(str(symbol_file))
    # MXNet's message may quote bytes that are no text, a ValueError then.
    except (mx.MXNetError, ValueError) as error:
        raise CheckpointMismatch(
            f"{symbol_file} is not a network that MXNet can read: {_first_line(error)}"
        ) from error
    try:
        arrays = mx.nd.load(str(parameter_file))
    except (mx.MXNetError, ValueError) as error:
        raise CheckpointMismatch(
            f"{parameter_file} is not a parameter file, or is cut short; copy it anew"
        ) from error
    if not isinstance(arrays, dict):
        raise CheckpointMismatch(f"{parameter_file} holds arrays without names; expected a dict")
    params: dict[str, dict[str, Any]] = {"arg": {}, "aux": {}}
    for key, array in arrays.items():
        kind, _, name = key.partition(":")
        if kind not in params or not name:
            raise CheckpointMismatch(f"{parameter_file} holds {key!r}; expected arg:NAME, aux:NAME")
        params[kind][name] = array.astype("float32")
    return Checkpoint(prefix, symbol, params["arg"], params["aux"])


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def check_parameters(checkpoint: Checkpoint, inputs: dict[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointMismatch` unless every parameter is there with the shape that it needs."""
    mx = load_mxnet()
    symbol = checkpoint.symbol
    try:
        shapes, _, aux_shapes = symbol.infer_shape_partial(**inputs)
    except (mx.MXNetError, TypeError, ValueError) as error:
        raise CheckpointMismatch(
            f"{checkpoint.prefix}: the network does not take input of {inputs}: "
            f"{_first_line(error)}"
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
    """Write a parameter file in MXNet's format, as float16: half the size, the same answers."""
    mx = load_mxnet()
    with atomic_path(path) as temporary:
        arrays = {f"arg:{name}": value.astype("float16") for name, value in arg_params.items()}
        mx.nd.save(str(temporary), arrays)


def save_symbol(path: Path, symbol: Any) -> None:
    """Write a network in MXNet's format."""
    with atomic_path(path) as temporary:
        temporary.write_text(symbol.tojson() + "\n", encoding="utf-8")
