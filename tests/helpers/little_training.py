"""`studies.kept_training` on a few images whose brightness tells their label."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ece408_op.cli.main import main
from ece408_op.course.dataset import data


def images(count: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 (count, 48, 48), and labels."""
    rng = np.random.default_rng(408)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    noise = rng.integers(0, 20, (count, 48, 48))
    return (noise + 23 * labels[:, None, None]).astype(np.uint8), labels


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    from studies import kept_training

    little = images()
    data.load = lambda kind, size: little
    kept_training.keep(Path(sys.argv[1]))
    main(["train", "2019sp", *sys.argv[2:]])
