from __future__ import annotations

import ctypes
import subprocess
import threading

import pytest

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


def test_a_thread_starts_the_driver_and_makes_contexts(driver):
    before = set(threading.enumerate())
    assert gpu.start_ahead([0, 2, 3])
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert ctypes.c_int.in_dll(driver, "started").value == 1
    assert ctypes.c_int.in_dll(driver, "contexts").value == 1 << 10 | 1 << 12


def test_without_a_driver_nothing_is_started(monkeypatch):
    monkeypatch.setattr(gpu, "_LIBRARY", "libcuda-that-is-not-there.so")
    before = threading.active_count()
    assert not gpu.start_ahead([0])
    assert threading.active_count() == before
