"""Training by several processes: real jobs of MXNet's parameter server, on few images."""

import os
import signal
import time
from pathlib import Path

import kept_training
import little_training
import numpy as np
import pytest
from little_training import ended, start

from ece408_op.course import training, workers
from ece408_op.course.dataset import fashion_data
from ece408_op.errors import InvalidSetting, InvalidSize, WorkersDiffer

EPOCHS = 2


@pytest.fixture(scope="module")
def one(mx, tmp_path_factory):
    """Return one process's final state after a run of `epochs` epochs, and its output."""
    folder = tmp_path_factory.mktemp("one")
    code, errors = ended(start(folder, "--epochs", str(EPOCHS)))
    assert code == 0, errors
    (kept,) = kept_training.read(folder)
    return kept, _epochs(errors)


def _epochs(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("epoch")]


@pytest.mark.slow
def test_two_workers_train_what_one_process_does(one, tmp_path):
    code, errors = ended(start(tmp_path, "--epochs", str(EPOCHS), workers=2))
    assert code == 0, errors
    alone, said = one
    first, second = kept_training.read(tmp_path)
    assert len(kept_training.parameters(alone)) == 6
    for name, values in kept_training.parameters(alone).items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], values, atol=1e-5)
    losses = (first["losses"] + second["losses"]) / 2
    np.testing.assert_allclose(losses, alone["losses"], atol=1e-5)
    # Each had other images.
    assert np.abs(first["losses"] - second["losses"]).min() > 0
    assert first["accuracy"] == alone["accuracy"] > 0.2
    # Rank 0 reports for all, and writes the checkpoint.
    assert second["accuracy"] == -1
    assert _epochs(errors) == said
    assert len(said) == EPOCHS
    assert (tmp_path / "model" / f"baseline-{EPOCHS:04d}.params").exists()


def _kill(folder: Path, role: str) -> None:
    """Kill a process of this role in the job that writes its files to a folder."""
    wanted = {f"ECE408_CACHE={folder}", f"DMLC_ROLE={role}"}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            environment = (each / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if wanted <= set(environment):
            os.kill(int(each.name), signal.SIGKILL)
            return
    raise AssertionError(f"there is no {role}")


@pytest.mark.slow
def test_a_job_whose_server_is_killed_ends_and_goes_on(one, tmp_path):
    state = tmp_path / "training" / "2019sp-baseline" / "epoch-0001.npz"
    job = start(tmp_path, "--epochs", str(EPOCHS), workers=2)
    while not state.exists() and job.poll() is None:
        time.sleep(0.01)
    _kill(tmp_path, "server")
    code, errors = ended(job)
    assert code == 41, errors
    assert errors.splitlines()[-1] == (
        "ece408: error: server 0 was ended by SIGKILL; it printed nothing"
    )
    assert len(_epochs(errors)) == 1
    # With another number of workers, too.
    code, errors = ended(start(tmp_path, "--epochs", str(EPOCHS)))
    assert code == 0, errors
    alone, said = one
    (resumed,) = kept_training.read(tmp_path)
    assert _epochs(errors) == said[1:]
    for name, values in kept_training.parameters(alone).items():
        np.testing.assert_allclose(resumed[name], values, atol=1e-5)
    assert resumed["accuracy"] == alone["accuracy"]


@pytest.fixture
def little(mx, monkeypatch):
    images, labels = little_training.images(200)
    monkeypatch.setattr(fashion_data, "load", lambda kind, size: (images, labels))


RECIPE = training.Recipe("2019sp", epochs=2, batch_size=50)


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_devices_of_one_process_share_the_batch(mx, little, tmp_path, monkeypatch, kvstore):
    """Two contexts of the CPU stand in for GPUs; a run continues with another number of them."""
    alone = training.train(RECIPE, tmp_path / "one")
    contexts = iter([[mx.cpu(0), mx.cpu(1)], [mx.cpu(0), mx.cpu(1), mx.cpu(2)]])
    monkeypatch.setattr(training, "_contexts", lambda *_: next(contexts))
    little_training.interrupted(RECIPE, tmp_path / "two", kvstore)
    shared = training.train(RECIPE, tmp_path / "two", kvstore)
    np.testing.assert_allclose(shared.losses, alone.losses[4:], atol=1e-5)
    assert shared.test_accuracy == alone.test_accuracy


def test_without_a_job_there_are_no_workers(mx, monkeypatch):
    monkeypatch.delenv("DMLC_ROLE", raising=False)
    assert workers.default_kvstore() == "local"
    with pytest.raises(InvalidSetting, match="DMLC_ROLE is not set; start them by ece408 launch"):
        workers.Workers("dist_sync")
    with pytest.raises(InvalidSetting, match="unknown KVStore 'nccl'; choose one of local, device"):
        workers.Workers("nccl")
    monkeypatch.setenv("DMLC_ROLE", "worker")
    assert workers.default_kvstore() == "dist_sync"
    for name in ("DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "here")
    with pytest.raises(InvalidSetting, match="DMLC_PS_ROOT_PORT='here' is not a whole number"):
        workers.Workers("dist_async")


def test_workers_whose_weights_differ_are_told(mx, little, tmp_path, monkeypatch):
    def others_too(self, name, values):
        """Simulate a second worker whose values differ from this one's by a bit."""
        other = np.roll(values, 1, axis=0)
        if name == "digests":
            other[1, 3] += 1
        return values + other

    monkeypatch.setattr(workers.Workers, "sum", others_too)
    monkeypatch.setattr(workers.Workers, "local_batch", lambda self, batch: batch)
    monkeypatch.setattr(training, "_run_epoch", lambda *arguments: [])
    whole = workers.Workers.__init__

    def two(self, kvstore):
        whole(self, kvstore)
        self.size = 2

    monkeypatch.setattr(workers.Workers, "__init__", two)
    with pytest.raises(WorkersDiffer, match="worker 1 are no longer those of worker 0"):
        training.train(RECIPE, tmp_path)


def test_a_batch_that_cannot_be_shared_out_is_refused(mx):
    two = workers.Workers("local")
    two.size = 2
    text = (
        "2 workers cannot share a batch of 25 images equally; give --batch-size 26, or another num"
    )
    with pytest.raises(InvalidSize, match=text):
        two.local_batch(25)
    assert two.local_batch(26) == 13


def test_more_devices_than_images_are_refused(mx, little, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_contexts", lambda *_: [mx.cpu(n) for n in range(60)])
    with pytest.raises(InvalidSize, match="a batch of 50 images is too small for 1 work"):
        training.train(RECIPE, tmp_path)
