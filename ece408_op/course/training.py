"""Training of the course's networks, by MXNet's own operators, or whole on a GPU by this package's;
by one process or several."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..errors import CheckpointMismatch, InvalidSize, NoUsableGpu, WorkersDiffer
from ..files.cachedir import ensure_folder
from ..files.sealed import Damage, read_sealed, write_sealed
from ..operator import checkpoint, gpu_support, networks
from ..operator.graphs.graph_json import OP_TYPE
from ..operator.loading import load_mxnet
from . import course_terms, scoring
from .course_terms import BASELINE, Term
from .dataset import fashion_data
from .parts_module import PartsModule
from .workers import Workers

# Of whole networks.
BACKENDS = ("cuda", "emulator")
# Lower bound of probabilities, because log(0) is undefined.
_LEAST = 1e-12


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run; two runs of one recipe give the same model.

    Adam with a cosine schedule from `learning_rate` to 0 over `epochs`; `decay` is the L2 weight
    decay of convolutions and dense layers. Pixels are not scaled, 0 to 255: the first layer's
    initial weights and learning rate are multiplied by `first_layer_scale`, or tanh would saturate
    within a few steps. With `steps` the run ends after that number of updates.
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


# Models with their own parameters; the others of a term use the baseline's. This one is weak on
# purpose: its first layer is too large, so tanh saturates, and training stops early. Then many
# predictions are close calls, which a slightly wrong convolution changes.
_WEAK = Recipe("2017fa", "ece408-low", epochs=1, first_layer_scale=4.0, steps=6)


def recipe_for(term: Term, model: str = BASELINE) -> Recipe:
    """Return the recipe of the parameters of a term's model. Raises `UnknownModel`."""
    course_terms.check_model(term, model)
    weak = (term.name, model) == (_WEAK.term, _WEAK.model)
    return _WEAK if weak else Recipe(term.name)


@dataclass(frozen=True)
class Trained:
    """A process's result of a finished run: parameters, the accuracy on the 10000 test images (rank
    0 only), and the mean loss (cross entropy) of its images in each of its steps."""

    arg_params: dict[str, Any]
    test_accuracy: float | None
    losses: list[float]


def train(
    recipe: Recipe,
    work: Path,
    kvstore: str = "local",
    gpus: Sequence[int] = (),
    backend: str | None = None,
) -> Trained:
    """Train a model, or resume an interrupted run of the same recipe.

    `kvstore` is one of `workers.KVSTORES`: with `dist_*` the processes of a job train one model,
    data-parallel. A process trains on the CPU, or splits its part of the batch over the GPUs with
    these numbers, by MXNet; or this package's parts train it by a `backend`. Then the settings must
    name it and the GPUs, too. The process of rank 0 writes the state to `work` after each epoch, as
    a whole file, and all resume from it; if it is damaged, they resume from the epoch before and
    say so on stderr, as progress is. The state holds the optimizer's moments, except with
    `dist_async`: servers hold them then, and a resumed run starts them at zero.

    Raises `CheckpointMismatch` when `work` holds the state of another recipe, `CacheUntrusted`
    when another user could have written it, `InvalidSize` for a batch that cannot be split
    equally, `WorkersDiffer`, the errors of `Workers` and `fashion_data.load`, and `NoUsableGpu`.
    """
    with Workers(kvstore) as workers:
        in_parts = backend is not None
        return _train(recipe, work, workers, _contexts(gpus, in_parts), in_parts)


def _contexts(gpus: Sequence[int], in_parts: bool) -> list[Any]:
    mx = load_mxnet()
    if in_parts:
        return [mx.cpu(number) for number in range(max(1, len(gpus)))]
    contexts = [mx.gpu(gpu) for gpu in gpus]
    gpu_support.refuse_networks(contexts)
    return contexts or [mx.cpu()]


def _train(
    recipe: Recipe, work: Path, workers: Workers, contexts: list[Any], in_parts: bool
) -> Trained:
    term = course_terms.find_term(recipe.term)
    network = course_terms.network(term)
    if in_parts:
        reason = networks.why_no_gpu()
        if reason is not None:
            raise NoUsableGpu(f"the network cannot train on a GPU: {reason}")
        network = network.optimize_for("ece408")
    if workers.local_batch(recipe.batch_size) < len(contexts):
        raise InvalidSize(
            f"a batch of {recipe.batch_size} images is too small for {workers.size} workers with "
            f"{len(contexts)} GPUs each; give a larger --batch-size"
        )
    images, labels = fashion_data.load("train", term.image_size)
    steps = len(images) // recipe.batch_size
    module, done = _resume(recipe, term, network, work, steps, workers, contexts, in_parts)
    losses: list[float] = []
    for epoch in range(done, recipe.epochs):
        losses += _run_epoch(module, recipe, epoch, images, labels, workers)
        if workers.is_synchronous:
            _check_equal(module, workers)
        else:
            _pull(module, workers)
        if workers.rank == 0:
            _save_state(module, recipe, epoch + 1, work)
    arg_params = _as_shipped(module)
    accuracy = _test_accuracy(term, arg_params) if workers.rank == 0 else None
    return Trained(arg_params, accuracy, losses)


