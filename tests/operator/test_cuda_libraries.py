import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ece408_op.operator import cuda_libraries


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Return a folder of wheels with MXNet's CUDA build; `names` are the installed
    distributions."""
    names = ["numpy", "mxnet-cu117"]

    def distribution(name):
        if name not in names:
            raise cuda_libraries.importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(locate_file=lambda path: tmp_path / path)

    monkeypatch.setattr(cuda_libraries.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(cuda_libraries, "_loaded", [])
    monkeypatch.setenv("MXNET_CUDNN_LIB_CHECKING", "1")
    return SimpleNamespace(folder=tmp_path, names=names)


def test_the_wheels_libraries_are_loaded_in_order_and_once(wheels, monkeypatch):
    asked = []
    monkeypatch.setattr(
        cuda_libraries.ctypes, "CDLL", lambda path, mode: asked.append((Path(path), mode))
    )
    cuda_libraries.preload()
    cuda_libraries.preload()
    names = [path.name for path, _ in asked]
    assert len(names) == len(set(names)) == len(cuda_libraries._LIBRARIES)
    assert names.index("libcublasLt.so.11") < names.index("libcublas.so.11")
    assert names.index("libcublas.so.11") < names.index("libcusolver.so.11")
    assert names.index("libcudnn_ops_infer.so.8") < names.index("libcudnn_cnn_infer.so.8")
    assert asked[0][0] == wheels.folder / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.11.0"
    assert {mode for _, mode in asked} == {cuda_libraries.ctypes.RTLD_GLOBAL}


def test_a_library_is_found_by_its_soname_afterwards(wheels, run_python):
    compiler = shutil.which("g++") or shutil.which("clang++")
    folder = wheels.folder / "nvidia" / "nvtx" / "lib"
    folder.mkdir(parents=True)
    library = folder / "libnvToolsExt.so.1"
    options = ["-shared", "-x", "c++", "/dev/null", "-Wl,-soname,libnvToolsExt.so.1"]
    subprocess.run([compiler, *options, "-o", str(library)], check=True)
    (wheels.folder / "mxnet_cu117-1.9.1.dist-info").mkdir()
    (wheels.folder / "mxnet_cu117-1.9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mxnet-cu117\nVersion: 1.9.1\n"
    )
    code = (
        "import ctypes, os\n"
        "from ece408_op.operator import cuda_libraries\n"
        "cuda_libraries.preload()\n"
        "ctypes.CDLL('libnvToolsExt.so.1')\n"
        "print(len(cuda_libraries._loaded), os.environ['MXNET_CUDNN_LIB_CHECKING'])\n"
    )
    search = {"PYTHONPATH": str(wheels.folder), "LD_LIBRARY_PATH": ""}
    environment = {**search, "MXNET_CUDNN_LIB_CHECKING": "0"}
    assert run_python(code, **environment).stdout == "1 0\n"
    (wheels.folder / "mxnet_cu117-1.9.1.dist-info").rename(wheels.folder / "mxnet-1.9.1.dist-info")
    assert "libnvToolsExt.so.1: cannot open" in run_python(code, **environment).stderr


def test_what_no_wheel_has_is_left_to_the_system(wheels):
    cuda_libraries.preload()
    assert cuda_libraries._loaded == []


@pytest.mark.parametrize("name", ["mxnet", "mxnet-mkl", "notmxnet-cu117"])
def test_nothing_is_loaded_for_other_builds(wheels, monkeypatch, name):
    wheels.names[1] = name
    monkeypatch.setattr(
        cuda_libraries.ctypes, "CDLL", lambda *arguments, **options: pytest.fail("loaded")
    )
    cuda_libraries.preload()
