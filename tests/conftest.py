import contextlib
import functools
import gc
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import compiled_together
import numpy as np
import programs
import pytest
from fake_driver import FakeDriver
from places import HELPERS, KEPT

import ece408_op
from ece408_op import errors, settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cuda.runtime import device, page_locked
from ece408_op.cli.main import execute
from ece408_op.errors import DownloadFailed, NoUsableGpu
from ece408_op.operator import compiled_operator
from ece408_op.operator.loading import load_mxnet

# A shell that starts the tests in the background makes them, and their children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Another build of the CPU kernels, such as one with sanitizers.
if "ECE408_TEST_LIBRARY" in os.environ:
    native.LIBRARY = Path(os.environ["ECE408_TEST_LIBRARY"]).resolve()


@pytest.fixture(scope="session")
def mx():
    if sys.version_info >= (3, 13) or platform.machine() != "x86_64":
        pytest.skip("MXNet needs Python 3.9 to 3.12, and other libraries on other processors")
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    found = load_mxnet()
    # Tests that collect garbage need not go through MXNet's modules.
    gc.freeze()
    return found


@pytest.fixture(scope="session")
def kept():
    """Return a cache in which kernels are compiled once for all tests, their processes and runs."""
    KEPT.mkdir(parents=True, exist_ok=True)
    return KEPT


@pytest.fixture
def emulated(kept, monkeypatch):
    """Run networks in the emulator, with their kernels compiled together."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulator switches stacks on x86-64 only")
    monkeypatch.setattr("ece408_op.network.machines.emulated._machine", compiled_together.machine)
    with settings.override(cache=kept, backend="emulator"):
        yield


@pytest.fixture(params=["to_gpu", "to_cpu"])
def frozen(request):
    """Return one of the functions that take a network from MXNet."""
    return getattr(ece408_op, request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(408)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file of the test's folder, and returns its path."""

    def write(name: str, text: str, mode: int = 0o644) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


@pytest.fixture
def noted(monkeypatch):
    """Return a function that has an object's function note its calls, and returns the list of what
    `note` returns for their arguments: if there is none, all those by position."""

    def watch(owner, name, note=lambda *given, **_: given):
        notes, function = [], getattr(owner, name)

        def noting(*given, **named):
            notes.append(note(*given, **named))
            return function(*given, **named)

        monkeypatch.setattr(owner, name, noting)
        return notes

    return watch


@pytest.fixture
def without_compiled_operator(mx, monkeypatch):
    """Use the operator written in Python, as if the compiled one were missing."""
    monkeypatch.setattr(compiled_operator, "_missing", "this test does without it")


@pytest.fixture
def fake_driver(monkeypatch):
    """Replace CUDA's driver for page-locked memory."""
    # Left by tests on a GPU.
    page_locked.pool.unlock_all()
    fake = FakeDriver()
    monkeypatch.setattr(page_locked, "driver", fake)
    return fake


@pytest.fixture
def pool(fake_driver, monkeypatch):
    """Return an empty pool of the fake driver's page-locked memory."""
    made = page_locked.Pool()
    monkeypatch.setattr(page_locked, "pool", made)
    yield made
    for block in made._blocks:
        block.memory.busy.value = 0
    made.unlock_all()
    assert not fake_driver.locked


@pytest.fixture(autouse=True)
def _no_failure_left_behind():
    """A test must not inherit an operator's failure from the previous one."""
    errors.take_failure()
    yield
    errors.take_failure()


@functools.lru_cache(maxsize=1)
def _why_no_gpu():
    """Return why CUDA kernels cannot run here, or `None`."""
    try:
        device.get(0)
    except NoUsableGpu as error:
        return str(error)
    return None


# Parallel test files that start first; otherwise cores would be idle while the last of them runs.
LONGEST = (
    *("lab/test_emulated.py", "backends/cuda/runtime/test_compiler.py", "lab/test_cheats.py"),
    *("lab/test_check.py", "backends/emulator/test_ladder.py", "lab/test_ranking.py"),
    *("operator/graphs/test_random_graphs.py", "backends/cpu/test_kernels.py"),
    *("backends/cuda/test_kernel_files.py", "course/test_milestone.py", "scripts/test_bench.py"),
    *("course/test_workers.py", "course/test_training.py", "operator/test_networks.py"),
)


def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_runtest_setup(item):
    """Skip tests marked gpu, with the reason, without a GPU, and those also marked alone if other
    tests may use it at the same time."""
    if item.get_closest_marker("gpu") and _why_no_gpu():
        pytest.skip(_why_no_gpu())
    if item.get_closest_marker("alone") and os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("it needs the GPU's memory for itself; run pytest -m 'gpu and alone'")


@pytest.fixture(scope="session")
def fashion_mnist():
    """Skip, with the reason, without Fashion-MNIST; in CI that is a failure."""
    from ece408_op.course.dataset import fashion_data

    try:
        fashion_data.load("t10k", limit=1)
    except DownloadFailed as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kept_with_data(kept, fashion_mnist):
    """Return the same cache, with Fashion-MNIST in it."""
    with contextlib.suppress(FileExistsError):
        (kept / "fashion-mnist").symlink_to(settings.cache() / "fashion-mnist")
    return kept


@pytest.fixture(scope="session")
def run_python():
    """Return a function that runs a program in a separate Python; its result has stdout, stderr and
    returncode."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess:
        own = {"PYTHONPATH": str(HELPERS), **environment}
        return programs.run(sys.executable, "-c", code, **own)

    return run


@pytest.fixture
def run_here(mx, capsys):
    """Return a function that runs the `ece408` command in this process, which has loaded MXNet."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        capsys.readouterr()
        try:
            code = execute(arguments)
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(run_here):
    """Return a function that checks that the `ece408` command ends with a code and prints nothing
    but one line, with this text."""

    def check(code: int, text: str, *arguments: str) -> None:
        result = run_here(*arguments)
        assert result.returncode == code, arguments
        # A milestone says first what it does.
        assert result.stdout == "" or arguments[0] in ("m1.1", "m2.1"), arguments
        assert re.fullmatch("ece408[a-z ]*: error: .*\n", result.stderr), result.stderr
        assert text in result.stderr

    return check


@pytest.fixture
def run_ece408():
    """Return a function that runs the `ece408` command in a separate process."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return programs.run(sys.executable, "-m", "ece408_op", *arguments, **environment)

    return run
