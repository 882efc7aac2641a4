"""Training of the course's networks on the CPU, with MXNet's own convolution."""

from __future__ import annotations

import io
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..errors import CheckpointMismatch
from ..files.cachedir import ensure_folder
from ..files.sealed import Damage, read_sealed, write_sealed
from ..operator import checkpoint
from ..operator.graphs.graph_json import OP_TYPE
from ..operator.loading import load_mxnet
from . import models, scoring
from .dataset import data
from .models import BASELINE, Term


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run; two runs of one recipe give the same model.

    Adam with a cosine schedule from `learning_rate` to 0 over `epochs`; `decay` is the L2 weight
    decay of convolutions and dense layers. Pixels come as they are, 0 to 255: the first layer's
    weights start `first_layer_scale` times as large, and learn as much slower, as the others, or
    tanh saturates within a few steps. With `steps` the run ends after that number of updates.
    """

    term: str
    model: str = BASELINE
    epochs: int = 6
    seed: int = 408
    batch_size: int = 100
    learning_rate: float = 1e-3
    decay: float = 1e-4
    first_layer_scale: float = 0.01
    steps: int | None = None


# Models with parameters of their own; the others of a term share the baseline's. This one is
# weak on purpose: its first layer is too large, so that tanh saturates, and it is stopped early,
# so that many of its answers are close calls which a slightly wrong convolution tips over.
_WEAK = Recipe("2017fa", "ece408-low", epochs=1, first_layer_scale=4.0, steps=6)


def recipe_for(term: Term, model: str = BASELINE) -> Recipe:
    """The recipe of the parameters that a term's model comes with. Raises `UnknownModel`."""
    models.check_model(term, model)
    weak = (term.name, model) == (_WEAK.term, _WEAK.model)
    return _WEAK if weak else Recipe(term.name)


@dataclass(frozen=True)
class Trained:
    """A finished run: its parameters, and the accuracy on the 10000 test images."""

    arg_params: dict[str, Any]
    test_accuracy: float


