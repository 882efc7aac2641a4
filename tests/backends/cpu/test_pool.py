"""Maxima and averages of random windows, against a plain loop."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools

import numpy as np
import pytest
from studies import guarded

from ece408_op.backends.cpu import native


class _Windows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("size", "count", "kernel", "stride", "pad")]


@dataclasses.dataclass
class Axis:
    size: int
    kernel: int
    stride: int
    pad: int
    is_full: bool = False

    @property
    def count(self):
        spare = self.size + 2 * self.pad - self.kernel
        return (spare + (self.stride - 1 if self.is_full else 0)) // self.stride + 1

    def all_meet(self):
        last = (self.count - 1) * self.stride - self.pad
        return self.size + 2 * self.pad >= self.kernel > self.pad and last < self.size

    def spans(self):
        firsts = [i * self.stride - self.pad for i in range(self.count)]
        return [(max(first, 0), min(first + self.kernel, self.size)) for first in firsts]

    def struct(self):
        return _Windows(self.size, self.count, self.kernel, self.stride, self.pad)


def _axes(rng):
    """Return small and large axes, some with windows that begin or end outside them."""
    while True:
        size = int(rng.choice([1, 2, 5, 7, 8, 15, 16, 17, 31, 35, 64, 112]))
        kernel, stride = int(rng.choice([1, 2, 3, 3, 4, 7, size])), int(rng.choice([1, 2, 2, 3, 5]))
        found = Axis(size, kernel, stride, int(rng.integers(0, kernel)), bool(rng.integers(2)))
        if found.all_meet():
            return found


def _run(rows, columns, lengths, planes, x, threads, isa, side):
    x = guarded.place(x, side, read_only=True)
    y = guarded.place(np.full((planes, rows.count, columns.count), np.nan, np.float32), side)
    given = [ctypes.byref(axis.struct()) for axis in (rows, columns)]
    addresses = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (*lengths, x, y)]
    status = native.library().ece408_pool(
        *given,
        *addresses[:2],
        ctypes.c_int64(planes),
        *addresses[2:],
        threads,
        native.ISA_CODES[isa],
    )
    assert status == 0
    assert guarded.canary_intact(y, side)
    return y


def _expected(rows, columns, lengths, x, reduce):
    y = np.empty((len(x), rows.count, columns.count), np.float64)
    for (i, (top, bottom)), (j, (left, right)) in itertools.product(
        enumerate(rows.spans()), enumerate(columns.spans())
    ):
        y[:, i, j] = reduce(x[:, top:bottom, left:right], axis=(1, 2))
    return y if lengths[0] is None else y / np.outer(*lengths)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_random_windows(isa, threads, rng):
    """Sums of whole numbers are exact, and thus their averages."""
    for _ in range(60):
        rows, columns = _axes(rng), _axes(rng)
        planes, side = int(rng.integers(1, 8)), str(rng.choice(["start", "end"]))
        x = rng.integers(-50, 50, (planes, rows.size, columns.size)).astype(np.float32)
        lost = rng.choice([np.nan, -np.inf], x.shape)
        with_lost = np.where(rng.random(x.shape) < rng.choice([0.01, 0.5]), lost, x)
        with_lost[0] = lost[0]
        with_lost = with_lost.astype(np.float32)
        found = _run(rows, columns, (None, None), planes, with_lost, threads, isa, side)
        # The result for nothing but NaN and -inf is MXNet's.
        numbers = np.fmax(with_lost, np.finfo(np.float32).min)
        expected = _expected(rows, columns, (None, None), numbers, np.max)
        np.testing.assert_array_equal(found, expected)
        lengths = [rng.integers(1, 9, axis.count).astype(np.float32) for axis in (rows, columns)]
        found = _run(rows, columns, lengths, planes, x, threads, isa, side)
        expected = _expected(rows, columns, lengths, x, np.sum).astype(np.float32)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", native.isas())
def test_instruction_sets_agree(isa, rng):
    """Bit for bit, with numbers whose sums are rounded."""
    x = rng.standard_normal((5, 35, 37)).astype(np.float32)
    for stride in (1, 2):
        rows, columns = Axis(35, 3, stride, 1), Axis(37, 3, stride, 1)
        lengths = [np.full(axis.count, 3, np.float32) for axis in (rows, columns)]
        found = _run(rows, columns, lengths, 5, x, 2, isa, "end")
        baseline = _run(rows, columns, lengths, 5, x, 1, "baseline", "end")
        np.testing.assert_array_equal(found, baseline)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_averages_of_whole_planes(isa, threads, rng):
    """More planes than vector lanes, and fewer; one contains NaN."""
    for planes, height, width in itertools.product((1, 5, 16, 37), (1, 7, 13), (1, 3, 7, 40)):
        rows, columns = Axis(height, height, 1, 0), Axis(width, width + 2, 3, 1)
        x = rng.integers(-50, 50, (planes, height, width)).astype(np.float32)
        x[planes // 2, -1, -1] = np.nan
        lengths = [rng.integers(1, 9, 1).astype(np.float32) for _ in range(2)]
        for side in ("start", "end"):
            found = _run(rows, columns, lengths, planes, x, threads, isa, side)
            expected = _expected(rows, columns, lengths, x, np.sum).astype(np.float32)
            np.testing.assert_array_equal(found, expected)