def _test_accuracy(term: Term, arg_params: dict[str, Any]) -> float:
    images, labels = fashion_data.load("t10k", term.image_size)
    network = course_terms.network(term)
    metric = scoring.evaluate(network, arg_params, {}, images, labels, batch_size=500)
    return float(metric.get()[1])


def discard(work: Path) -> None:
    """Delete the state of an earlier run in `work`."""
    shutil.rmtree(work, ignore_errors=True)


def export(recipe: Recipe, trained: Trained, folder: Path) -> list[Path]:
    """Write the checkpoint: a symbol for each model of the recipe, one parameter file for all.

    Returns the files written. Other epochs' parameter files stay.
    """
    ensure_folder(folder)
    term = course_terms.find_term(recipe.term)
    written = []
    for model in term.models:
        if recipe_for(term, model).model == recipe.model:
            operator = "Convolution" if model == BASELINE else OP_TYPE
            written.append(folder / f"{model}-symbol.json")
            checkpoint.save_symbol(written[-1], course_terms.network(term, operator))
    written.append(folder / f"{recipe.model}-{recipe.epochs:04d}.params")
    checkpoint.save_parameters(written[-1], trained.arg_params)
    return written


def _resume(
    recipe: Recipe,
    term: Term,
    network: Any,
    work: Path,
    steps: int,
    workers: Workers,
    contexts: list[Any],
    in_parts: bool,
) -> tuple[Any, int]:
    """Return a module ready for training, and the number of completed epochs."""
    mx = load_mxnet()
    state = _common_state(recipe, term, work, workers)
    local = workers.local_batch(recipe.batch_size)
    params, moments = state.params(), state.moments()
    # Asynchronous servers count the updates of all workers.
    each_step = 1 if workers.is_synchronous else workers.size
    updates, taken = (n * each_step for n in (steps, min(steps, recipe.steps or steps)))
    # Servers add up the gradients of several workers.
    stay_on_gpus = in_parts and workers.size == 1
    copies = 1 if stay_on_gpus else len(contexts)
    names = [name for name in network.list_arguments() if name in params]
    optimizer = mx.optimizer.Adam(
        learning_rate=recipe.learning_rate,
        wd=recipe.decay,
        lr_scheduler=mx.lr_scheduler.CosineScheduler(
            recipe.epochs * updates, base_lr=recipe.learning_rate
        ),
        rescale_grad=1 / (recipe.batch_size if workers.is_synchronous else local),
        begin_num_update=state.done * taken,
        # MXNet numbers a parameter's copies consecutively.
        param_idx2name=dict(enumerate(name for name in names for _ in range(copies))),
    )
    optimizer.set_lr_mult({"conv1_weight": recipe.first_layer_scale})
    if stay_on_gpus:
        resident = PartsModule(network, contexts, {name: params[name] for name in names})
        resident.init_optimizer(optimizer, moments)
        return resident, state.done
    size = term.image_size
    module = mx.mod.Module(network, context=contexts)
    module.bind([("data", (local, 1, size, size))], [("softmax_label", (local,))])
    module.init_params(arg_params=params, aux_params={})
    with _updates_by(servers=not workers.is_synchronous):
        module.init_optimizer(kvstore=workers.store, optimizer=optimizer)
    if workers.is_synchronous:
        states = {
            number * copies + copy: tuple(each.as_in_context(context) for each in both)
            for number, both in moments.items()
            for copy, context in enumerate(contexts)
        }
        module._updater.states.update(states)
        module._updater.states_synced.update(dict.fromkeys(states, True))
    return module, state.done


@contextlib.contextmanager
def _updates_by(servers: bool) -> Iterator[None]:
    """Run a Module's optimizer in the servers of its KVStore, or else in its own process, where its
    moments can be read."""
    name = "MXNET_UPDATE_ON_KVSTORE"
    before = os.environ.get(name)
    os.environ[name] = str(int(servers))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _common_state(recipe: Recipe, term: Term, work: Path, workers: Workers) -> _State:
    """Return rank 0's last or initial state."""
    arrays = {f"param:{name}": value for name, value in _initial_parameters(recipe, term).items()}
    for number, value in enumerate(list(arrays.values())):
        for which in range(2):
            arrays[f"moment{which}:{number}"] = np.zeros_like(value)
    done = 0
    if workers.rank == 0:
        ensure_folder(work)
        state = _last_state(recipe, work)
        if state is not None:
            # A state of dist_async has no moments.
            done = state.done
            arrays.update((name, state.arrays[name]) for name in arrays if name in state.arrays)
    arrays = workers.broadcast({**arrays, "done": np.array([done], np.float32)})
    return _State(int(arrays.pop("done")[0]), arrays)


def _initial_parameters(recipe: Recipe, term: Term) -> dict[str, np.ndarray]:
    mx = load_mxnet()
    mx.random.seed(recipe.seed)
    network = course_terms.network(term)
    names = network.list_arguments()
    size = term.image_size
    shapes = dict(zip(names, network.infer_shape(data=(1, 1, size, size))[0]))
    xavier = mx.init.Xavier()
    params = {}
    for name in names:
        if name == "data" or name.endswith("_label"):
            continue
        value = mx.nd.zeros(shapes[name])
        xavier(mx.init.InitDesc(name), value)
        params[name] = value.asnumpy()
    params["conv1_weight"] *= np.float32(recipe.first_layer_scale)
    return params