def train(recipe: Recipe, work: Path) -> Trained:
    """Train, or go on where an interrupted run of the same recipe stopped.

    After each epoch the state goes to `work` as a whole, and a damaged one gives way to that of
    the epoch before; this and progress goes to stderr.

    Raises `CheckpointMismatch` when `work` holds the state of another recipe, `CacheUntrusted`
    when another user could have written it, and the errors of `data.load`.
    """
    term = models.find_term(recipe.term)
    ensure_folder(work)
    images, labels = data.load("train", term.image_size)
    module, done = _resume(recipe, term, work, len(images) // recipe.batch_size)
    for epoch in range(done, recipe.epochs):
        accuracy = _run_epoch(module, recipe, epoch, images, labels)
        print(f"epoch {epoch + 1}: training accuracy {accuracy:.4f}", file=sys.stderr)
        _save_state(module, recipe, epoch + 1, work)
    arg_params = _as_shipped(module)
    test_images, test_labels = data.load("t10k", term.image_size)
    metric = scoring.evaluate(
        models.network(term), arg_params, {}, test_images, test_labels, batch_size=500
    )
    return Trained(arg_params, float(metric.get()[1]))


def discard(work: Path) -> None:
    """Forget what an earlier run left in `work`."""
    shutil.rmtree(work, ignore_errors=True)


def export(recipe: Recipe, trained: Trained, folder: Path) -> list[Path]:
    """Write the checkpoint: a symbol for each model of the recipe, one parameter file for all.

    Returns the files written. Other epochs' parameter files are left alone.
    """
    ensure_folder(folder)
    term = models.find_term(recipe.term)
    written = []
    for model in term.models:
        if recipe_for(term, model).model == recipe.model:
            operator = "Convolution" if model == BASELINE else OP_TYPE
            written.append(folder / f"{model}-symbol.json")
            checkpoint.save_symbol(written[-1], models.network(term, operator))
    written.append(folder / f"{recipe.model}-{recipe.epochs:04d}.params")
    checkpoint.save_parameters(written[-1], trained.arg_params)
    return written


def _resume(recipe: Recipe, term: Term, work: Path, steps: int) -> tuple[Any, int]:
    """A module ready to train on, and the number of epochs it has behind it."""
    mx = load_mxnet()
    state = _last_state(recipe, work)
    size = term.image_size
    module = mx.mod.Module(models.network(term), context=mx.cpu())
    module.bind(
        [("data", (recipe.batch_size, 1, size, size))], [("softmax_label", (recipe.batch_size,))]
    )
    params = _initial_parameters(recipe, term) if state is None else state.params()
    module.init_params(arg_params=params, aux_params={})
    done = 0 if state is None else state.done
    names = module.get_params()[0]
    optimizer = mx.optimizer.Adam(
        learning_rate=recipe.learning_rate,
        wd=recipe.decay,
        lr_scheduler=mx.lr_scheduler.CosineScheduler(
            recipe.epochs * steps, base_lr=recipe.learning_rate
        ),
        rescale_grad=1 / recipe.batch_size,
        begin_num_update=done * steps,
        param_idx2name=dict(enumerate(n for n in module.symbol.list_arguments() if n in names)),
    )
    optimizer.set_lr_mult({"conv1_weight": recipe.first_layer_scale})
    module.init_optimizer(kvstore=None, optimizer=optimizer)
    if state is not None:
        moments = state.moments()
        module._updater.states.update(moments)
        module._updater.states_synced.update(dict.fromkeys(moments, True))
    return module, done


def _initial_parameters(recipe: Recipe, term: Term) -> dict[str, Any]:
    mx = load_mxnet()
    mx.random.seed(recipe.seed)
    network = models.network(term)
    names = network.list_arguments()
    size = term.image_size
    shapes = dict(zip(names, network.infer_shape(data=(1, 1, size, size))[0]))
    xavier = mx.init.Xavier()
    params = {}
    for name in names:
        if name == "data" or name.endswith("_label"):
            continue
        params[name] = mx.nd.zeros(shapes[name])
        xavier(mx.init.InitDesc(name), params[name])
    params["conv1_weight"] *= recipe.first_layer_scale
    return params


def _run_epoch(
    module: Any, recipe: Recipe, epoch: int, images: np.ndarray, labels: np.ndarray
) -> float:
    """One pass over the training images in an order given by seed and epoch; its accuracy."""
    mx = load_mxnet()
    order = np.random.default_rng([recipe.seed, epoch]).permutation(len(images))
    starts = range(0, len(order) - recipe.batch_size + 1, recipe.batch_size)[: recipe.steps]
    metric = mx.metric.Accuracy()
    label = f"epoch {epoch + 1}/{recipe.epochs}"
    with tqdm(total=len(starts), desc=label, unit="batch", disable=None) as progress:
        for start in starts:
            chosen = np.sort(order[start : start + recipe.batch_size])
            batch = mx.io.DataBatch(
                [mx.nd.array(scoring.as_input(images[chosen]))], [mx.nd.array(labels[chosen])]
            )
            module.forward_backward(batch)
            module.update()
            module.update_metric(metric, batch.label)
            progress.update()
    return float(metric.get()[1])


def _as_shipped(module: Any) -> dict[str, Any]:
    """The module's parameters as they are after a trip through the float16 parameter file."""
    params, _ = module.get_params()
    return {name: value.astype("float16").astype("float32") for name, value in params.items()}


@dataclass(frozen=True)
class _State:
    """A run after `done` epochs, as arrays by name: `recipe`, as JSON; `param:NAME`; and Adam's
    two moments of the parameter of each number, `moment0:NUMBER` and `moment1:NUMBER`.

    MXNet's own file of the optimizer is a pickle, which runs whatever code is in it.
    """

    done: int
    arrays: dict[str, np.ndarray]

    def params(self) -> dict[str, Any]:
        return {name: _on_cpu(values) for name, values in self._of("param")}

    def moments(self) -> dict[int, tuple[Any, Any]]:
        first, second = dict(self._of("moment0")), dict(self._of("moment1"))
        return {int(each): (_on_cpu(first[each]), _on_cpu(second[each])) for each in first}

    def _of(self, kind: str) -> Iterator[tuple[str, np.ndarray]]:
        for name, values in self.arrays.items():
            if name.startswith(f"{kind}:"):
                yield name.partition(":")[2], values


def _on_cpu(values: np.ndarray) -> Any:
    return load_mxnet().nd.array(values, dtype=values.dtype)


def _path(work: Path, done: int) -> Path:
    return work / f"epoch-{done:04d}.npz"


def _save_state(module: Any, recipe: Recipe, done: int, work: Path) -> None:
    """Write the state after `done` epochs, then drop all earlier ones but the last."""
    arrays = {"recipe": np.array(json.dumps(asdict(recipe)))}
    for name, value in module.get_params()[0].items():
        arrays[f"param:{name}"] = value.asnumpy()
    for number, moments in module._updater.states.items():
        for which, value in enumerate(moments):
            arrays[f"moment{which}:{number}"] = value.asnumpy()
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_sealed(_path(work, done), content.getvalue())
    for path in _states(work)[2:]:
        path.unlink()


def _states(work: Path) -> list[Path]:
    """The files of states, the newest first."""
    return sorted(work.glob("epoch-[0-9][0-9][0-9][0-9].npz"), reverse=True)


def _last_state(recipe: Recipe, work: Path) -> _State | None:
    """The newest sound state, if there is one."""
    for path in _states(work):
        try:
            state, stored = _read_state(path)
        except Damage as damage:
            print(f"ece408: training goes on without the last state: {damage}", file=sys.stderr)
            continue
        _check_recipe(recipe, stored, path)
        return state
    return None


def _read_state(path: Path) -> tuple[_State, dict[str, Any]]:
    """A state, and the recipe of its run. Raises `Damage` and `CacheUntrusted`."""
    content = io.BytesIO(read_sealed(path))
    try:
        with np.load(content, allow_pickle=False) as arrays:
            state = _State(int(path.stem.split("-")[1]), dict(arrays))
        return state, json.loads(str(state.arrays["recipe"]))
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise Damage(f"{path} is not a state of training") from error


def _check_recipe(recipe: Recipe, stored: dict[str, Any], path: Path) -> None:
    wanted = asdict(recipe)
    differing = [name for name in wanted if stored.get(name) != wanted[name]]
    if differing:
        raise CheckpointMismatch(
            f"{path} is of a run with another {', '.join(differing)}; give the same options to "
            "go on with it, or --restart to start over"
        )
