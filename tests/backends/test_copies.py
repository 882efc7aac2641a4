"""Host memory copied by several threads: every byte, and none beside them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ece408_op.backends import native

SIZES = (0, 1, 63, 64, 65, 127, 1000, (64 << 10) - 1, (64 << 10) + 1, (1 << 20) + 77)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_byte_arrives_and_no_other_is_touched(rng, threads):
    source = rng.integers(0, 256, (2 << 20), dtype=np.uint8)
    for nbytes, (to_offset, from_offset) in itertools.product(
        SIZES, [(0, 0), (1, 0), (0, 3), (63, 17), (64, 5)]
    ):
        target = np.zeros(nbytes + 256, np.uint8)
        begin = 64 + to_offset
        native.copy(target.ctypes.data + begin, source.ctypes.data + from_offset, nbytes, threads)
        expected = np.zeros_like(target)
        expected[begin : begin + nbytes] = source[from_offset : from_offset + nbytes]
        np.testing.assert_array_equal(target, expected)