def _run_epoch(
    module: Any,
    recipe: Recipe,
    epoch: int,
    images: np.ndarray,
    labels: np.ndarray,
    workers: Workers,
) -> list[float]:
    """Train one epoch in an order given by seed and epoch, on this process's part of each batch;
    return the mean losses of its steps. Rank 0 prints the result."""
    mx = load_mxnet()
    order = np.random.default_rng([recipe.seed, epoch]).permutation(len(images))
    starts = range(0, len(order) - recipe.batch_size + 1, recipe.batch_size)[: recipe.steps]
    local = workers.local_batch(recipe.batch_size)
    label = f"epoch {epoch + 1}/{recipe.epochs}"
    losses, right = [], 0
    with tqdm(total=len(starts), desc=label, unit="batch", disable=None) as progress:
        for start in starts:
            first = start + workers.rank * local
            chosen = np.sort(order[first : first + local])
            batch = mx.io.DataBatch(
                [mx.nd.array(scoring.as_input(images[chosen]))], [mx.nd.array(labels[chosen])]
            )
            module.forward_backward(batch)
            module.update()
            answers = module.get_outputs()[0].asnumpy().astype(np.float64)
            likelihoods = answers[np.arange(local), labels[chosen]]
            losses.append(float(-np.log(np.maximum(likelihoods, _LEAST)).mean()))
            right += int((answers.argmax(axis=1) == labels[chosen]).sum())
            progress.update()
    # Totals of all workers.
    total, correct, seen = workers.sum(
        "progress", np.array([sum(losses) * local, right, len(starts) * local])
    )
    if workers.rank == 0:
        print(
            f"epoch {epoch + 1}: training accuracy {correct / seen:.4f}, loss {total / seen:.6f}",
            file=sys.stderr,
        )
    return losses


def _pull(module: Any, workers: Workers) -> None:
    """Fetch the servers' weights after all workers have made their steps."""
    workers.wait()
    for name, arrays in zip(module._param_names, module._exec_group.param_arrays):
        module._kvstore.pull(name, out=arrays)
    workers.wait()


def _check_equal(module: Any, workers: Workers) -> None:
    """Raise `WorkersDiffer` unless all workers have bit-identical weights."""
    digest = hashlib.sha256()
    for _, value in sorted(module.get_params()[0].items()):
        digest.update(value.asnumpy().tobytes())
    own = np.frombuffer(digest.digest(), np.uint16)
    table = np.zeros((workers.size, own.size))
    table[workers.rank] = own
    # Sums of one number and zeros are exact.
    table = workers.sum("digests", table)
    differing = [rank for rank in range(workers.size) if (table[rank] != table[0]).any()]
    if differing:
        raise WorkersDiffer(
            f"the weights of worker {differing[0]} are no longer those of worker 0: their machines "
            "compute otherwise; give the job machines of one kind"
        )


def _as_shipped(module: Any) -> dict[str, Any]:
    """Return the module's parameters, rounded to float16 as in the parameter file."""
    params, _ = module.get_params()
    return {name: value.astype("float16").astype("float32") for name, value in params.items()}


@dataclass(frozen=True)
class _State:
    """A run after `done` epochs, as arrays by name: `recipe`, as JSON; `param:NAME`; and Adam's two
    moments of each parameter by its number, `moment0:NUMBER` and `moment1:NUMBER`.

    MXNet's own optimizer file is a pickle, and loading one can run arbitrary code.
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


def _moments(module: Any) -> dict[int, Any]:
    """Return Adam's moments by the numbers of parameters, if this process has them."""
    if isinstance(module, PartsModule):
        return module.moments()
    states = module._updater.states if module._updater is not None else {}
    # With several GPUs, only the first one's copy.
    copies = len(module._context)
    return {number // copies: both for number, both in states.items() if number % copies == 0}


def _save_state(module: Any, recipe: Recipe, done: int, work: Path) -> None:
    """Write the state after `done` epochs, then delete all earlier ones but the last."""
    arrays = {"recipe": np.array(json.dumps(asdict(recipe)))}
    for name, value in module.get_params()[0].items():
        arrays[f"param:{name}"] = value.asnumpy()
    for number, moments in _moments(module).items():
        for which, value in enumerate(moments):
            arrays[f"moment{which}:{number}"] = value.asnumpy()
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_sealed(_path(work, done), content.getvalue())
    for path in _states(work)[2:]:
        path.unlink()


def _states(work: Path) -> list[Path]:
    """Return the files of states, newest first."""
    return sorted(work.glob("epoch-[0-9][0-9][0-9][0-9].npz"), reverse=True)


def _last_state(recipe: Recipe, work: Path) -> _State | None:
    """Return the newest sound state, if any."""
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
    """Return a state, and the recipe of its run. Raises `Damage` and `CacheUntrusted`."""
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
