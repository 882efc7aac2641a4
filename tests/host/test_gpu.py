import ctypes
import subprocess
import threading

import pytest

from ece408_op import __main__
from ece408_op.cli import main
from ece408_op.course.milestone import MILESTONES
from ece408_op.host import gpu

# A driver of three GPUs.
_DRIVER = """
int started, contexts;
int cuInit(unsigned flags) { started++; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index < 3 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { contexts |= 1 << device; return 0; }
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    path = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"]
    subprocess.run(command, input=_DRIVER, text=True, check=True)
    monkeypatch.setattr(gpu, "_LIBRARY", str(path))
    return ctypes.CDLL(str(path))


def _joined(start):
    """Return the result of `start` after its threads have ended."""
    before = set(threading.enumerate())
    found = start()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    return found


def _value(driver, name):
    return ctypes.c_int.in_dll(driver, name).value


def test_a_thread_starts_the_driver_and_makes_contexts(driver):
    assert _joined(lambda: gpu.start_ahead([0, 2, 3]))
    assert (_value(driver, "started"), _value(driver, "contexts")) == (1, 1 << 10 | 1 << 12)


@pytest.mark.parametrize(
    ("line", "started"),
    [(["final", "10"], 1), (["m1.2"], 1), (["m4.1", "--help"], 0), (["m2.1"], 0), ([], 0)],
)
def test_commands_that_need_a_gpu_start_its_driver_first(driver, monkeypatch, line, started):
    ran = []
    monkeypatch.setattr(main, "main", ran.append)
    _joined(lambda: __main__.main(line))
    assert ran == [line]
    assert (_value(driver, "started"), _value(driver, "contexts")) == (started, 0)
    assert tuple(each.name for each in MILESTONES.values() if each.on_gpu) == __main__.ON_GPU


def test_without_a_driver_nothing_is_started(monkeypatch):
    monkeypatch.setattr(gpu, "_LIBRARY", "libcuda-that-is-not-there.so")
    before = threading.active_count()
    assert not gpu.start_ahead([0])
    assert threading.active_count() == before
