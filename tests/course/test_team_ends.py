"""Jobs of training whose workers do not wait for each other, and that cannot begin."""

from __future__ import annotations

import numpy as np
from little_training import ended, start
from studies import kept_training


def test_workers_that_do_not_wait_for_each_other_learn_too(tmp_path):
    options = ["--epochs", "3", "--kvstore", "dist_async"]
    code, errors = ended(start(tmp_path, *options, workers=2))
    assert code == 0, errors
    first, second = kept_training.read(tmp_path)
    for name, values in kept_training.parameters(first).items():
        np.testing.assert_array_equal(values, second[name])
    steps = len(first["losses"]) // 3
    assert first["losses"][-steps:].mean() < first["losses"][:steps].mean()
    # Servers keep the moments: the state has none.
    state = tmp_path / "training" / "2019sp-baseline" / "epoch-0003.npz"
    with np.load(state) as arrays:
        assert not [name for name in arrays if name.startswith("moment")]


def test_a_batch_that_cannot_be_shared_out_ends_the_job(tmp_path):
    code, errors = ended(start(tmp_path, "--batch-size", "25", workers=2))
    assert code == 40
    assert errors.splitlines()[-1].endswith(
        "exit code 3; its last line: ece408: error: 2 workers cannot share a batch of 25 images "
        "equally; give --batch-size 26, or another number of workers"
    )
