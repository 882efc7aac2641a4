"""Page-locked arrays, from a driver that locks nothing."""

import ctypes
import os
from unittest.mock import Mock

import pytest
from fake_gpu import FakeGpu

from ece408_op.backends.cuda.runtime import page_locked
from ece408_op.errors import GpuFailed, NotEnoughMemory
from ece408_op.host import footprint

SIZE = page_locked.SMALLEST
GPU = FakeGpu()


def _lend(pool, nbytes=SIZE):
    return pool.lend(nbytes, GPU, 2)


def _lent(pool, nbytes=SIZE):
    """Return memory of a size that was requested before."""
    memory = _lend(pool, nbytes)
    return _lend(pool, nbytes) if memory is None else memory


def test_memory_is_lent_from_the_second_time_on(pool, fake_driver):
    assert _lend(pool) is None
    assert not fake_driver.locked
    memory = _lend(pool)
    assert fake_driver.locked == {memory.address: memory.nbytes}
    assert memory.busy.value == 1
    ctypes.memset(memory.address, 7, memory.nbytes)


@pytest.mark.parametrize("nbytes", [SIZE, SIZE + 4, SIZE + (2 << 20)])
def test_there_is_enough_of_it(pool, fake_driver, nbytes):
    memory = _lent(pool, nbytes)
    assert nbytes <= memory.nbytes < nbytes + (2 << 20)
    assert pool.covers(memory.address, nbytes)
    assert pool.covers(memory.address + 4, nbytes - 4)
    assert not pool.covers(memory.address - 4, nbytes)
    assert not pool.covers(memory.address + 4, memory.nbytes)


def test_little_memory_is_not_lent(pool, fake_driver):
    assert [_lend(pool, SIZE - 1) for _ in range(3)] == [None] * 3
    assert not fake_driver.locked


def test_what_is_free_is_lent_again(pool, fake_driver):
    first, second = _lent(pool), _lent(pool)
    assert first.address != second.address
    first.busy.value = 0
    assert _lent(pool).address == first.address
    assert len(fake_driver.locked) == 2


def test_what_nobody_takes_any_more_goes_back(pool, fake_driver, monkeypatch):
    monkeypatch.setattr(page_locked, "_REMEMBERED", 4)
    old, held = _lent(pool), _lent(pool)
    old.busy.value = 0
    other = _lent(pool, 2 * SIZE)
    for _ in range(4):
        other.busy.value = 0
        assert _lent(pool, 2 * SIZE).address == other.address
    assert len(fake_driver.locked) == 3
    new = _lent(pool, 3 * SIZE)
    assert fake_driver.locked.keys() == {held.address, other.address, new.address}


def test_a_machine_with_too_little_memory_lends_none(pool, fake_driver, monkeypatch):
    monkeypatch.setattr(footprint, "available_bytes", lambda: 4 * SIZE - 1)
    assert _lent(pool) is None
    with pytest.raises(NotEnoughMemory, match=r"^0\.0 GiB of page-locked memory would be more"):
        pool.take(SIZE, GPU, 2)
    monkeypatch.setattr(footprint, "available_bytes", lambda: 4 * SIZE)
    assert _lent(pool) is not None


def test_a_driver_that_refuses_is_asked_once(pool, fake_driver):
    fake_driver.refuses = True
    assert _lent(pool) is None
    with pytest.raises(GpuFailed, match="error 801"):
        pool.take(SIZE, GPU, 2)
    fake_driver.refuses = False
    assert _lent(pool) is None
    assert not fake_driver.locked


def test_a_process_without_room_is_lent_none(pool, fake_driver, monkeypatch):
    full = OSError(12, "Cannot allocate memory")
    monkeypatch.setattr(page_locked.mmap, "mmap", Mock(side_effect=full))
    assert _lent(pool) is None
    with pytest.raises(NotEnoughMemory, match=r"cannot be had \(.*Cannot allocate memory\)"):
        pool.take(SIZE, GPU, 2)


def test_a_failed_gpu_does_not_keep_memory_from_children(pool, fake_driver):
    memory = _lent(pool)
    fake_driver.refuses = True
    memory.before_fork()
    assert not pool.covers(memory.address, SIZE)


def test_memory_that_is_asked_for_is_there_at_once(pool, fake_driver):
    small, large = pool.take(1000, GPU, 2), pool.take(2 * SIZE, GPU, 2)
    assert fake_driver.locked.keys() == {small.address, large.address}
    small.busy.value = 0
    assert pool.take(2000, GPU, 2).address == small.address


def test_unlocked_memory_stays_as_long_as_it_is_used(pool, fake_driver):
    free, used = _lent(pool), _lent(pool)
    ctypes.memset(used.address, 9, used.nbytes)
    free.busy.value = 0
    used.before_fork()
    assert not fake_driver.locked
    assert not pool.covers(used.address, SIZE)
    assert ctypes.string_at(used.address, SIZE) == b"\x09" * SIZE
    # A child process has the memory, too.
    child = os.fork()
    if child == 0:
        os._exit(ctypes.string_at(used.address, 1) == b"\x09")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert _lent(pool).address != used.address
