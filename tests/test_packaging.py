import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
from places import ROOT

from ece408_op import __version__

# Building wheels takes long, and pip downloads build dependencies.
pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path_factory):
    """Return a copy of the checkout, without build products."""
    built = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "copy", ignore=built)


def _pip_wheel(source, folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_wheel_works_away_from_the_checkout(source, tmp_path, fashion_mnist, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = _pip_wheel(source, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert re.fullmatch(rf"ece408_op-{re.escape(__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel],
        check=True,
    )
    # Dependencies come from the tests' environment through a path in a .pth file, which omits this
    # checkout's editable installation.
    site = next((environment / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert (site / "ece408_op" / "py.typed").is_file()
    assert (site / "ece408_op" / "report" / "templates" / "report.md.j2").is_file()
    shutil.rmtree(source)
    command = environment / "bin" / "ece408"
    run = subprocess.run([command, "m2.1", "50"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Op Time: ") == 2
    # The wheel's own files suffice to write and compile a kernel file.
    for arguments in (("new", "mine.cc"), ("check", "mine.cc", "--problem", "b1,c1,h5,w5,m1,k3")):
        lab = subprocess.run([command, "lab", *arguments], capture_output=True, cwd=tmp_path)
        assert lab.returncode == 0, lab.stderr
    code = (
        "import ece408_op.files.resources as r; kernels = r.kernels_dir(); "
        "print(r.__file__, kernels, *(kernels / 'tuned').glob('*.json')); "
        "import mxnet, ece408_op.operator.compiled_operator as f; print(f.missing())"
    )
    where = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    paths, missing = where.stdout.splitlines()
    assert all(path.startswith(str(site)) for path in paths.split())
    assert len(paths.split()) >= 3
    assert missing == "None"

    # In either order.
    for code in ("import mxnet, ece408_op; mxnet.nd.waitall()", "import ece408_op, mxnet"):
        ran = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
    idle = [python, "-c", "import sys; sys.exit('numpy' in sys.modules)"]
    assert subprocess.run(idle, cwd=tmp_path).returncode == 0


def test_no_compiler_is_said_in_one_line(source, tmp_path):
    result = _pip_wheel(source, tmp_path, CXX="/nowhere/c++")
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "needs a C++ compiler" in line]
    assert len(lines) == 1
    assert "CXX=/nowhere/c++ is not there" in lines[0]
