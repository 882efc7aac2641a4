"""`ece408 train`: trains a term's model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from .. import settings
from ..course import course_terms, training, workers
from ..errors import InvalidSize
from ..operator import variables
from . import arguments


def add(commands: Any) -> None:
    """Add `ece408 train`."""
    parser = arguments.add_command(
        commands,
        "train",
        "train a term's model with MXNet",
        epilog="An interrupted run resumes. As the command of ece408 launch, each process is a "
        "worker, and the workers split each batch.",
    )
    parser.add_argument("term", metavar="TERM", help=f"one of: {', '.join(course_terms.TERMS)}")
    parser.option(
        "--model MODEL",
        "a model with its own parameters (default: %(default)s, whose parameters the term's "
        "other models use)",
        default=course_terms.BASELINE,
    )
    recipe = training.Recipe(course_terms.DEFAULT_TERM)
    parser.option("--epochs N", f"passes over the training images (default: {recipe.epochs})")
    parser.option("--seed N", "default: %(default)s", default=recipe.seed)
    parser.option(
        "--batch-size N",
        "images in a step of all workers together (default: %(default)s)",
        default=recipe.batch_size,
    )
    parser.option(
        "--kvstore NAME",
        f"MXNet's KVStore: {', '.join(workers.KVSTORES)}; dist_* in a job of ece408 launch: "
        "with dist_sync all workers make each step together, with dist_async each makes its own "
        "(default: dist_sync in a job, else local)",
    )
    parser.add_argument(
        "--backend",
        choices=training.BACKENDS,
        help="cuda: the whole network on a GPU, by this package, with any build of MXNet; "
        "emulator: the same on an emulated GPU (default: MXNet's own operators)",
    )
    arguments.add_gpu(
        parser, "train on it, several split the batch; needs MXNet's CUDA build, or --backend cuda"
    )
    parser.option("--output DIR", "folder for the checkpoint (default: ./models/TERM)")
    parser.option("--restart", "start over instead of continuing an interrupted run")
    arguments.add_data(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.epochs is not None and options.epochs < 1:
        raise InvalidSize(f"{options.epochs} is not a number of epochs; give 1 or more")
    if options.batch_size < 1:
        raise InvalidSize(f"{options.batch_size} is not a batch size; give 1 or more")
    variables.set_environment()
    settings.configure(data=options.data)
    term = course_terms.find_term(options.term)
    recipe = training.recipe_for(term, options.model)
    recipe = dataclasses.replace(
        recipe,
        epochs=options.epochs or recipe.epochs,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    work = settings.cache() / "training" / f"{term.name}-{recipe.model}"
    if options.restart:
        training.discard(work)
    gpus = settings.devices() if options.gpu is not None or options.backend else ()
    settings.configure(backend=options.backend)
    kvstore = options.kvstore or workers.default_kvstore()
    trained = training.train(recipe, work, kvstore, gpus, options.backend)
    if trained.test_accuracy is None:
        # The first worker does the rest.
        return
    for path in training.export(recipe, trained, options.output or Path("models") / term.name):
        print(path)
    print(f"test accuracy: {trained.test_accuracy}")
