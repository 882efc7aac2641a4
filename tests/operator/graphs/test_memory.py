"""Executors and hybridized blocks leak no memory, neither Python objects nor the C library's
heap."""

import ctypes
import gc
import sys

import pytest

import ece408_op

SHAPE = (2, 3, 9, 8)
LAYERS = 4
TIMES = 20


class _HeapUse(ctypes.Structure):
    """glibc's `struct mallinfo`; bytes in use are `numbers[7]`."""

    _fields_ = [("numbers", ctypes.c_int * 10)]


def _in_use(mx):
    """Return bytes of the C library's heap, and the number of memory blocks of Python's objects."""
    for _ in range(2):
        gc.collect()
        mx.nd.waitall()
    libc = ctypes.CDLL(None)
    libc.mallinfo.restype = _HeapUse
    return libc.mallinfo().numbers[7], sys.getallocatedblocks()


def _expect_no_leak(mx, run):
    """Compare the least growth of both by a call, of some rounds of calls after the first one: what
    leaks grows in each."""
    uses = []
    for _ in range(4):
        for _ in range(TIMES // 2):
            run()
        uses.append(_in_use(mx))
    growth = [[new - old for new, old in zip(*two)] for two in zip(uses[1:], uses)]
    heap, blocks = [2 * min(each) / TIMES for each in zip(*growth)]
    assert heap < 100 * LAYERS
    assert blocks < LAYERS


def _executors(mx, ours):
    """Return a function that makes, trains and drops an executor."""
    convolution = ece408_op.Convolution if ours else mx.sym.Convolution
    symbol = mx.sym.Variable("data")
    for _ in range(LAYERS):
        symbol = convolution(symbol, kernel=(3, 3), pad=(1, 1), num_filter=8)
        symbol = mx.sym.relu(mx.sym.BatchNorm(symbol, fix_gamma=False))

    def run():
        executor = symbol.simple_bind(mx.cpu(), data=SHAPE)
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones(executor.outputs[0].shape))
        executor.forward()[0].wait_to_read()

    return run


@pytest.mark.parametrize("ours", [False, True])
def test_of_executors(mx, ours):
    """Nor do those of MXNet's own that this package has inspected."""
    _expect_no_leak(mx, _executors(mx, ours))


def test_executors_do_not_wait_for_pythons_collector(mx):
    run = _executors(mx, ours=True)
    run()
    _in_use(mx)
    gc.disable()
    try:
        for _ in range(TIMES // 4):
            run()
        mx.nd.waitall()
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 20 * LAYERS * (TIMES // 4)


@pytest.mark.slow
def test_of_blocks(mx):
    """Gluon's layers have new names in each net."""
    x = mx.nd.ones(SHAPE)

    def run():
        net = mx.gluon.nn.HybridSequential()
        for _ in range(LAYERS):
            net.add(ece408_op.Conv2D(8, 3, padding=1), mx.gluon.nn.BatchNorm())
        net.initialize()
        net.hybridize()
        # More calls than it takes to bypass MXNet's CachedOp.
        for _ in range(7):
            net(x).wait_to_read()
        with mx.autograd.record():
            y = net(x)
        y.backward()

    _expect_no_leak(mx, run)
