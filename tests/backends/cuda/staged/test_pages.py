from __future__ import annotations

import mmap

import numpy as np

from ece408_op.backends.cuda.staged import pages


def test_only_whole_pages_of_large_arrays_are_asked_for(monkeypatch):
    asked = []

    class Library:
        @staticmethod
        def madvise(begin, length, advice):
            asked.append((begin.value, length.value, advice))

    monkeypatch.setattr(pages.ctypes, "CDLL", lambda name: Library)
    pages.advise_huge(4096 + 5, 1 << 20)
    assert not asked
    pages.advise_huge(4096 + 5, 16 << 20)
    assert asked == [(8192, (16 << 20) - 4096, mmap.MADV_HUGEPAGE)]


def test_contents_stay():
    array = np.arange(4 << 20, dtype=np.float32)
    pages.advise_huge(array.ctypes.data, array.nbytes)
    assert (array == np.arange(4 << 20, dtype=np.float32)).all()
