"""Fixtures: a home without data, with a small fake set, or with the genuine Fashion-MNIST."""

import hashlib

import pytest
from fake_data import fake_arrays

from ece408_op.course.dataset import fashion_data, idx


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Set up a home without data, packages and cache; return the cache's path."""
    cache = tmp_path / "cache"
    monkeypatch.delenv("ECE408_DATA", raising=False)
    monkeypatch.setenv("ECE408_CACHE", str(cache))
    monkeypatch.setattr(fashion_data, "PACKAGE_FOLDER", tmp_path / "package")
    return cache


@pytest.fixture
def fake(elsewhere, monkeypatch):
    """Make the small fake set the expected one; return the (empty) cache."""
    files = {}
    for kind, originals in idx.FILES.items():
        files[kind] = tuple(
            idx.Expected(original.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
            for original, array in zip(originals, fake_arrays(kind))
        )
    monkeypatch.setattr(idx, "FILES", files)
    return elsewhere


@pytest.fixture(scope="session")
def fashion_mnist(fashion_mnist):
    """Return the folder with the genuine test set; skip if it is unavailable."""
    return fashion_data.locate("t10k")
