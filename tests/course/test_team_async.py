"""A training job whose workers do not wait for each other."""

import kept_training
import numpy as np
import pytest
from little_training import ended, start


@pytest.mark.slow
def test_workers_that_do_not_wait_for_each_other_learn_too(tmp_path):
    options = ["--epochs", "3", "--kvstore", "dist_async"]
    code, errors = ended(start(tmp_path, *options, workers=2))
    assert code == 0, errors
    first, second = kept_training.read(tmp_path)
    for name, values in kept_training.parameters(first).items():
        np.testing.assert_array_equal(values, second[name])
    steps = len(first["losses"]) // 3
    assert first["losses"][-steps:].mean() < first["losses"][:steps].mean()
    # Servers keep the moments, so the state has none.
    state = tmp_path / "training" / "2019sp-baseline" / "epoch-0003.npz"
    with np.load(state) as arrays:
        assert not [name for name in arrays if name.startswith("moment")]
