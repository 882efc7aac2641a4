"""The location of kernels and models: in the package if installed, else in the checkout."""

import pytest

from ece408_op.errors import CheckpointMissing, KernelsMissing
from ece408_op.files import resources


def test_kernels_are_found():
    assert (resources.kernels_dir() / "cpu" / "api" / "ece408.h").is_file()


def test_the_package_comes_before_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "ece408_op"
    monkeypatch.setattr(resources, "_PACKAGE", package)
    (tmp_path / "models").mkdir()
    assert resources.models_dir() == tmp_path / "models"
    (package / "models").mkdir(parents=True)
    assert resources.models_dir() == package / "models"


def test_neither_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "ece408_op")
    with pytest.raises(KernelsMissing, match="pip install"):
        resources.kernels_dir()
    with pytest.raises(CheckpointMissing, match="pip install"):
        resources.models_dir()
