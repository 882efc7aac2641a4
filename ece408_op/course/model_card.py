"""Model card of the shipped models (models/README.md), generated from measurements."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..files import markdown, resources
from ..operator.checkpoint import Checkpoint
from ..operator.loading import load_mxnet
from . import course_terms, scoring, training
from .course_terms import BASELINE, Term
from .dataset import fashion_data

SIZES = (100, 1000, 10000)
_BATCH_SIZE = 1000
PERTURBATION = 0.01
_PERTURBATION_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Card:
    """One model, measured.

    `correctness` is for the first 100, 1000 and 10000 test images. `changed` counts the test
    images, of 10000, whose predicted class changes when every weight of the first convolution is
    multiplied by 1 + 0.01 z, z standard normal, for each of three seeds.
    """

    term: Term
    model: str
    correctness: tuple[float, ...]
    changed: tuple[int, ...]


def measure(term: Term, model: str) -> Card:
    """Score one of the shipped models. Raises the errors of data, checkpoint and operator."""
    images, labels = fashion_data.load("t10k", term.image_size)
    loaded = course_terms.load_model(term, model)
    answers = _answers(loaded, loaded.arg_params, images)
    right = answers == labels
    changed = tuple(
        int(np.sum(_answers(loaded, _perturbed(loaded, seed), images) != answers))
        for seed in _PERTURBATION_SEEDS
    )
    return Card(term, model, tuple(float(right[:size].mean()) for size in SIZES), changed)


def _answers(loaded: Checkpoint, arg_params: dict[str, Any], images: np.ndarray) -> np.ndarray:
    with errors.surfaced():
        return scoring.answers(loaded.symbol, arg_params, {}, images, _BATCH_SIZE)


def _perturbed(loaded: Checkpoint, seed: int) -> dict[str, Any]:
    weight = loaded.arg_params["conv1_weight"].asnumpy().astype(np.float32)
    noise = np.random.default_rng(seed).standard_normal(weight.shape)
    changed = load_mxnet().nd.array(weight * (1 + PERTURBATION * noise))
    return {**loaded.arg_params, "conv1_weight": changed}


def table(cards: list[Card]) -> str:
    """Return the cards as a Markdown table."""
    head = ["term", "model", *(f"at {size}" for size in SIZES), "answers changed"]
    rows = [
        [card.term.name, card.model, *card.correctness, ", ".join(map(str, card.changed))]
        for card in cards
    ]
    return markdown.table(head, rows)


def document(cards: list[Card]) -> str:
    """Return the text of models/README.md. Raises `CheckpointMissing` if the models are missing."""
    terms = list(dict.fromkeys(card.term.name for card in cards))
    recipes = dict.fromkeys(training.recipe_for(card.term, card.model) for card in cards)
    return _TEXT.format(
        table=table(cards),
        commands="\n".join(f"    python scripts/train.py {_arguments(r)}" for r in recipes),
        recipes="\n".join(f"- {_describe(recipe)}" for recipe in recipes),
        checksums="\n".join(_checksum(path) for term in terms for path in _files(term)),
    )


def _arguments(recipe: training.Recipe) -> str:
    return recipe.term + ("" if recipe.model == BASELINE else f" --model {recipe.model}")


def _describe(recipe: training.Recipe) -> str:
    length = f"{recipe.epochs} epochs" if recipe.steps is None else f"{recipe.steps} updates"
    return (
        f"{recipe.term} {recipe.model}: {length}, batch {recipe.batch_size}, learning rate "
        f"{recipe.learning_rate:g}, weight decay {recipe.decay:g}, first layer "
        f"x{recipe.first_layer_scale:g}, seed {recipe.seed}"
    )


def _files(term: str) -> list[Path]:
    return sorted(path for path in (resources.models_dir() / term).iterdir() if path.is_file())


def _checksum(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"    {digest}  {path.parent.name}/{path.name}"


_TEXT = """\
# Models

Checkpoints of the course's networks in MXNet's format, written by `scripts/train.py`; this page
was written by `ece408 models --output models/README.md`. Nothing here comes from the course: its
own weights are not available.

The models of a term share the parameter file `baseline-*.params`, except `ece408-low`, which has
its own. Parameters are float16. `Module.load` of a stock MXNet opens the baselines; the others
use the operator `ece408_conv`, so import `ece408_op` first.

{table}

Correctness is on the first 100, 1000 and 10000 test images of Fashion-MNIST. The last column is
how sensitive a model is to a convolution that is slightly off: of the 10000 answers, how many
change when each weight of the first layer is multiplied by 1 + 0.01 z, z standard normal, for
three seeds. `ece408-low` is weak and sensitive on purpose: its first layer starts so large that
tanh saturates, and its training stops early, so that many answers are close calls.

## Provenance

Trained on the 60000 training images of Fashion-MNIST (MIT licence), resized by the course's
recipe, with MXNet 1.9.1's own convolution on the CPU, by Adam with a cosine schedule:

{recipes}

To train them again, to the same accuracy up to the rounding of another CPU (0.005):

{commands}

## sha256

{checksums}
"""
