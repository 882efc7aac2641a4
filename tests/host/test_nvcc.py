"""The search for CUDA's compiler."""

import importlib.machinery

import pytest

from ece408_op.host import gpu


def _nvcc(home):
    path = home / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Return the folder of pip's wheels of CUDA; no nvcc exists yet, here or elsewhere."""
    folder = tmp_path / "site" / "nvidia"
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(gpu, "_USUAL_HOME", tmp_path / "usual")
    return folder


def test_each_place_in_its_turn(wheels, tmp_path, monkeypatch):
    assert gpu.find_nvcc() is None
    older, newest = _nvcc(wheels / "cu12"), _nvcc(wheels / "cu13")
    monkeypatch.setattr(gpu, "_driver_major", lambda: None)
    assert gpu.find_nvcc() == newest
    monkeypatch.setattr(gpu, "_driver_major", lambda: 12)
    assert gpu.find_nvcc() == older
    usual = _nvcc(tmp_path / "usual")
    assert gpu.find_nvcc() == usual
    named = _nvcc(tmp_path / "cu118")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cu118"))
    assert gpu.find_nvcc() == named
    monkeypatch.setattr(gpu.shutil, "which", lambda name: "/on/the/path/nvcc")
    assert str(gpu.find_nvcc()) == "/on/the/path/nvcc"


def _nvrtc(home, folder="lib64"):
    (home / "include").mkdir(parents=True)
    (home / folder).mkdir()
    for name in ("libnvrtc.so.13.0.48", "libnvrtc.so.13", "libnvrtc.so"):
        (home / folder / name).touch()
    return gpu.Nvrtc(home / folder / "libnvrtc.so.13", home / "include")


def test_nvrtc_in_each_place_with_its_headers(wheels, tmp_path, monkeypatch):
    assert gpu.find_nvrtc() is None
    wheel = _nvrtc(wheels / "cu13", "lib")
    assert gpu.find_nvrtc() is None, "without headers"
    (wheel.headers / "cuda_fp16.h").touch()
    assert gpu.find_nvrtc() == wheel
    path = _nvcc(tmp_path / "cuda")
    monkeypatch.setattr(gpu.shutil, "which", lambda name: str(path))
    assert gpu.find_nvrtc() == wheel
    toolkit = _nvrtc(tmp_path / "cuda")
    (toolkit.headers / "cuda_fp16.h").touch()
    assert gpu.find_nvrtc() == toolkit


def test_nvrtc_is_not_newer_than_the_driver(wheels):
    newer = _nvrtc(wheels / "cu13", "lib")
    for folder, names in (("cuda_nvrtc/lib", ["libnvrtc.so.11.2", "libnvrtc.so.12"]),
                          ("cuda_runtime/include", ["cuda_fp16.h"])):  # fmt: skip
        (wheels / folder).mkdir(parents=True)
        for name in names:
            (wheels / folder / name).touch()
    (newer.headers / "cuda_fp16.h").touch()
    assert gpu.find_nvrtc(13) == newer
    older = wheels / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", wheels / "cuda_runtime" / "include"
    assert gpu.find_nvrtc(12) == older


def test_without_any_wheel(wheels, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.find_nvcc() is None
