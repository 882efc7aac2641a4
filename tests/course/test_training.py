import dataclasses
import io
import json
import pickle

import little_training
import numpy as np
import pytest

from ece408_op import settings
from ece408_op.course import course_terms, training
from ece408_op.course.dataset import fashion_data
from ece408_op.errors import CacheUntrusted, CheckpointMismatch, NoUsableGpu
from ece408_op.files.sealed import write_sealed
from ece408_op.network.gpu_training import GpuTrainingProgram

RECIPE = training.Recipe("2019sp", epochs=2, batch_size=50)


@pytest.fixture(autouse=True)
def _little_data(monkeypatch):
    little = little_training.images()
    monkeypatch.setattr(fashion_data, "load", lambda kind, size: little)


def _as_numpy(trained):
    return {name: array.asnumpy() for name, array in trained.arg_params.items()}


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(mx, tmp_path):
    whole = training.train(RECIPE, tmp_path / "whole")
    little_training.interrupted(RECIPE, tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["epoch-0001.npz"]
    resumed = training.train(RECIPE, tmp_path / "work")
    for name, values in _as_numpy(whole).items():
        np.testing.assert_allclose(_as_numpy(resumed)[name], values, rtol=1e-3, atol=1e-5)
    assert resumed.test_accuracy == whole.test_accuracy > 0.2


@pytest.mark.slow
def test_a_seed_gives_one_model_and_another_seed_another(mx, tmp_path):
    recipe = training.Recipe("2019sp", epochs=1)
    first = _as_numpy(training.train(recipe, tmp_path / "1"))
    again = _as_numpy(training.train(recipe, tmp_path / "2"))
    other = _as_numpy(training.train(training.Recipe("2019sp", 1, seed=7), tmp_path / "3"))
    for name, values in first.items():
        np.testing.assert_allclose(again[name], values, rtol=1e-3, atol=1e-5)
    assert not np.allclose(first["fc1_weight"], other["fc1_weight"], atol=1e-3)


def test_the_state_of_another_recipe_is_not_mixed_in(mx, tmp_path):
    training.train(training.Recipe("2019sp", epochs=1), tmp_path)
    with pytest.raises(CheckpointMismatch, match="of a run with another epochs, seed; give"):
        training.train(training.Recipe("2019sp", epochs=3, seed=1), tmp_path)
    training.discard(tmp_path)
    assert not tmp_path.exists()


LITTLE = training.Recipe("2019sp", epochs=3)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def test_a_damaged_state_gives_way_to_the_one_before(mx, tmp_path, noted, capsys):
    whole = training.train(LITTLE, tmp_path)
    states = sorted(tmp_path.iterdir())
    assert [path.name for path in states] == ["epoch-0002.npz", "epoch-0003.npz"]
    _flip(states[1])
    epochs = noted(training, "_run_epoch", lambda module, recipe, epoch, *_: epoch)
    capsys.readouterr()
    again = training.train(LITTLE, tmp_path)
    assert epochs == [2]
    first_line = capsys.readouterr().err.splitlines()[0]
    assert first_line == (
        f"ece408: training goes on without the last state: {states[1]} is damaged"
    )
    for name, values in _as_numpy(whole).items():
        np.testing.assert_allclose(_as_numpy(again)[name], values, rtol=1e-3, atol=1e-5)


def test_a_state_that_others_could_have_written_is_refused(mx, tmp_path):
    recipe = training.Recipe("2019sp", epochs=1)
    training.train(recipe, tmp_path)
    (state,) = tmp_path.iterdir()
    state.chmod(0o666)
    with pytest.raises(CacheUntrusted, match=f"{state} can be written by other users"):
        training.train(recipe, tmp_path)
    state.chmod(0o600)
    training.train(recipe, tmp_path)


class _Code:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_no_code_is_run_from_a_state(mx, tmp_path, capsys):
    """Neither from a sealed state of another program, nor from MXNet's own form of the
    optimizer."""
    recipe, work, trap = training.Recipe("2019sp", epochs=1), tmp_path / "work", tmp_path / "trap"
    training.train(recipe, work)
    (state,) = work.iterdir()
    content = io.BytesIO()
    np.savez(content, recipe=np.array([_Code(trap)], dtype=object))
    write_sealed(state, content.getvalue())
    capsys.readouterr()
    training.train(recipe, work)
    assert f"last state: {state} is not a state of training" in capsys.readouterr().err
    folder = work / "epoch-0001"
    folder.mkdir()
    mx.nd.save(str(folder / "params"), {})
    (folder / "optimizer").write_bytes(pickle.dumps(_Code(trap)))
    (folder / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe)))
    state.unlink()
    training.train(recipe, work)
    assert not trap.exists()


def test_what_is_exported_is_what_the_milestones_load(mx, tmp_path):
    trained = training.train(training.Recipe("2019sp", epochs=1), tmp_path / "work")
    written = training.export(training.Recipe("2019sp", epochs=1), trained, tmp_path / "out")
    names = ["baseline-symbol.json", "ece408-symbol.json", "baseline-0001.params"]
    assert [path.name for path in written] == names
    for model in ("baseline", "ece408"):
        loaded = course_terms.load_model(course_terms.TERMS["2019sp"], model, tmp_path / "out")
        for name, array in trained.arg_params.items():
            np.testing.assert_array_equal(loaded.arg_params[name].asnumpy(), array.asnumpy())
    operators = [node["op"] for node in json.loads(written[1].read_text())["nodes"]]
    assert operators.count("Custom") == 2


@pytest.mark.parametrize(
    "gpus", [(), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["one", "two"]
)
def test_a_gpu_trains_the_same_model(mx, tmp_path, emulated, noted, gpus):
    """In parts of this package, also after an interruption. One emulated GPU stands for two."""
    recipe = training.Recipe("2019sp", epochs=2, batch_size=4, steps=2)
    expected = training.train(recipe, tmp_path / "cpu")
    passes = noted(GpuTrainingProgram, "backward")
    with settings.override(backend="emulator"):
        found = training.train(recipe, tmp_path / "gpu", "local", gpus, "emulator")
        (tmp_path / "gpu" / "epoch-0002.npz").unlink()
        resumed = training.train(recipe, tmp_path / "gpu", "local", gpus, "emulator")
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    assert resumed.losses == found.losses[2:]
    for name, array in found.arg_params.items():
        np.testing.assert_array_equal(resumed.arg_params[name].asnumpy(), array.asnumpy())
    assert len(passes) == 6 * max(1, len(gpus))


def test_without_a_gpu_no_model_is_trained_on_one(mx, tmp_path):
    with settings.override(backend="cpu"), pytest.raises(NoUsableGpu, match="cannot train on a"):
        training.train(training.Recipe("2019sp"), tmp_path, "local", (), "cuda")
