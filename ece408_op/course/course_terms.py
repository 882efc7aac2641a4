"""The course's terms, their networks, and the models shipped with the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointMissing, UnknownModel
from ..files import resources
from ..operator import checkpoint
from ..operator.checkpoint import Checkpoint
from ..operator.loading import load_mxnet

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
        """The default model of milestones with our operator."""
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
    """Return the term called `name`. Raises `UnknownModel`."""
    if name not in TERMS:
        raise UnknownModel(f"unknown term {name!r}; there are: {', '.join(TERMS)}")
    return TERMS[name]


def term_of(model: str) -> Term:
    """Return the term of a model named without a term: the one that has it, else the default
    one."""
    having = [term for term in TERMS.values() if model in term.models]
    return having[0] if len(having) == 1 else TERMS[DEFAULT_TERM]


def check_model(term: Term, model: str) -> None:
    """Raise `UnknownModel` unless the term has this model."""
    if model not in term.models:
        raise UnknownModel(
            f"unknown model {model!r}; term {term.name} has: {', '.join(term.models)}"
        )


def network(term: Term, convolution: str = "Convolution") -> Any:
    """Return the term's network as a Symbol.

    `convolution` is MXNet's own `Convolution`, or the name of a registered custom operator with the
    same attributes.
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


def load_model(term: Term, model: str, folder: Path | None = None) -> Checkpoint:
    """Load a term's model, from `folder` or from the package.

    A model without its own parameter file uses the baseline's. Parameters are checked against the
    symbol, for images of the term's size.

    Raises `UnknownModel`, `CheckpointMissing` or `CheckpointMismatch`.
    """
    check_model(term, model)
    folder = folder or resources.models_dir() / term.name
    prefix = folder / model
    symbol_file = folder / f"{model}-symbol.json"
    if not symbol_file.is_file():
        raise CheckpointMissing(
            f"no model {model}: {symbol_file} is not there; give the folder of its checkpoint, "
            "or install the package again"
        )
    loaded = checkpoint.read(prefix, symbol_file, _parameter_file(folder, model))
    image = (1, 1, term.image_size, term.image_size)
    checkpoint.check_parameters(loaded, {"data": image})
    return loaded


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
