"""`kept_training` on a few images whose brightness reveals their label."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import programs

from ece408_op.cli.main import main
from ece408_op.course import training
from ece408_op.course.dataset import fashion_data
from ece408_op.course.training import Recipe


def images(count: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (count, 48, 48), and labels."""
    rng = np.random.default_rng(408)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    noise = rng.integers(0, 20, (count, 48, 48))
    return (noise + 23 * labels[:, None, None]).astype(np.uint8), labels


def interrupted(recipe: Recipe, *given: Any) -> None:
    """Train until the first state is saved."""
    # Runs in processes of their own need it not.
    import pytest

    save = training._save_state

    def interrupted(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(training, "_save_state", interrupted), pytest.raises(KeyboardInterrupt):
        training.train(recipe, *given)


def start(folder: Path, *options: str, workers: int = 0) -> subprocess.Popen:
    """Start a run that writes its files to a folder, with workers if any, else in one process."""
    program = [__file__, str(folder), "--output", str(folder / "model"), "--batch-size", "50"]
    job = ["-m", "ece408_op", "launch", "--workers", str(workers), "--", sys.executable]
    return subprocess.Popen(
        [sys.executable, *(job if workers else []), *program, *options],
        env=programs.environment(ECE408_CACHE=str(folder), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Return the exit code of a run, and its stderr."""
    _, errors = process.communicate(timeout=100)
    return process.returncode, errors


if __name__ == "__main__":
    import kept_training

    little = images()
    fashion_data.load = lambda kind, size: little
    kept_training.keep(Path(sys.argv[1]))
    main(["train", "2019sp", *sys.argv[2:]])
