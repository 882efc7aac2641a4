import functools
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess

import pytest
from places import ROOT

from ece408_op.cli import gpu_setup
from ece408_op.cli.main import execute
from ece408_op.host import gpu

FIND_DRIVER = gpu.find_driver


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a driver; return the names of its packages, and pip's calls."""
    packages, calls = {"numpy"}, []

    def pip(action, *words):
        calls.append((action, *words))
        names = {each.split("<")[0].split(">")[0] for each in words if not each.startswith("-")}
        (packages.update if action == "install" else packages.difference_update)(names)

    def nvrtc(newest):
        name = "nvidia-cuda-nvrtc" if newest > 12 else "nvidia-cuda-nvrtc-cu12"
        return gpu.Nvrtc(tmp_path / f"lib{newest}", tmp_path) if name in packages else None

    def built(headers, major, folder):
        pip("install", "pycuda")

    monkeypatch.setattr(gpu, "find_driver", lambda: gpu.Driver("12.4", ()))
    monkeypatch.setattr(gpu, "find_nvrtc", nvrtc)
    monkeypatch.setattr(gpu_setup, "_RECORD", tmp_path / "share" / "record.json")
    monkeypatch.setattr(gpu_setup, "_installed", lambda: set(packages))
    monkeypatch.setattr(gpu_setup, "_pip", pip)
    monkeypatch.setattr(gpu_setup, "_build_pycuda", built)
    monkeypatch.setattr(gpu_setup, "_has_pycuda", lambda is_usable: "pycuda" in packages)
    monkeypatch.setattr(gpu_setup.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(gpu_setup, "computes_rightly", lambda backend: True)
    return packages, calls


def test_what_is_missing_is_installed_once_and_removed(machine, capsys):
    packages, calls = machine
    packages.add("nvidia-cuda-runtime-cu12")
    assert execute(["gpu-setup"]) == 0
    wheels = ("nvidia-cuda-nvrtc-cu12<13,>=12.4", "nvidia-cuda-runtime-cu12<13,>=12.4")
    assert calls == [("install", *wheels), ("install", "pycuda")]
    printed = capsys.readouterr().out
    assert "CUDA 12.4\n" in printed
    assert "a first kernel is right" in printed
    assert execute(["gpu-setup"]) == 0
    assert len(calls) == 2
    assert execute(["gpu-setup", "--undo"]) == 0
    assert packages == {"numpy", "nvidia-cuda-runtime-cu12"}
    assert execute(["gpu-setup", "--undo"]) == 0
    assert capsys.readouterr().out.endswith("gpu-setup: removed nothing\n")


def test_what_was_installed_before_a_failure_is_recorded(machine, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "nothing-there")
    assert execute(["gpu-setup", "--cuda", "13"]) == 35
    error = capsys.readouterr().err
    assert error.startswith("ece408: error: PyCUDA is compiled here, and nothing-there is not")
    assert "nvidia-cuda-nvrtc" in json.loads(gpu_setup._RECORD.read_text())
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(gpu_setup.sysconfig, "get_path", lambda name: "/none")
    assert execute(["gpu-setup", "--cuda", "13"]) == 35
    assert "and /none/Python.h is not there; install python3-dev" in capsys.readouterr().err


def test_what_was_installed_before_the_end_is_recorded(machine, monkeypatch):
    packages, _ = machine
    end = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(gpu_setup, "_build_pycuda", lambda *_: end())
    with pytest.raises(SystemExit) as ended:
        execute(["gpu-setup"])
    assert ended.value.code == 143
    assert execute(["gpu-setup", "--undo"]) == 0
    assert packages == {"numpy"}
    assert not gpu_setup._RECORD.parent.exists()


def test_an_old_driver_and_none(machine, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "find_driver", lambda: gpu.Driver("11.8", ()))
    assert execute(["gpu-setup"]) == 18
    assert "supports CUDA up to 11.8, and 12.0 is needed" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "find_driver", functools.partial(FIND_DRIVER, "libnone.so"))
    assert execute(["gpu-setup"]) == 18


@pytest.mark.slow
def test_pycuda_is_built_without_a_driver(tmp_path):
    """In an environment of its own, against wheels."""
    venv = tmp_path / "venv"
    subprocess.run([ROOT / "scripts" / "make_venv.sh", venv], check=True)
    python = venv / "bin" / "python"
    # The package itself is not compiled again.
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "numpy<2", "scipy", "tqdm"], check=True)
    source = tmp_path / "source"
    shutil.copytree(ROOT / "ece408_op", source / "ece408_op")
    (source / "ece408_op-0.dist-info").mkdir()
    text = importlib.metadata.distribution("ece408_op").read_text("METADATA")
    (source / "ece408_op-0.dist-info" / "METADATA").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [python, "-m", "ece408_op", "gpu-setup", "--cuda", "13"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = next(venv.rglob("_driver.*.so"))
    needed = subprocess.run(["readelf", "-d", found], capture_output=True, text=True, check=True)
    assert "libcuda.so.1" in needed.stdout
