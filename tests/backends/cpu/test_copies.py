"""Host memory copied by several threads: every byte, and no others."""

import itertools
import mmap
import platform
import resource

import numpy as np
import pytest

from ece408_op.backends.cpu import native


def _populates():
    """Tell whether this Linux has MADV_POPULATE_WRITE."""
    version = platform.release().split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part))) for part in version) >= (5, 14)


SIZES = (0, 1, 63, 64, 65, 127, 1000, (64 << 10) - 1, (64 << 10) + 1, (1 << 20) + 77)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_byte_arrives_and_no_other_is_touched(rng, threads):
    source = rng.integers(0, 256, (2 << 20), dtype=np.uint8)
    for nbytes, (to_offset, from_offset) in itertools.product(
        SIZES, [(0, 0), (1, 0), (0, 3), (63, 17), (64, 5)]
    ):
        target = np.zeros(nbytes + 256, np.uint8)
        begin = 64 + to_offset
        copied = (target.ctypes.data + begin, source.ctypes.data + from_offset, nbytes)
        native.copy([copied], threads)
        expected = np.zeros_like(target)
        expected[begin : begin + nbytes] = source[from_offset : from_offset + nbytes]
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_several_copies_are_made_at_once(rng, threads):
    sources = [rng.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in SIZES]
    targets = [np.zeros(nbytes + 7, np.uint8) for nbytes in SIZES]
    copies = [(t.ctypes.data + 3, s.ctypes.data, s.nbytes) for t, s in zip(targets, sources)]
    native.copy(copies, threads)
    for target, source in zip(targets, sources):
        np.testing.assert_array_equal(target, np.pad(source, (3, 4)))
    native.copy([], threads)


@pytest.mark.parametrize("threads", [1, 4])
def test_making_memory_leaves_contents_and_takes_any_address(threads):
    for nbytes in (0, 1, 4097, (5 << 20) + 3):
        fresh = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(fresh, np.uint8)
        array[: 1 << 20] = 7
        native.populate(array.ctypes.data + 5, nbytes, threads)
        assert (array[: 1 << 20] == 7).all()
        assert not array[1 << 20 :].any()


@pytest.mark.skipif(not _populates(), reason="Linux makes no memory ahead before 5.14")
def test_made_memory_is_there():
    fresh = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(fresh, np.uint8)
    native.populate(array.ctypes.data, array.nbytes, 2)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array[:: mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100
